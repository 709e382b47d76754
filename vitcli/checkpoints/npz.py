"""An .npz file: a zip archive with one .npy file for each array. numpy reads and writes the headers
of these; here the arrays are read and written one at a time, while numpy takes all at once.
"""

from __future__ import annotations

import contextlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli.atomic import whole_file
from vitcli.checkpoints.tensor_file import (
    RECORD,
    Arrays,
    LazyTensor,
    Store,
    numpy_dtype,
    tensor_bytes,
)
from vitcli.errors import CheckpointError, VitError

if TYPE_CHECKING:
    import numpy as np

MOST_INFLATED = 60
"""A zip archive that inflates to more than this many times its size is refused as a bomb: weights
hardly compress, except for heads of zeros."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever zipfile and numpy raise on a damaged file becomes a CheckpointError."""
    try:
        yield
    except (VitError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"damaged npz file: {error}", where=path) from error


def open_npz(path: Path) -> Store:
    """The arrays of an .npz file.

    Raises:
        CheckpointError: it is damaged, holds Python objects, or inflates beyond reason.
    """
    with reading(path):
        archive = zipfile.ZipFile(path)
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        inflated = sum(member.file_size for member in members)
        if inflated > MOST_INFLATED * path.stat().st_size + (1 << 26):
            raise CheckpointError(
                f"would decompress to {inflated:,} bytes, which is suspiciously large", where=path
            )
        found: dict[str, LazyTensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise CheckpointError(f"contains the array '{name}' twice", where=path)
            found[name] = _npy(archive, member, path)
        lines = archive.comment.decode(errors="replace").splitlines()
        record = f"{RECORD} "
        pairs = (
            line.partition(" ") if line.startswith(record) else (line, "", "") for line in lines
        )
        metadata = {key: text for key, _, text in pairs}
        return Store(path, "npz", found, metadata)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> LazyTensor:
    """One array of an archive, of which the header is read."""
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
    # As big_vision stores it, and numpy names it.
    dtype = numpy_dtype("bfloat16") if dtype.str == "|V2" else dtype

    def read() -> np.ndarray:
        import numpy as np

        with reading(path):  # zipfile verifies the checksum
            array = np.frombuffer(archive.read(member), dtype, offset=start)
            # As torch takes it: in the machine's order of bytes.
            array = array.astype(dtype.newbyteorder("="), copy=False)
            return array.reshape(shape, order="F" if fortran else "C")

    return LazyTensor(dtype.name, tuple(shape), read)


def write(path: str | Path, tensors: Arrays, metadata: Mapping[str, str]) -> None:
    """Writes an uncompressed .npz file whole or not at all, one array at a time. The metadata
    becomes lines of the archive's comment, which other readers pass over.

    Raises:
        OutputError: it cannot be written.
    """
    from numpy.lib import format as npy

    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            data, dtype = tensor_bytes(tensor), str(tensor.dtype)
            descr = "|V2" if dtype == "bfloat16" else numpy_dtype(dtype).str
            about = {"descr": descr, "fortran_order": False, "shape": tuple(tensor.shape)}
            # Dated 1980, ZipInfo's default: the same arrays make the same file.
            member = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(member, "w", force_zip64=data.nbytes > 1 << 30) as out:
                npy.write_array_header_1_0(out, about)
                out.write(data)
        lines = (f"{key} {text}".rstrip() for key, text in metadata.items())
        archive.comment = "\n".join(lines).encode()
