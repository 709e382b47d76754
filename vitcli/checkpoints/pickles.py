"""Torch's pickles (.bin, .pth, .pth.tar), read with `weights_only=True` and nothing else."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitcli.checkpoints.native import LazyTensor, numpy_dtype
from vitcli.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

STATES = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "teacher",
    "target_encoder",
    "model",
    "state_dict",
    "model_state",
    "student",
    "module",
)
"""Where training states keep their weights; averaged ones first, as timm and DINO do."""


def read_pickle(path: Path) -> tuple[dict[str, LazyTensor], list[str]]:
    """The tensors of a torch pickle, and what was chosen where it holds several states.

    Raises:
        CheckpointError: it is damaged, holds what could run code, or no tensors.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # of options; it runs nothing
            found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # whatever a damaged pickle may raise
        refused = "nsupported global" in str(error)
        raise CheckpointError(
            "is a pickle that holds more than tensors, which could run code: it is not read"
            if refused
            else f"is a damaged pickle: {str(error).splitlines()[0] if str(error) else error!r}",
            where=path,
            hint="ask its authors for a safetensors file" if refused else None,
        ) from error
    notes: list[str] = []
    while isinstance(found, dict) and not any(isinstance(v, Tensor) for v in found.values()):
        key = next((key for key in STATES if isinstance(found.get(key), dict)), None)
        if key is None:
            break
        found = found[key]
        notes.append(f"the weights under '{key}'")
    tensors = {k: v for k, v in found.items() if isinstance(v, Tensor)} if _is_dict(found) else {}
    if not tensors:
        raise CheckpointError("is a pickle without a table of tensors", where=path)
    return {name: _lazy(tensor) for name, tensor in tensors.items()}, notes


def _is_dict(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(key, str) for key in found)


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _lazy(tensor: Tensor) -> LazyTensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LazyTensor(dtype, tuple(tensor.shape), functools.partial(to_numpy, tensor))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A tensor's values as they are; numpy has bfloat16 from ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        array: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return array.view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """The way back; read-only arrays are copied."""
    import numpy as np

    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
