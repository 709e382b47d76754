"""Arrays in a .npz file, written one at a time and stored as they are, as the authors do."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from vitcli.atomic import whole_file
from vitcli.checkpoints.native import LazyTensor, tensor_bytes


def write(path: str | Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes an .npz file whole or not at all. bfloat16 becomes V2, as big_vision stores it.

    Raises:
        OutputError: it cannot be written.
    """
    import numpy as np

    with whole_file(path) as file, zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, tensor in tensors.items():
            array = np.require(tensor.read(), requirements="C")
            descr = "|V2" if tensor.dtype == "bfloat16" else array.dtype.str
            header = io.BytesIO()
            about = {"descr": descr, "fortran_order": False, "shape": tuple(array.shape)}
            np.lib.format.write_array_header_1_0(header, about)
            member = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same arrays, the same file
            with archive.open(member, "w", force_zip64=array.nbytes > 1 << 30) as out:
                out.write(header.getvalue())
                out.write(tensor_bytes(array))
