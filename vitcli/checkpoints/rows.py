"""A table of float32 rows in a .npy or .safetensors file, written as the rows come."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitcli.atomic import whole_file
from vitcli.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_NPY_HEADER = 128
_ITEM = 4  # bytes of a float32


class Rows:
    """An open table. The header stands in front of rows that are not counted yet, so it is written
    twice, at one length."""

    def __init__(self, file: BinaryIO, width: int, npy: bool, metadata: Mapping[str, str]) -> None:
        self.file, self.width, self.npy, self.metadata = file, width, npy, metadata
        self.count = 0
        self.header = len(self._npy_header() if npy else self._safetensors_header(10**12))
        self.file.write(b" " * self.header)

    def add(self, row: npt.NDArray[np.float32] | None) -> None:
        """One row, (width,); None becomes NaN."""
        import numpy as np

        values = np.full(self.width, np.nan) if row is None else row
        self.file.write(np.asarray(values, "<f4").tobytes())
        self.count += 1

    def finish(self) -> None:
        """Writes the header, now that the rows are counted."""
        self.file.seek(0)
        header = self._npy_header() if self.npy else self._safetensors_header(self.count)
        self.file.write(header)

    def _npy_header(self) -> bytes:
        """https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0."""
        shape = f"({self.count}, {self.width})"
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
        length = _NPY_HEADER - 10
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + _padded(text, length, "\n")

    def _safetensors_header(self, count: int) -> bytes:
        end = count * self.width * _ITEM
        table = {"dtype": "F32", "shape": [count, self.width], "data_offsets": [0, end]}
        text = json.dumps({"__metadata__": dict(self.metadata), "features": table})
        length = getattr(self, "header", -(-(len(text.encode()) + 8) // 8) * 8) - 8
        return length.to_bytes(8, "little") + _padded(text, length)


def _padded(text: str, length: int, end: str = "") -> bytes:
    return text.encode().ljust(length - len(end)) + end.encode()


@contextlib.contextmanager
def row_file(path: str | Path, width: int, metadata: Mapping[str, str]) -> Iterator[Rows]:
    """A table of `width` columns, written whole or not at all: .npy, or .safetensors with the
    table as the tensor "features" and `metadata` in the header.

    Raises:
        OutputError: another kind of file, or one that cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".npy", ".safetensors"):
        raise OutputError("features are saved as .npy or .safetensors", where=path)
    with whole_file(path) as file:
        rows = Rows(file, width, kind == ".npy", metadata)
        yield rows
        rows.finish()
