"""Resampling a model's tensors to another image size or patch size."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from vitcli.architectures.patches import resize_patches
from vitcli.architectures.posemb import resize, resize_relative, sincos2d
from vitcli.architectures.vit import RELATIVE
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import Architecture, BiTConfig, ModelConfig, PosembMethod, Size

T = TypeVar("T")


def at_size(info: CheckpointInfo, size: Size, method: PosembMethod) -> CheckpointInfo:
    """Return a checkpoint's description for another image size; provenance records the resize.

    Raises:
        ConfigError: the size is not a multiple of the patch size.
    """
    old, new = info.model, info.model.with_image_size(size)
    provenance = {k: v for k, v in info.provenance.items() if k != "input_size"}
    if old.posemb_tables:
        provenance = {k: v for k, v in provenance.items() if k != "metrics"}  # at the old size
        provenance["posemb_resize"] = resize_record(old, new, method)
    preprocess = dataclasses.replace(info.preprocess, size=size)
    return dataclasses.replace(info, model=new, preprocess=preprocess, provenance=provenance)


def resize_record(old: Architecture, new: Architecture, method: PosembMethod) -> dict[str, Any]:
    """The provenance record of a position embedding resize, an `info.Resized`."""
    return {"method": actual_method(old, method), "from": list(old.grid), "to": list(new.grid)}


def resampled_tensors(model: Architecture) -> tuple[str, ...]:
    """Names of the tensors whose shapes depend on the grid or the patch size."""
    patches = () if isinstance(model, BiTConfig) else ("patch_embed.proj.weight",)
    return (*model.posemb_tables, *patches)


def actual_method(model: Architecture, method: PosembMethod) -> PosembMethod:
    """The method to use for a model: transformers antialiases in Dinov2WithRegisters, as timm does.
    (DeiT's token that no head reads counts as a register, but has a position embedding.)"""
    dino = not isinstance(model, BiTConfig) and model.num_registers and model.posemb_prefix == 1
    return "bicubic" if method == "bicubic-hf" and dino else method


def adapt(
    tensors: Mapping[str, T], old: Architecture, new: Architecture, method: PosembMethod
) -> dict[str, T]:
    """Resample the tensors of `old`, numpy or torch, to the grid and the patch size of `new`.

    Only the position embeddings and the patch embedding change; those stored in 16 bits become
    float32. Apart from that and the head, the two configurations must agree.
    """
    adapted = dict(tensors)
    for name in adapted.keys() & set(resampled_tensors(old)):
        tensor = _to_float32(adapted[name])
        resampled = adapt_tensor(name, tensor, old, new, method)
        adapted[name] = resampled if resampled is not tensor else adapted[name]
    return adapted


def _to_float32(tensor: Any) -> Any:
    """Convert to float32, unless the dtype has 32 bits or more."""
    if tensor.itemsize >= 4:
        return tensor
    return tensor.float() if hasattr(tensor, "float") else tensor.astype(np.float32)


def adapt_tensor(
    name: str, tensor: Any, old: Architecture, new: Architecture, method: PosembMethod
) -> Any:
    """Resample one of `resampled_tensors`, numpy or torch; its dtype is kept."""
    assert isinstance(old, ModelConfig) and isinstance(new, ModelConfig)
    (rows, columns), (new_rows, new_columns) = old.grid, new.grid
    if name == "patch_embed.proj.weight":
        return resize_patches(tensor, new.patch_kernel)
    if name == "pos_embed" and old.posemb == "sincos2d":
        if old.grid == new.grid:
            return tensor
        table = sincos2d(new.grid, new.width)  # defined at every size: nothing to interpolate
        return tensor.new_tensor(table) if hasattr(tensor, "new_tensor") else table
    if name == "pos_embed":
        return resize(tensor, old.posemb_prefix, old.grid, new.grid, actual_method(old, method))
    if name.endswith(RELATIVE):
        return resize_relative(tensor, old.grid, new.grid, method)
    if name == "pos_embed_row":
        return resize(tensor, 0, (rows, 1), (new_rows, 1), method)
    return resize(tensor, 0, (columns, 1), (new_columns, 1), method)  # pos_embed_column
