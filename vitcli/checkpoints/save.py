"""Saving a model's directory: `model.safetensors`, which is self-contained, and `config.json` for
timm and transformers. torch is not imported: tensors are converted by their own methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitcli.atomic import make_directory, write_json
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import rewrite
from vitcli.checkpoints.tensor_file import Arrays, LazyTensor, numpy_dtype, read_header, write
from vitcli.config import SaveDtype
from vitcli.layouts import timm


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
        OutputError: the directory or a file cannot be written.
    """
    directory = Path(directory)
    make_directory(directory)
    lazy = {name: _to_lazy(tensor, dtype) for name, tensor in tensors.items()}
    write_weights(directory / "model.safetensors", lazy, info)
    write_config(directory / "config.json", info, train)
    return directory


def write_weights(path: str | Path, tensors: Arrays, info: CheckpointInfo) -> None:
    """Write the tensors of a model, given by our names, under timm's names.

    Raises:
        OutputError: the file cannot be written.
    """
    write(path, timm.to_stored_names(info.model, tensors), info.to_metadata())


def rewrite_info(
    directory: str | Path, info: CheckpointInfo, train: Mapping[str, Any] | None = None
) -> None:
    """Replace the description in a model's directory; its tensors are kept bit for bit.

    Raises:
        CheckpointError: there is no such model, or it is damaged.
        OutputError: a file cannot be written.
    """
    file = Path(directory) / "model.safetensors"
    rewrite(read_header(file), file, {}, info.to_metadata())
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


def _to_lazy(tensor: Any, dtype: SaveDtype) -> LazyTensor:
    """Convert a tensor only when it is read, so that just one is in memory at a time."""
    source_dtype = str(tensor.dtype).removeprefix("torch.")
    stored_dtype = dtype if "float" in source_dtype else source_dtype

    def read() -> Any:
        array = tensor
        if hasattr(tensor, "detach"):  # torch, whose bfloat16 has no .numpy()
            array = tensor.detach().cpu()
            array = (array.float() if source_dtype == "bfloat16" else array).numpy()
        return array.astype(numpy_dtype(stored_dtype), copy=False)

    return LazyTensor(stored_dtype, tuple(tensor.shape), read)
