"""A safetensors file: an 8-byte little-endian length, a JSON header of that length, and the bytes
of the tensors, back to back (https://github.com/huggingface/safetensors, "Format").

The library reads tensors and validates the whole header. The header is parsed here because it
imports numpy (0.1 s), and files are written here because its writer needs all tensors at once.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitcli.atomic import atomic_write
from vitcli.errors import CheckpointError, wrap_os_errors
from vitcli.typed_json import from_json, parse

if TYPE_CHECKING:
    import numpy as np

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors dtype -> numpy dtype; bfloat16 is that of ml_dtypes."""
FLOATS = tuple(name for name in DTYPES.values() if "float" in name)
"""Floating-point dtypes, those that the weights of a model may have."""


class LazyTensor(NamedTuple):
    """A tensor that is read or computed on demand."""

    dtype: str
    """Name of the numpy dtype."""
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    sources: tuple[str, ...] = ()
    """Names in the file of the tensors that it is read from; empty if it is computed."""


def zeros_like(tensor: LazyTensor) -> LazyTensor:
    """Zeros of the same shape and dtype."""
    return tensor._replace(read=lambda: tensor.read() * 0, sources=())


Arrays = Mapping[str, Any]
"""numpy arrays, torch tensors or `LazyTensor`s."""


def to_lazy(tensor: Any, dtype: str | None = None) -> LazyTensor:
    """Wrap a numpy array or a torch tensor, of any device, with its floats cast to `dtype`. It is
    converted by its own methods, without torch, when it is read: one is in memory at a time."""
    if isinstance(tensor, LazyTensor):
        return tensor
    stored_dtype = getattr(tensor.dtype, "name", str(tensor.dtype).removeprefix("torch."))
    is_bfloat16 = stored_dtype == "bfloat16"
    stored_dtype = dtype if dtype and "float" in stored_dtype else stored_dtype

    def read() -> np.ndarray:
        array = tensor
        if hasattr(tensor, "detach"):  # torch, whose bfloat16 has no .numpy()
            array = tensor.detach().cpu()
            array = (array.float() if is_bfloat16 else array).numpy()
        converted: np.ndarray = array.astype(numpy_dtype(stored_dtype), copy=False)
        return converted

    return LazyTensor(stored_dtype, tuple(tensor.shape), read)


OnProgress = Callable[[int, int], None]
"""Called with the number of tensors read so far and the total."""


def ignore_progress(done: int, total: int) -> None:
    """The default `OnProgress`."""


def with_progress(tensors: Arrays, on_progress: OnProgress) -> dict[str, LazyTensor]:
    """Wrap tensors so that `on_progress` is called with the number read so far and the total."""
    numbers = itertools.count(1)

    def wrap(tensor: LazyTensor) -> LazyTensor:
        def read() -> np.ndarray:
            array = tensor.read()
            on_progress(next(numbers), len(tensors))
            return array

        return tensor._replace(read=read)

    return {name: wrap(to_lazy(tensor)) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Store:
    """An open file of named arrays, which are read on demand."""

    path: Path
    kind: str
    """A key of `store.READERS`."""
    tensors: dict[str, LazyTensor]
    """In file order."""
    metadata: dict[str, str] = field(default_factory=dict)
    """Strings stored beside the arrays."""
    notes: list[str] = field(default_factory=list)
    """Which weights were chosen from a file with several models, such as averaged ones."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


MAX_HEADER = 100_000_000
"""Bytes that the header of a safetensors file may have, as in the safetensors library."""

RESIZE_KEY = "posemb_resize"
"""Metadata key of the record of a resize, for layouts that have no other place for it."""


def require_file(path: Path) -> None:
    """Raise CheckpointError for a pipe or a device, which could block a reader forever."""
    if path.exists() and not path.is_file():
        raise CheckpointError("not a regular file", where=path)


def read_header(path: str | Path) -> Store:
    """Read the header of a safetensors file: names, dtypes and shapes of tensors, and metadata.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or has a damaged header.
    """
    try:
        with wrap_os_errors(CheckpointError, "cannot be read", path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ValueError(f"its header has {length:,} bytes, more than {MAX_HEADER:,}")
            if length > size - 8:
                raise ValueError(f"the file has {size:,} bytes, too few for its header")
            entries = parse(file.read(length))
        metadata, tensors, end = entries.pop("__metadata__", {}), {}, 0
        for name, entry in entries.items():
            dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, *offsets)):
                raise ValueError(f"the shape or offsets of '{name}' are invalid")
            read = functools.partial(_read_tensor, path, name)
            dtype = DTYPES.get(dtype, str(dtype))
            tensors[name] = LazyTensor(dtype, tuple(shape), read, (name,))
            end = max(end, offsets[1])
        if 8 + length + end != size:
            raise ValueError(f"the file has {size:,} bytes instead of {8 + length + end:,}")
        return Store(Path(path), "safetensors", tensors, from_json(dict[str, str], metadata))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _damaged_error(path, error) from error


def check_types(
    tensors: Mapping[str, LazyTensor], where: Path, types: Collection[str] = tuple(DTYPES.values())
) -> None:
    """Raise CheckpointError for a tensor whose dtype is not in `types`."""
    for name, tensor in tensors.items():
        if tensor.dtype not in types:
            raise CheckpointError(f"'{name}' has the unsupported type {tensor.dtype}", where=where)


def _read_tensor(path: str | Path, name: str) -> np.ndarray:
    import ml_dtypes  # noqa: F401 - from then on the library can make bfloat16 arrays
    from safetensors import SafetensorError, safe_open

    try:
        # Reopened for each tensor: pages of a file that stays mapped would fill the memory.
        with safe_open(path, framework="np") as file:
            array: np.ndarray = file.get_tensor(name)
            return array
    except (OSError, SafetensorError, AttributeError) as error:  # a dtype unknown to numpy
        raise _damaged_error(path, error) from error


def _damaged_error(path: str | Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"not a valid safetensors file: {error}",
        where=path,
        hint="download or copy the file again",
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype with this name, little-endian as in files."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name).newbyteorder("<")


def write(path: str | Path, tensors: Arrays, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file, whole or not at all, with one tensor in memory at a time.

    The order is the mapping's, but wider dtypes come first, so that every tensor is aligned.

    Raises:
        OutputError: the file cannot be written.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    lazy = {name: to_lazy(tensor) for name, tensor in tensors.items()}
    sizes = {name: numpy_dtype(tensor.dtype).itemsize for name, tensor in lazy.items()}
    order = sorted(lazy, key=lambda name: -sizes[name])
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        shape, code = list(lazy[name].shape), codes[lazy[name].dtype]
        start, end = end, end + math.prod(shape) * sizes[name]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    with atomic_write(path) as file:  # turns UnicodeEncodeError into OutputError
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        for name in order:
            file.write(tensor_bytes(lazy[name]))


def tensor_bytes(tensor: LazyTensor) -> memoryview:
    """The bytes of a tensor as stored in a file: C order, little-endian."""
    import numpy as np

    array = tensor.read()
    if (array.dtype.name, array.shape) != tensor[:2]:
        raise ValueError(f"announced {tensor[:2]}, made {(array.dtype.name, array.shape)}")
    if array.ndim == 2 and array.flags.f_contiguous:  # a transposed kernel
        # Tiles that fit in the CPU cache: several times faster than all at once.
        transposed, array = array, np.empty(array.shape, array.dtype)
        for row in range(0, array.shape[0], 256):
            for column in range(0, array.shape[1], 64):
                tile = np.s_[row : row + 256, column : column + 64]
                array[tile] = transposed[tile]
    return np.ascontiguousarray(array, numpy_dtype(tensor.dtype)).reshape(-1).view(np.uint8).data
