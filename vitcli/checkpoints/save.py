"""Saving a model's directory: `model.safetensors`, which is self-contained, and `config.json` for
timm and transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitcli.atomic import make_directory, write_json
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import rewrite
from vitcli.checkpoints.tensor_file import Arrays, read_header, to_lazy, write
from vitcli.config import SaveDtype
from vitcli.fields import check_choice
from vitcli.layouts import timm
from vitcli.layouts.shapes import check_keys


def save_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, Any],
    info: CheckpointInfo,
    dtype: SaveDtype = "float32",
    train: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model's directory, each file whole or not at all; return the directory.

    Args:
        directory: created if it does not exist; other files in it are kept.
        tensors: numpy arrays or torch tensors (of any device), such as a `state_dict`.
        info: the description of the checkpoint.
        dtype: the dtype of the stored floating-point tensors.
        train: the configuration of the run that produced it, for config.json.

    Raises:
        CheckpointError: a tensor is missing, or its shape is not that of `info.model`.
        ConfigError: `dtype` is unknown.
        OutputError: a tensor is not one of the model's, or a file cannot be written.
    """
    check_choice("dtype", SaveDtype, dtype)
    directory = Path(directory)
    make_directory(directory)
    lazy = {name: to_lazy(tensor, dtype) for name, tensor in tensors.items()}
    write_weights(directory / "model.safetensors", lazy, info)
    write_config(directory / "config.json", info, train)
    return directory


def write_weights(path: str | Path, tensors: Arrays, info: CheckpointInfo) -> None:
    """Write the tensors of a model, given by our names, under those that timm can load.

    Raises:
        CheckpointError: a tensor is missing, or its shape is not that of `info.model`.
        OutputError: the file cannot be written.
    """
    lazy = {name: to_lazy(tensor) for name, tensor in tensors.items()}
    stored, _ = timm.Timm().save(info.model, lazy)
    shapes = {name: tensor.shape for name, tensor in lazy.items()}
    check_keys(info.model.tensor_shapes(), shapes, path)
    write(path, stored, info.to_metadata())


def rewrite_info(
    directory: str | Path, info: CheckpointInfo, train: Mapping[str, Any] | None = None
) -> None:
    """Replace the description in a model's directory; its tensors are kept bit for bit.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        OutputError: a file cannot be written.
    """
    file = Path(directory) / "model.safetensors"
    rewrite(read_header(file), file, info.to_metadata())
    write_config(Path(directory) / "config.json", info, train)


def write_config(
    path: str | Path, info: CheckpointInfo, train: Mapping[str, Any] | None = None
) -> None:
    """Write the `config.json` of a checkpoint: timm's, with our description under "vit" and, inside
    that, a run's configuration under "train".

    Raises:
        OutputError: it cannot be written.
    """
    config = timm.to_config(info)
    if train is not None:
        config["vit"]["train"] = train
    write_json(path, config)
