"""An .npz file: a zip archive with one .npy file per array. numpy reads and writes their headers;
the arrays are read and written here one at a time, whereas numpy needs all of them at once.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli.atomic import atomic_write
from vitcli.checkpoints.tensor_file import (
    RESIZE_KEY,
    Arrays,
    LazyTensor,
    Store,
    numpy_dtype,
    tensor_bytes,
    to_lazy,
)
from vitcli.data.files import max_unpacked_size
from vitcli.errors import CheckpointError, VitError, wrap_os_errors

if TYPE_CHECKING:
    import numpy as np


@contextlib.contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert whatever zipfile and numpy raise for a damaged file into a CheckpointError."""
    try:
        with wrap_os_errors(CheckpointError, "cannot be read", path):
            yield
    except (VitError, MemoryError):
        raise
    except Exception as error:
        # EOFError has no message; after the first line, numpy suggests trusting the file.
        reason = str(error).partition("\n")[0] or "it is truncated"
        raise CheckpointError(f"damaged npz file: {reason}", where=path) from error


def open_npz(path: Path) -> Store:
    """Open an .npz file.

    Raises:
        CheckpointError: the file is damaged, contains Python objects, or looks like a zip bomb.
    """
    with checkpoint_errors(path), open(path, "rb") as file:
        archive = zipfile.ZipFile(file)
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        size = sum(member.file_size for member in members)
        if size > max_unpacked_size(path.stat().st_size):
            raise CheckpointError(
                f"would decompress to {size:,} bytes, which is suspiciously large", where=path
            )
        tensors: dict[str, LazyTensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in tensors:
                raise CheckpointError(f"contains the array '{name}' twice", where=path)
            tensors[name] = _open_array(archive, member, name, path)
        lines = archive.comment.decode(errors="replace").splitlines()
        prefix = f"{RESIZE_KEY} "
        pairs = (
            line.partition(" ") if line.startswith(prefix) else (line, "", "") for line in lines
        )
        metadata = {key: value for key, _, value in pairs}
        return Store(path, "npz", tensors, metadata)


def _open_array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, path: Path
) -> LazyTensor:
    """One array of an archive, of which only the header is read yet."""
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(file)
        start = file.tell()
    if dtype.hasobject:
        raise CheckpointError(
            f"'{member.filename}' contains Python objects, which could run code; nothing was read",
            where=path,
            hint="save the arrays with allow_pickle=False",
        )
    if start + math.prod(shape) * dtype.itemsize != member.file_size:
        raise CheckpointError(
            f"the size of '{member.filename}' does not match its shape {shape}", where=path
        )
    # bfloat16 as big_vision stores it: numpy writes it as 2-byte void.
    dtype = numpy_dtype("bfloat16") if dtype.str == "|V2" else dtype

    def read() -> np.ndarray:
        import numpy as np

        # Opened for each array: Windows cannot replace an open file. zipfile verifies the checksum.
        with checkpoint_errors(path), open(path, "rb") as archive.fp:
            array = np.frombuffer(archive.read(member), dtype, offset=start)
            # torch requires native byte order.
            array = array.astype(dtype.newbyteorder("="), copy=False)
            return array.reshape(shape, order="F" if fortran else "C")

    return LazyTensor(dtype.name, tuple(shape), read, (name,))


def write(path: str | Path, tensors: Arrays, metadata: Mapping[str, str]) -> None:
    """Write an uncompressed .npz file, whole or not at all, one array at a time. The metadata
    becomes lines of the archive's comment, which other readers ignore.

    Raises:
        OutputError: the file cannot be written.
    """
    from numpy.lib import format as npy

    with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, array in tensors.items():
            tensor = to_lazy(array)
            data, dtype = tensor_bytes(tensor), tensor.dtype
            descr = "|V2" if dtype == "bfloat16" else numpy_dtype(dtype).str
            header = {"descr": descr, "fortran_order": False, "shape": tensor.shape}
            # ZipInfo's default date, 1980, makes the file reproducible.
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=data.nbytes > 1 << 30) as out:
                npy.write_array_header_1_0(out, header)
                out.write(data)
        lines = (f"{key} {value}".rstrip() for key, value in metadata.items())
        archive.comment = "\n".join(lines).encode()
