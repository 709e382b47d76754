"""Torch pickles (.bin, .pth, .pth.tar), always read with `weights_only=True`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import re
import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitcli.checkpoints.tensor_file import LazyTensor, Store, numpy_dtype
from vitcli.errors import CheckpointError
from vitcli.typed_json import non_finite_to_none

if TYPE_CHECKING:
    import numpy as np

WEIGHT_KEYS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "teacher",
    "target_encoder",
    "model",
    "state_dict",
    "model_state",
    "model_state_dict",
    "student",
    "module",
)
"""Usual keys of the weights in training states; averaged weights first, as in timm and DINO."""
_MAX_OPTIONS = 1 << 20
"""Maximum length of the options of a run, as JSON."""


def read_pickle(path: Path) -> Store:
    """Open a torch pickle.

    Raises:
        CheckpointError: it is damaged, contains something that could run code, or no tensors.
    """
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):
            # A Namespace only holds options. torch warns about TorchScript, then rejects it.
            warnings.simplefilter("ignore")
            is_zip = zipfile.is_zipfile(path)
            state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise _pickle_error(path, error) from error
    notes, metadata = list[str](), _train_options(state)
    while isinstance(state, dict) and len(notes) < 4:
        search = _WeightSearch()
        keys = [key for key in WEIGHT_KEYS if search.finds(state.get(key), depth=2)][:1]
        if not keys and not search.finds(state):
            keys = [key for key in state if search.finds(state[key])]
        if len(keys) > 1:
            what = f"a pickle with several dictionaries of tensors: '{keys[0]}', '{keys[1]}'"
            what += ", ..." * (len(keys) > 2)
            raise CheckpointError(what, where=path, hint="save one of them with torch.save")
        if not keys:
            break
        state = state[keys[0]]
        notes.append(f"the weights under '{keys[0]}'")
    tensors: dict[str, LazyTensor] = {}
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        tensors = {k: _to_lazy(k, v, path) for k, v in state.items() if isinstance(v, Tensor)}
    if not tensors:
        raise CheckpointError("a pickle that contains no dictionary of tensors", where=path)
    return Store(path, "pickle", tensors, metadata, notes)


class _WeightSearch:
    """A search for dictionaries of weights. Each one is searched once: a file that has it only once
    may contain it in a million places, or in itself."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], bool] = {}

    def finds(self, state: Any, depth: int = 0) -> bool:
        """Whether it is a dictionary of weights, or contains one up to `depth` levels down. It has
        matrices: other tensors may be counters or random states."""
        if not isinstance(state, dict):
            return False
        key, values = (id(state), depth), state.values()
        if key not in self.found:
            self.found[key] = any(isinstance(value, Tensor) and value.ndim > 1 for value in values)
            if depth and not self.found[key]:
                self.found[key] = any(self.finds(value, depth - 1) for value in values)
        return self.found[key]


def _train_options(state: Any) -> dict[str, str]:
    """{"args": JSON}: the options of the run that saved a training state, if it contains them."""
    options = state.get("args") if isinstance(state, dict) else None
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        encoder = json.JSONEncoder(default=lambda value: None)
        # Lists or strings that a file has only once, but in many places, can be gigabytes of JSON.
        lengths = itertools.accumulate(map(len, encoder.iterencode(options)))
        if isinstance(options, dict) and all(length < _MAX_OPTIONS for length in lengths):
            return {"args": encoder.encode(non_finite_to_none(options))}
    return {}


def _pickle_error(path: Path, error: Exception) -> CheckpointError:
    """The error for a pickle that torch rejects; torch's own message suggests running its code."""
    hint = "use a safetensors file of the same weights, or save only the state_dict()"
    with contextlib.suppress(Exception), zipfile.ZipFile(path) as archive:
        # TorchScript, as in OpenAI's CLIP releases; torch.export.
        programs = {
            "/constants.pkl": "a TorchScript archive",
            "/models/model.json": "a .pt2 archive",
        }
        names = archive.namelist()
        for member, description in programs.items():
            if any(name.endswith(member) for name in names):
                message = f"{description}, which is a program; nothing in it was run"
                return CheckpointError(message, where=path, hint=hint)
    if type(error).__name__ == "UnpicklingError":  # raised by torch for all but tensors
        match = re.search(r"GLOBAL (\S+)|[Cc]lass (\S+\.\S+)", str(error))
        contents = f"objects ({match[1] or match[2]})" if match else "objects, or is damaged"
        message = f"a pickle that contains code or {contents}; nothing in it was run"
        return CheckpointError(message, where=path, hint=hint)
    reason = (str(error).splitlines() or [repr(error)])[0]
    return CheckpointError(f"damaged pickle: {reason}", where=path)


def _to_lazy(name: str, tensor: Tensor, path: Path) -> LazyTensor:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    # Reject sparse tensors, and expanded ones that are larger than their storage.
    if not dense or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(f"'{name}' is not stored as a plain tensor", where=path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    read = functools.partial(to_numpy, tensor)
    return LazyTensor(dtype, tuple(tensor.shape), read, (name,))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Convert a tensor to numpy with the same dtype; bfloat16 is that of ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        array: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return array.view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def from_numpy(array: np.ndarray) -> Tensor:
    """Convert an array to torch with the same dtype; a read-only one is copied."""
    import numpy as np

    array = np.require(array, requirements=["C", "W"])
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
