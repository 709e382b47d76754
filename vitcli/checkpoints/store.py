"""Files that hold named arrays: safetensors (whole or in shards), npz, torch pickles.

What they are is told by their bytes. Arrays are read when their turn comes, one at a time.
"""

from __future__ import annotations

import functools
import json
import math
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.copying import Extent
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

MOST_INFLATED = 60
"""A zip archive of weights is at most so many times smaller than they are (zeroed heads shrink to a
thousandth, but they are not alone)."""


@dataclass(frozen=True)
class Store:
    """An open file of arrays."""

    path: Path
    kind: str
    """"safetensors", "shards", "npz" or "pickle"."""
    tensors: dict[str, LazyTensor]
    metadata: dict[str, str] = field(default_factory=dict)
    """Of a safetensors file."""
    notes: list[str] = field(default_factory=list)
    """What was chosen on the way: the EMA weights of a training state, say."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def kind_of(path: Path) -> str:
    """What a file is, by its first bytes and, for a zip archive, by its members.

    Raises:
        CheckpointError: it cannot be read, is none of them, or is a pointer of git lfs.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        if start.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return "npz" if any(name.endswith(".npy") for name in names) else "pickle"
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from error
    if start.startswith(b"version https:/"):
        raise CheckpointError(
            "is a pointer of git lfs: the file itself was never fetched", where=path
        )
    if start.startswith(b"\x80") and start[8:9] != b"{":  # no length of a header of JSON
        return "pickle"
    if start.startswith(b"{"):
        return "shards"
    if len(start) > 8 and start[8:9] != b"{":
        raise CheckpointError(
            "is no checkpoint: neither safetensors, nor an npz, nor a pickle of torch's", where=path
        )
    return "safetensors"


def open_store(path: Path) -> Store:
    """The arrays of a file, whatever it is.

    Raises:
        CheckpointError: it is damaged, or nothing that is known.
    """
    kind = kind_of(path)
    if kind == "npz":
        return Store(path, kind, read_npz(path))
    if kind == "pickle":
        from vitcli.checkpoints.pickles import read_pickle

        tensors, notes = read_pickle(path)
        return Store(path, kind, tensors, notes=notes)
    if kind == "shards":
        return Store(path, kind, _read_shards(path))
    header = tensor_file.read_header(path)
    return Store(path, kind, _read_safetensors(path, header), header.metadata)


def files_of(path: Path) -> list[Path]:
    """The files whose bytes decide what `open_store(path)` holds."""
    if kind_of(path) != "shards":
        return [path]
    return [path, *(path.with_name(name) for name in sorted(set(_read_index(path).values())))]


def _read_safetensors(path: Path, header: tensor_file.Header) -> dict[str, LazyTensor]:
    return {
        name: LazyTensor(
            tensor_file.DTYPES[spec.dtype],
            spec.shape,
            functools.partial(tensor_file.read_tensor, path, header, name),
            Extent(path, header.data_start + spec.start, spec.end - spec.start),
        )
        for name, spec in header.tensors.items()
    }


def _read_index(path: Path) -> dict[str, str]:
    """Names of tensors and of the files that they are in, from `model.safetensors.index.json`."""
    try:
        index = json.loads(path.read_text("utf-8"))
        if isinstance(index, dict) and "weight_map" not in index:
            hint = f"give the folder that it lies in: {path.parent}"
            what = "is no index of safetensors files, and no checkpoint"
            raise CheckpointError(what, where=path, hint=hint)
        names: dict[str, str] = index["weight_map"]
        if any(Path(file).name != file for file in names.values()):
            raise ValueError("it names files outside its folder")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is no index of safetensors files: {error}", where=path) from error
    return names


def _read_shards(path: Path) -> dict[str, LazyTensor]:
    """The tensors that an index finds in several files."""
    names = _read_index(path)
    shards = {}
    for name in set(names.values()):
        file = path.with_name(name)
        shards[name] = _read_safetensors(file, tensor_file.read_header(file))
    missing = [name for name, file in names.items() if name not in shards[file]]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are not in the files that it names: {missing[0]}", where=path
        )
    return {name: shards[file][name] for name, file in names.items()}


def read_npz(path: Path) -> dict[str, LazyTensor]:
    """The arrays of an .npz file; big_vision's bfloat16, which numpy calls V2, is told as such.

    Raises:
        CheckpointError: it is damaged, holds Python objects, or inflates beyond reason.
    """
    try:
        archive = zipfile.ZipFile(path)
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        inflated = sum(member.file_size for member in members)
        if inflated > MOST_INFLATED * path.stat().st_size + (1 << 26):
            raise CheckpointError(
                f"would inflate to {inflated:,} bytes, more than weights do", where=path
            )
        found = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise CheckpointError(f"holds the array '{name}' twice", where=path)
            found[name] = _npy(archive, member, path)
        return found
    except _DAMAGED as error:
        raise CheckpointError(f"is a damaged npz file: {error}", where=path) from error


_DAMAGED = (
    OSError,
    zipfile.BadZipFile,
    zlib.error,
    ValueError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    TypeError,
)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> LazyTensor:
    """One array of an archive, its header read."""
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(file)
        start = file.tell()
    if dtype.hasobject:
        raise CheckpointError(
            f"'{member.filename}' holds Python objects, which could run code", where=path
        )
    if start + math.prod(shape) * dtype.itemsize != member.file_size:
        raise CheckpointError(
            f"'{member.filename}' has not the length of its shape {shape}", where=path
        )
    native_dtype: Any = tensor_file.numpy_dtype("bfloat16") if dtype.str == "|V2" else dtype

    def read() -> np.ndarray:
        import numpy as np

        try:
            data = _member_bytes(archive, member, path)
        except _DAMAGED as error:
            raise CheckpointError(f"is a damaged npz file: {error}", where=path) from error
        array = np.frombuffer(data, native_dtype, offset=start)
        return array.reshape(shape, order="F" if fortran else "C")

    return LazyTensor(native_dtype.name, tuple(shape), read)


def _member_bytes(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Any:
    """What a member holds, its CRC checked; one that is stored as it is stays on the disk, mapped.

    Raises:
        zipfile.BadZipFile: the CRC is another.
    """
    import numpy as np

    if member.compress_type != zipfile.ZIP_STORED or not member.file_size:
        return archive.read(member)
    with open(path, "rb") as file:
        file.seek(member.header_offset + 26)  # of a local header: the lengths of what follows it
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    start = member.header_offset + 30 + name + extra
    data = np.memmap(path, np.uint8, "r", start, (member.file_size,))
    if zlib.crc32(data.data) != member.CRC:
        raise zipfile.BadZipFile(f"Bad CRC-32 for file {member.filename!r}")
    return data
