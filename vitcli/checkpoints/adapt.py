"""A model's tensors for pictures of another size or patches of another size: numpy or torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.native import CheckpointInfo
from vitcli.config import ModelConfig, PosembMethod, Size
from vitcli.patches import resize_patches
from vitcli.posemb import resize, sincos2d


def at_size(info: CheckpointInfo, size: Size, method: PosembMethod) -> CheckpointInfo:
    """A checkpoint's description for pictures of another size, and how it got there.

    Raises:
        ConfigError: the size is not a multiple of the patch size.
    """
    old = info.model
    new = old.at(size)
    resized = {"method": method, "from": list(old.grid), "to": list(new.grid)}
    return dataclasses.replace(
        info,
        model=new,
        preprocess=dataclasses.replace(info.preprocess, size=size),
        provenance={**info.provenance, "posemb_resize": resized},
    )


def adapt(
    tensors: Mapping[str, Any], old: ModelConfig, new: ModelConfig, method: PosembMethod
) -> dict[str, Any]:
    """The tensors of `old` resampled to the grid and the patch size of `new`.

    Only the position embeddings and the patch embedding change; where neither size changes, every
    tensor is the one given. The two configurations must agree in all else but the head.
    """
    return {name: adapt_tensor(name, tensor, old, new, method) for name, tensor in tensors.items()}


def adapt_tensor(
    name: str, tensor: Any, old: ModelConfig, new: ModelConfig, method: PosembMethod
) -> Any:
    """One tensor of `adapt`, by its name."""
    (rows, columns), (new_rows, new_columns) = old.grid, new.grid
    if name == "patch_embed.proj.weight":
        return resize_patches(tensor, new.patch_size)
    if name == "pos_embed" and old.posemb == "sincos2d":
        if old.grid == new.grid:
            return tensor
        table = sincos2d(new.grid, new.width)  # defined at every size: nothing to interpolate
        return tensor.new_tensor(table) if hasattr(tensor, "new_tensor") else table
    if name == "pos_embed":
        return resize(tensor, old.posemb_prefix, old.grid, new.grid, method)
    if name == "pos_embed_row":
        return resize(tensor, 0, (rows, 1), (new_rows, 1), method)
    if name == "pos_embed_column":
        return resize(tensor, 0, (columns, 1), (new_columns, 1), method)
    return tensor
