"""Torch's pickles (.bin, .pth, .pth.tar), read with `weights_only=True` and nothing else."""

from __future__ import annotations

import argparse
import functools
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype
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
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            # A Namespace holds options and runs nothing. torch warns of TorchScript and refuses it.
            warnings.simplefilter("ignore")
            found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except Exception as error:  # whatever a damaged pickle may raise
        raise _refusal(path, error) from error
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


def _refusal(path: Path, error: Exception) -> CheckpointError:
    """What torch's refusal of a file means."""
    said = str(error)
    if "TorchScript" in said:  # as OpenAI released CLIP
        return CheckpointError(
            "is a TorchScript archive, a program with its weights, which could run code: it is "
            "not read",
            where=path,
            hint="take a safetensors file of the same weights, or save its state_dict() by itself",
        )
    if named := re.search(r"(?i:unsupported global): GLOBAL (\S+)|Unsupported class (\S+)", said):
        return CheckpointError(
            f"is a pickle that holds more than tensors, which could run code: it is not read "
            f"(it asks for {named[1] or named[2]})",
            where=path,
            hint="ask its authors for a safetensors file",
        )
    return CheckpointError(
        f"is a damaged pickle: {said.splitlines()[0] if said else repr(error)}", where=path
    )


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
