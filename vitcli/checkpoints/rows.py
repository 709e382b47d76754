"""A table of float32 rows in a .npy or .safetensors file, whose number is known at the end only."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitcli.atomic import whole_file
from vitcli.checkpoints.tensor_file import read_header
from vitcli.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AddRow = Callable[["npt.NDArray[np.float32] | None"], None]


def holds_a_model(path: str | Path) -> bool:
    """Whether a file is a safetensors file of other tensors than a table's."""
    with contextlib.suppress(CheckpointError):
        return read_header(path).tensors.keys() != {"features"}
    return False


@contextlib.contextmanager
def row_file(path: str | Path, width: int, metadata: Mapping[str, str]) -> Iterator[AddRow]:
    """A table that is written whole or not at all: as .npy, or as .safetensors with the table under
    "features" and `metadata` in the header. Yields a function that appends a row, (width,); None
    becomes NaN.

    Raises:
        OutputError: the path has another suffix or cannot be written.
    """
    kind, count = Path(path).suffix.lower(), 0
    if kind not in (".npy", ".safetensors"):
        raise OutputError("does not end in .npy or .safetensors", where=path)

    def header() -> bytes:
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

    def add(row: npt.NDArray[np.float32] | None) -> None:
        import numpy as np

        nonlocal count
        values = np.full(width, np.nan) if row is None else row
        file.write(np.asarray(values, "<f4").tobytes())
        count += 1

    with whole_file(path) as file:
        file.write(header())
        yield add
        file.seek(0)
        file.write(header())
