"""A table of float32 rows in a .npy or .safetensors file, whose number is known at the end only."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vitcli.atomic import whole_file
from vitcli.checkpoints.tensor_file import write_to
from vitcli.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Rows:
    """An open table of `width` columns; its rows wait in a temporary file."""

    def __init__(self, spool: BinaryIO, width: int) -> None:
        self.spool, self.width, self.count = spool, width, 0

    def add(self, row: npt.NDArray[np.float32] | None) -> None:
        """Appends a row, (width,); None becomes NaN."""
        import numpy as np

        values = np.full(self.width, np.nan) if row is None else row
        self.spool.write(np.asarray(values, "<f4").tobytes())
        self.count += 1

    def table(self) -> npt.NDArray[np.float32]:
        """All rows, (count, width), mapped and not in memory."""
        import numpy as np

        self.spool.flush()
        if not self.count:  # nothing cannot be mapped
            return np.empty((0, self.width), np.float32)
        return np.memmap(self.spool, "<f4", "r", shape=(self.count, self.width))


@contextlib.contextmanager
def row_file(path: str | Path, width: int, metadata: Mapping[str, str]) -> Iterator[Rows]:
    """A table that is written whole or not at all: as .npy, or as .safetensors with the table under
    "features" and `metadata` in the header.

    Raises:
        OutputError: the path has another suffix or cannot be written.
    """
    import numpy as np

    kind = Path(path).suffix.lower()
    if kind not in (".npy", ".safetensors"):
        raise OutputError("does not end in .npy or .safetensors", where=path)
    with whole_file(path) as file, tempfile.TemporaryFile() as spool:
        rows = Rows(spool, width)
        yield rows
        if kind == ".npy":
            np.save(file, rows.table())
        else:
            write_to(file, {"features": rows.table()}, metadata)
