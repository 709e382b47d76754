"""A model's folder: `model.safetensors`, which stands alone, and `config.json` for the others.

No torch here: its tensors are turned into arrays through their own methods.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vitcli.atomic import write_text
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.rewrite import rewrite_safetensors
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.errors import OutputError
from vitcli.layouts import timm

SaveDtype = Literal["float32", "float16", "bfloat16"]


def save_checkpoint(
    folder: str | Path,
    tensors: Mapping[str, Any],
    info: CheckpointInfo,
    dtype: SaveDtype | None = "float32",
    train: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's folder, each file whole or not at all; returns the folder.

    Args:
        folder: made if it is not there; other files in it are left alone.
        tensors: numpy arrays or torch tensors (of any device), such as a `state_dict`.
        info: what the checkpoint says beside its tensors.
        dtype: of the stored floating-point tensors; None keeps each tensor's own.
        train: the configuration of the run that made it, for config.json.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror or error}", where=folder) from error
    lazy = {name: _lazy(tensor, dtype) for name, tensor in tensors.items()}
    tensor_file.write(folder / "model.safetensors", lazy, info.to_metadata())
    write_config(folder / "config.json", info, train)
    return folder


def rewrite_info(
    folder: str | Path, info: CheckpointInfo, train: Mapping[str, Any] | None = None
) -> None:
    """Give a model's folder another description; the tensors stay, bit for bit.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        OutputError: a file cannot be written.
    """
    file = Path(folder) / "model.safetensors"
    metadata = tensor_file.read_header(file).metadata
    rewrite_safetensors(file, file, {}, {**metadata, **info.to_metadata()})
    write_config(Path(folder) / "config.json", info, train)


def write_config(
    path: str | Path, info: CheckpointInfo, train: Mapping[str, Any] | None = None
) -> None:
    """Write timm's `config.json` of a checkpoint, with ours under "vit" (and a run's configuration
    under "train" in it).

    Raises:
        OutputError: it cannot be written.
    """
    config = timm.to_config(info)
    if train is not None:
        config["vit"]["train"] = train
    write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _lazy(tensor: Any, dtype: SaveDtype | None) -> LazyTensor:
    """One conversion in memory at a time, whatever the size of the model."""
    own = str(tensor.dtype).removeprefix("torch.")
    stored = dtype if dtype is not None and "float" in own else own

    def read() -> Any:
        array = tensor
        if hasattr(tensor, "detach"):  # torch: numpy has no bfloat16 of its own to take it in
            array = tensor.detach().cpu()
            array = (array.float() if own == "bfloat16" else array).numpy()
        return array.astype(tensor_file.numpy_dtype(stored), copy=False)

    return LazyTensor(stored, tuple(tensor.shape), read)
