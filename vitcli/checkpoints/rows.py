"""A table of float32 rows in a .npy or .safetensors file, whose number is known at the end only."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitcli.atomic import whole_file
from vitcli.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Rows:
    """An open table of `width` columns."""

    def __init__(self, file: BinaryIO, width: int) -> None:
        self.file, self.width, self.count = file, width, 0

    def add(self, row: npt.NDArray[np.float32] | None) -> None:
        """Appends a row, (width,); None becomes NaN."""
        import numpy as np

        values = np.full(self.width, np.nan) if row is None else row
        self.file.write(np.asarray(values, "<f4").tobytes())
        self.count += 1


@contextlib.contextmanager
def row_file(path: str | Path, width: int, metadata: Mapping[str, str]) -> Iterator[Rows]:
    """A table that is written whole or not at all: as .npy, or as .safetensors with the table under
    "features" and `metadata` in the header.

    Raises:
        OutputError: the path has another suffix or cannot be written.
    """
    kind = Path(path).suffix.lower()
    if kind not in (".npy", ".safetensors"):
        raise OutputError("does not end in .npy or .safetensors", where=path)

    def header(count: int) -> bytes:
        """Of the same length for any number of rows."""
        if kind == ".npy":
            from numpy.lib import format as npy

            about = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
            npy.write_array_header_1_0(file := io.BytesIO(), about)  # leaves room for a long count
            return file.getvalue()
        table = {"dtype": "F32", "shape": [count, width], "data_offsets": [0, 4 * count * width]}
        entries = {"__metadata__": dict(metadata), "features": table}
        text = json.dumps(entries, ensure_ascii=False).encode()
        text = text.ljust(len(text) + 64 - len(f"{count}{4 * count * width}"))
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    with whole_file(path) as file:
        file.write(header(0))
        rows = Rows(file, width)
        yield rows
        file.seek(0)
        file.write(header(rows.count))
