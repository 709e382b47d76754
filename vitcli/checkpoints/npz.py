"""Arrays in a .npz file, written one at a time and stored as they are, as the authors do."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli.atomic import whole_file
from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype, tensor_bytes

if TYPE_CHECKING:
    import numpy as np


def write(path: str | Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes an .npz file whole or not at all. bfloat16 becomes V2, as big_vision stores it.

    Raises:
        OutputError: it cannot be written.
    """
    with whole_file(path) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, tensor in tensors.items():
            # A member of 1980: the same arrays, the same file.
            write_array(archive, zipfile.ZipInfo(f"{name}.npy"), tensor.read())


def write_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, array: np.ndarray) -> None:
    """Appends an array to an archive as a .npy file."""
    import numpy as np

    descr = "|V2" if array.dtype.name == "bfloat16" else numpy_dtype(array.dtype.name).str
    about = {"descr": descr, "fortran_order": False, "shape": tuple(array.shape)}
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, about)
    with archive.open(member, "w", force_zip64=array.nbytes > 1 << 30) as out:
        out.write(header.getvalue())
        out.write(tensor_bytes(array))


def member_like(member: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """A member of that name, date and compression, to be written anew."""
    new = zipfile.ZipInfo(member.filename, member.date_time)
    new.compress_type, new.external_attr = member.compress_type, member.external_attr
    return new
