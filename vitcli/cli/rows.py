"""Results as rows: text, JSON or CSV on stdout or in a file, or a Parquet file.

To add a format, add a class like those below and its suffix in `FORMATS`.
"""

import contextlib
import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import typer

from vitcli import weight_files
from vitcli.checkpoints import feature_file
from vitcli.cli import output
from vitcli.words import join_or


class Row(Protocol):
    """A result, such as the predictions for one image."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""

    def records(self) -> list[dict[str, Any]]:
        """Return the result as table rows, always with the same columns; None is an empty cell."""

    def text(self, terminal: bool) -> str | None:
        """Return the result as human-readable text; None to print nothing."""


class RowWriter:
    """Writes each row immediately, to a file or (None) to stdout, as human-readable text. The
    other formats derive from it."""

    def __init__(self, file: BinaryIO | None) -> None:
        self.wrapper = file and io.TextIOWrapper(file, "utf-8", "surrogateescape", "\n")
        self.file = self.wrapper or sys.stdout
        self.is_terminal = self.file.isatty()
        """Whether the rows are written to a terminal."""

    def write(self, row: Row) -> None:
        """Write a row."""
        if (text := row.text(self.is_terminal)) is not None:
            output.write(text, self.file)

    def close(self) -> None:
        """Flush pending rows, leaving the file open."""
        if self.wrapper:
            self.wrapper.detach()


class Json(RowWriter):
    """JSON Lines."""

    def write(self, row: Row) -> None:
        output.json_line(row.to_json(), self.file)


def _unicode_cells(record: dict[str, Any]) -> dict[str, Any]:
    """Escape bytes of file names that are not valid Unicode, as JSON does: UTF-8 cannot store them
    so that other programs can read the file."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in record.items()
    }


class Csv(RowWriter):
    """CSV with a header."""

    has_header = False

    def write(self, row: Row) -> None:
        lines = io.StringIO()
        for record in map(_unicode_cells, row.records()):
            if self.is_terminal:
                record = {k: v and output.printable(str(v)) for k, v in record.items()}
            # Before Python 3.13, csv quotes a carriage return only if it is in the line terminator.
            has_return = any("\r" in str(value) for value in record.values())
            quoting: Literal[0, 1] = csv.QUOTE_ALL if has_return else csv.QUOTE_MINIMAL
            writer = csv.writer(lines, lineterminator="\n", quoting=quoting)
            if not self.has_header:
                writer.writerow(record)
                self.has_header = True
            writer.writerow(record.values())
        if text := lines.getvalue().removesuffix("\n"):
            output.write(text, self.file)


class Parquet(RowWriter):
    """A Parquet file with the same columns as CSV."""

    GROUP = 100_000
    """Records per row group, which is buffered in memory."""
    TYPES = {"rank": "int32", "index": "int32", "row": "int64", "score": "float64"}
    TYPES |= {"correct": "int8", "real": "int8"}
    """Types by column name without trailing digits; other columns are strings."""

    def __init__(self, file: BinaryIO | None) -> None:
        self.arrow = feature_file.import_pyarrow()
        self.target, self.is_terminal = file, False
        self.records = list[dict[str, Any]]()
        self.writer: Any = None

    def write(self, row: Row) -> None:
        self.records += map(_unicode_cells, row.records())
        if len(self.records) >= self.GROUP:
            self._write_group()

    def close(self) -> None:
        if self.records or self.writer is None:
            self._write_group()
        self.writer.close()

    def _write_group(self) -> None:
        arrays = {}
        for name in self.records[0] if self.records else ():
            column_type = self.TYPES.get(name.rstrip("0123456789"), "string")
            values = [record[name] for record in self.records]
            arrays[name] = self.arrow.array(values, column_type)
        table = self.arrow.table(arrays)
        self.writer = self.writer or self.arrow.parquet.ParquetWriter(self.target, table.schema)
        self.writer.write_table(table)
        self.records.clear()


FORMATS: dict[str, type[RowWriter]] = {
    ".csv": Csv,
    ".json": Json,
    ".jsonl": Json,
    ".parquet": Parquet,
}
"""By file suffix."""
OUTPUT = "'--output' / '-o'"
"""The option as named in errors."""


def choose_writer(
    path: str | None,
    default: type[RowWriter] = RowWriter,
    option: str = OUTPUT,
    format: type[RowWriter] | None = None,
) -> type[RowWriter]:
    """Return the class that writes to a file, or (None) to stdout.

    Args:
        default: the format of stdout and of files without a suffix; text also with .txt.
        option: the option that names the file, as shown in errors.
        format: if None, chosen by the file's suffix.

    Raises:
        BadParameter: the suffix is of no format, or with `format` that of a binary file.
    """
    if path is None:
        return format or default
    formats = {"": default} | FORMATS | ({".txt": default} if default is RowWriter else {})
    suffix, binary = Path(path).suffix.lower(), (*weight_files.SUFFIXES, *feature_file.SUFFIXES)
    if (suffix in binary) if format else (suffix not in formats):
        suffixes = join_or(name for name in formats if name and not (format and name in binary))
        hint = "\nhint: --features saves features" * (option == OUTPUT and suffix == ".npy")
        raise typer.BadParameter(f"'{path}' does not end in {suffixes}{hint}", param_hint=option)
    return format or formats[suffix]


@contextlib.contextmanager
def open_writer(path: str | None, writer_class: type[RowWriter]) -> Iterator[RowWriter]:
    """Open a writer to stdout (None), or to a file that is written whole or not at all.

    Raises:
        OutputError: the file cannot be written; raised on entry.
    """
    if path is None:
        yield writer_class(None)
        return
    from vitcli.atomic import atomic_write

    with atomic_write(path) as file:
        writer = writer_class(file)
        yield writer
        writer.close()
