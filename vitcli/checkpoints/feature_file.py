"""Feature files: a row of float32 values per image, whose number is known only at the end."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, get_args

from vitcli.atomic import atomic_write
from vitcli.checkpoints.tensor_file import read_header
from vitcli.config import View
from vitcli.errors import CheckpointError, OutputError, require
from vitcli.words import join_or

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AddRow = Callable[[str, "npt.NDArray[np.float32] | None"], None]
SUFFIXES = (".npy", ".safetensors", ".parquet")
GROUP = 1000
"""Rows of a Parquet file that are buffered in memory and written together."""


def holds_a_model(path: str | Path) -> bool:
    """Whether a file is a safetensors file with tensors other than those of a table, or a zip file
    such as .npz with arrays other than those that `vit inspect` saves."""
    with contextlib.suppress(CheckpointError, zipfile.BadZipFile):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = {name.removesuffix(".npy") for name in archive.namelist()}
            return not names <= {*get_args(View), "files"}
        return read_header(path).tensors.keys() != {"features"}
    return False


def import_pyarrow() -> Any:
    """Import pyarrow with its module `parquet`."""
    require("pyarrow.parquet", "writing Parquet files")
    return require("pyarrow", "writing Parquet files")


@contextlib.contextmanager
def row_file(path: str | Path, width: int, metadata: Mapping[str, str]) -> Iterator[AddRow]:
    """Write a table, whole or not at all. Yields a function that appends a row, given the name of
    an image and its values (width,), or None if it has none.

    - .npy: the values alone; NaN for None.
    - .safetensors: the same under the key "features", and `metadata` in the header.
    - .parquet: columns "file" and "features" (null for None), and `metadata`.

    Raises:
        OutputError: the path has another suffix or cannot be written.
        MissingExtraError: pyarrow, which writes Parquet files, is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise OutputError(f"does not end in {join_or(SUFFIXES)}", where=path)
    with atomic_write(path) as file:
        if suffix == ".parquet":
            writer = _parquet_writer(file, metadata)
        else:
            writer = _array_writer(file, width, metadata, suffix)
        with writer as add:
            yield add


@contextlib.contextmanager
def _array_writer(
    file: BinaryIO, width: int, metadata: Mapping[str, str], suffix: str
) -> Iterator[AddRow]:
    import numpy as np

    count = 0

    def header() -> bytes:
        """The file's header, which has the same length for any number of rows."""
        if suffix == ".npy":
            from numpy.lib import format as npy

            fields = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
            npy.write_array_header_1_0(file := io.BytesIO(), fields)  # leaves room for a long count
            return file.getvalue()
        entry = {"dtype": "F32", "shape": [count, width], "data_offsets": [0, 4 * count * width]}
        entries = {"__metadata__": dict(metadata), "features": entry}
        encoded = json.dumps(entries, ensure_ascii=False).encode()
        encoded = encoded.ljust(len(encoded) + 64 - len(f"{count}{4 * count * width}"))
        encoded += b" " * (-len(encoded) % 8)
        return len(encoded).to_bytes(8, "little") + encoded

    def add(name: str, row: npt.NDArray[np.float32] | None) -> None:
        nonlocal count
        values = np.full(width, np.nan) if row is None else row
        file.write(np.asarray(values, "<f4").tobytes())
        count += 1

    file.write(header())
    yield add
    file.seek(0)
    file.write(header())


@contextlib.contextmanager
def _parquet_writer(file: BinaryIO, metadata: Mapping[str, str]) -> Iterator[AddRow]:
    arrow = import_pyarrow()
    # Not a list of fixed size: before pyarrow 26, those with nulls cannot be read.
    types = {"file": arrow.string(), "features": arrow.list_(arrow.float32())}
    schema = arrow.schema(types.items(), dict(metadata))
    buffer: dict[str, list[Any]] = {name: [] for name in types}

    def add(name: str, row: npt.NDArray[np.float32] | None) -> None:
        buffer["file"].append(name.encode(errors="backslashreplace").decode())
        buffer["features"].append(row)
        if len(buffer["file"]) == GROUP:
            flush()

    def flush() -> None:
        writer.write_table(arrow.table(buffer, schema))
        for values in buffer.values():
            values.clear()

    with arrow.parquet.ParquetWriter(file, schema) as writer:
        yield add
        flush()
