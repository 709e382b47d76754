"""Our own checkpoint file: safetensors, with all that a model needs in the header.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, then the
tensors' bytes, back to back in the order of the header's offsets
(https://github.com/huggingface/safetensors, "Format"). The header is read here and not through the
library, because `vit info` needs nothing else, and so that a file that lies gets a sentence.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitcli.atomic import whole_file
from vitcli.checkpoints.copying import Extent, append, made_ahead
from vitcli.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    import numpy as np

MAX_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer headers too."""

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
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
"""safetensors' names of element types and numpy's (bfloat16 and the float8s are ml_dtypes')."""

ITEM_SIZES = {name: 1 if "8" in name or name == "BOOL" else int(name[-2:]) // 8 for name in DTYPES}


class TensorSpec(NamedTuple):
    """What a header says of one tensor; `start` and `end` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds, without its numbers."""

    tensors: dict[str, TensorSpec]
    metadata: dict[str, str]
    data_start: int
    """Offset in the file of the first tensor's first byte."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.tensors.items()}


class LazyTensor(NamedTuple):
    """A tensor to be written that is made only when its turn comes."""

    dtype: str
    """numpy's name of the element type."""
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    extent: Extent | None = None
    """Where its bytes lie on the disk just as they are to be written, if they do."""


# ---------------------------------------------------------------------------------------------
# Reading


def read_header(path: str | Path) -> Header:
    """The header of a safetensors file, checked against the file's length to the byte.

    Raises:
        CheckpointError: the file is missing, cut short, or its header contradicts itself or it.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise _damaged(path, f"has {size} bytes, too few for a safetensors file")
            if length > min(size - 8, MAX_HEADER):
                raise _damaged(
                    path, f"claims a header of {length:,} bytes in a file of {size:,} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=path) from error
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
        tensors, metadata = _parse(header)
        _check_offsets(tensors, size - 8 - length)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, JSONDecodeError too
        raise _damaged(path, f"has a damaged safetensors header: {error}") from error
    return Header(tensors, metadata, 8 + length)


def _damaged(path: str | Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=path, hint="fetch or copy the file again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON allows a key twice and Python keeps the last: which tensor would that be?"""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(k for k in keys if keys.count(k) > 1)}' stands twice")
    return result


def _parse(header: Any) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Raises ValueError with what is wrong in a JSON header."""
    if not isinstance(header, dict):
        raise ValueError("it is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not a table of strings")
    tensors = {}
    for name, entry in header.items():
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
            raise ValueError(f"'{name}' is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            raise ValueError(f"'{name}' has the unknown element type {dtype!r:.40}")
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            raise ValueError(f"'{name}' has a bad shape or bad offsets")
        spec = TensorSpec(dtype, tuple(shape), *offsets)
        if spec.end - spec.start != math.prod(shape) * ITEM_SIZES[dtype]:
            raise ValueError(
                f"'{name}' of shape {spec.shape} and type {dtype} does not take the "
                f"{spec.end - spec.start} bytes that its offsets give it"
            )
        tensors[name] = spec
    return tensors, metadata


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value
    )


def _check_offsets(tensors: Mapping[str, TensorSpec], available: int) -> None:
    """Tensors lie back to back and fill the file; raises ValueError where they do not."""
    end = 0
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if spec.start != end:
            kind = "overlaps the tensor before it" if spec.start < end else "leaves a gap before it"
            raise ValueError(f"'{name}' {kind}")
        end = spec.end
    if end > available:
        raise ValueError(f"it announces {end:,} bytes of tensors and {available:,} are there")
    if end < available:
        raise ValueError(f"{available - end:,} bytes follow the last tensor")


def read_tensor(path: str | Path, header: Header, name: str) -> np.ndarray:
    """One tensor as a read-only array over the mapped file; nothing is copied.

    Raises:
        CheckpointError: the file has no such tensor, or has gone.
    """
    import numpy as np

    if name not in header.tensors:
        raise CheckpointError(f"has no tensor '{name}'", where=path)
    spec = header.tensors[name]
    if spec.start == spec.end:  # an empty file region cannot be mapped
        return np.zeros(spec.shape, numpy_dtype(DTYPES[spec.dtype]))
    try:
        return np.memmap(
            path,
            mode="r",
            dtype=numpy_dtype(DTYPES[spec.dtype]),
            shape=spec.shape,
            offset=header.data_start + spec.start,
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from error


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of that name, little-endian as files are; bfloat16 comes from ml_dtypes."""
    import numpy as np

    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extension
    return np.dtype(name).newbyteorder("<")


# ---------------------------------------------------------------------------------------------
# Writing


def write(
    path: str | Path,
    tensors: Mapping[str, np.ndarray | LazyTensor],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file whole or not at all, two tensors in memory at a time: the next is
    made while one is written. What lies on the disk as it is to be written is copied there.

    The order is the mapping's, but wider types come first, so that each tensor lies aligned.

    Raises:
        OutputError: the file cannot be written (no such folder, no permission, disk full).
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order = sorted(tensors, key=lambda n: -ITEM_SIZES[names[_dtype_name(tensors[n])]])
    end = 0
    for name in order:
        dtype, shape = names[_dtype_name(tensors[name])], list(tensors[name].shape)
        start, end = end, end + math.prod(shape) * ITEM_SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    start_of_file = header_bytes(entries, path)
    makers = [functools.partial(_made, tensors[name]) for name in order]
    with whole_file(path) as file:
        file.write(start_of_file)
        append(file, made_ahead(makers))


def _made(tensor: np.ndarray | LazyTensor) -> memoryview | Extent:
    if isinstance(tensor, LazyTensor) and tensor.extent is not None:
        tensor.read()  # costs nothing, but for who wants to look at the numbers on the way
        return tensor.extent
    return tensor_bytes(tensor)


def header_bytes(entries: Mapping[str, Any], path: str | Path) -> bytes:
    """The start of a file: the length of the header and the header. Raises OutputError where no
    reader would take it."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise OutputError(
            f"cannot be written: its header would have {len(text):,} bytes, and readers stop "
            f"at {MAX_HEADER:,}",
            where=path,
        )
    return len(text).to_bytes(8, "little") + text


def _dtype_name(tensor: np.ndarray | LazyTensor) -> str:
    return tensor.dtype if isinstance(tensor, LazyTensor) else tensor.dtype.name


def tensor_bytes(tensor: np.ndarray | LazyTensor) -> memoryview:
    """The bytes of a tensor as they stand in the file: C order, little-endian."""
    import numpy as np

    array = tensor.read() if isinstance(tensor, LazyTensor) else tensor
    if isinstance(tensor, LazyTensor) and (array.dtype.name, array.shape) != tensor[:2]:
        raise ValueError(f"announced {tensor[:2]}, made {(array.dtype.name, array.shape)}")
    array = np.ascontiguousarray(_turned(array), numpy_dtype(array.dtype.name))
    return array.reshape(-1).view(np.uint8).data


def _turned(array: np.ndarray, side: int = 256) -> np.ndarray:
    """A matrix that lies column by column, row by row: in blocks, because by whole rows each number
    costs a line of the cache. Any other array as it is."""
    import numpy as np

    if array.ndim != 2 or not array.flags.f_contiguous or min(array.shape) < side:
        return array
    turned = np.empty(array.shape, array.dtype)
    for row in range(0, array.shape[0], side):
        for column in range(0, array.shape[1], side):
            block = slice(row, row + side), slice(column, column + side)
            turned[block] = array[block]
    return turned
