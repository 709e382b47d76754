"""Results as rows: text, JSON or CSV, on stdout or in a file.

A new format is one more branch of `RowWriter.write` and its suffixes in `FORMATS`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from vitcli.cli import output

Format = Literal["text", "json", "csv"]

FORMATS: dict[str, Format] = {".csv": "csv", ".json": "json", ".jsonl": "json"}
"""By the suffix of a file."""


class Row(Protocol):
    """A result, such as the answer for one image."""

    def to_json(self) -> dict[str, Any]:
        """The result as one JSON object."""

    def records(self) -> list[dict[str, Any]]:
        """The result as rows of a table, always with the same columns."""

    def text(self, terminal: bool) -> str | None:
        """The result for people; None: nothing is printed."""


class RowWriter:
    """Writes each row as it comes."""

    def __init__(self, file: TextIO, format: Format) -> None:
        self.file, self.format = file, format
        self.table: csv.DictWriter[str] | None = None

    def write(self, row: Row) -> None:
        if self.format == "json":
            output.json_line(row.to_json(), self.file)
        elif self.format == "csv":
            for record in row.records():
                if self.table is None:
                    self.table = csv.DictWriter(self.file, list(record), lineterminator="\n")
                    self.table.writeheader()
                self.table.writerow(record)
            self.file.flush()
        elif (text := row.text(self.file.isatty())) is not None:
            output.line(text, self.file)


@contextlib.contextmanager
def open_rows(
    path: str | None, format: Format | None = None, default: Format = "text"
) -> Iterator[RowWriter]:
    """A writer to stdout, or to a file that is written whole or not at all.

    Args:
        format: None: by the file's suffix, else `default`.

    Raises:
        OutputError: the file cannot be written; raised at once.
    """
    if path is None:
        yield RowWriter(sys.stdout, format or default)
        return
    from vitcli.atomic import whole_file

    with whole_file(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", "\n")
        yield RowWriter(text, format or FORMATS.get(Path(path).suffix.lower(), default))
        text.detach()
