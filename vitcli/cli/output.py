"""All printing but progress: results to stdout, notes and errors to stderr.

Tables are drawn by Rich on a terminal, and are plain lines elsewhere. Rich is imported only when it
is used. NO_COLOR disables colors.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO

from vitcli.errors import VitError

if TYPE_CHECKING:
    from rich.console import Console

MAX_UNWRAPPED, MIN_WRAPPED = 14, 6
"""Width up to which a text column is never wrapped, and minimum width of wrapped columns."""

quiet = debug = False
"""Whether to omit notes and progress, and to print tracebacks of errors. Set by every command."""


# ---------------------------------------------------------------------------------------------
# Lines


def line(*lines: str) -> None:
    """Print lines of results."""
    write("\n".join(map(printable, lines)))


def write(text: str, file: TextIO | None = None) -> None:
    """Print text as it is, flushed so that the reader of a pipe gets it immediately. If a message
    cannot be written to stderr, it and all later ones are dropped: results matter more."""
    try:
        print(text, file=file or sys.stdout, flush=True)
    except OSError as error:
        if file is not sys.stderr:
            if os.name == "nt" and error.errno == errno.EINVAL:  # how Windows reports a closed pipe
                raise BrokenPipeError from error
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or its buffer could not be flushed later


def json_line(value: Any, file: TextIO | None = None) -> None:
    """Print a JSON object on one line, without control characters; NaN and infinity become null."""
    from vitcli.typed_json import non_finite_to_none  # `vit --help` starts faster without it

    file = file or sys.stdout
    text = json.dumps(non_finite_to_none(value), ensure_ascii=False).translate(_JSON_ESCAPES)
    try:
        text.encode(file.encoding or "utf-8")
    except UnicodeEncodeError:  # the stream cannot encode it, or a file name is not Unicode
        text = json.dumps(non_finite_to_none(value))
    write(text, file)


def format_entry(name: str, text: str, indent: int, stream: TextIO) -> list[str]:
    """Return the lines of a name and, from column `indent` on, a text, wrapped between words on a
    terminal."""
    start, text, width = f"{name:<{indent}}", printable(text), shutil.get_terminal_size().columns
    if not stream.isatty() or width < indent + 30:
        return [start + text]
    margins: Any = {"initial_indent": start, "subsequent_indent": " " * indent}
    return textwrap.wrap(text, width, **margins, break_long_words=False, break_on_hyphens=False)


def note(*lines: str, always: bool = False) -> None:
    """Print a note to stderr; with --quiet, only if `always` is set."""
    if always or not quiet:
        write("\n".join(map(printable, lines)), sys.stderr)


def warning(text: str) -> None:
    """Print a warning to stderr, even with --quiet."""
    write(f"{style('warning', '1;33', sys.stderr)}: {printable(text)}", sys.stderr)


def error(text: str, hint: str | None = None) -> None:
    """Print an error message and an optional hint to stderr."""
    write(f"{style('error', '1;31', sys.stderr)}: {printable(text)}", sys.stderr)
    if hint:
        write(f"hint: {printable(hint)}", sys.stderr)


def confirm(question: str) -> bool:
    """Ask on stderr whether to go on. Raises VitError if stdin is closed."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        write("", sys.stderr)
        raise VitError("cannot ask for confirmation", hint="pass --yes") from None


def mute() -> None:
    """Discard all output until `unmute`, for ranks other than 0."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def unmute() -> None:
    """Restore stderr, for the error that ends the command."""
    sys.stderr = sys.__stderr__ or sys.stderr


def style(text: str, codes: str, stream: TextIO | None = None) -> str:
    """Style text with ANSI codes (such as "1;31") if the stream (default: stdout) has colors."""
    stream = stream or sys.stdout
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{codes}m{text}\x1b[0m"


# U+2028 and later: line separators, and characters that reorder the text of a line.
_CONTROLS = *range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)
_ESCAPES = {i: f"\\x{i:02x}" if i < 256 else f"\\u{i:04x}" for i in _CONTROLS}
_JSON_ESCAPES = {i: f"\\u{i:04x}" for i in _CONTROLS}


def printable(text: str) -> str:
    """Escape line breaks and control characters. All text from elsewhere, such as names of files
    and classes, passes through here before it is printed."""
    return text.translate(_ESCAPES)


def check_writable(path: str | None, parents: bool = False) -> None:
    """Check in advance that a file can be written.

    Args:
        parents: whether missing parent directories will be created.

    Raises:
        OutputError: it cannot be written.
    """
    if path is None or (os.path.exists(path) and not os.path.isfile(path) | os.path.isdir(path)):
        return  # a pipe or a device is written to directly
    import tempfile  # slow to import

    try:
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        directory = os.path.dirname(os.path.realpath(path))
        while parents and not os.path.exists(directory):
            directory = os.path.dirname(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        from vitcli.atomic import cannot_write

        raise cannot_write(path, error) from error


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int]) -> None:
    """Print a table to stdout: with Rich on a terminal, as space-padded columns elsewhere.

    Args:
        numeric: indices of columns of numbers, which are right-aligned.
    """
    right, columns = set(numeric), list(map(printable, columns))
    cells = [list(map(printable, row)) for row in rows]
    by_column = list(zip(columns, *cells, strict=True))
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.cells import cell_len
        from rich.markup import escape
        from rich.table import Table

        widths = [max(map(cell_len, column)) for column in by_column]
        # Never wrap the first column (often typed next), numbers and short columns.
        no_wrap = [i == 0 or i in right or width <= MAX_UNWRAPPED for i, width in enumerate(widths)]
        min_widths = [w if keep else MIN_WRAPPED for w, keep in zip(widths, no_wrap, strict=True)]
        console = rich_console(sys.stdout)
        # The terminal wraps lines that are still too wide; Rich would cut off digits.
        console.width = max(console.width, sum(min_widths) + len(min_widths))
        fits = sum(widths) + 2 * len(widths) <= console.width
        grid = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, int(fits), 0, 0))
        for i, column in enumerate(columns):
            side: Literal["left", "right"] = "right" if i in right else "left"
            grid.add_column(escape(column), justify=side, no_wrap=no_wrap[i], overflow="fold")
        for row in cells:
            grid.add_row(*map(escape, row))
        console.print(grid)
        return
    widths = [max(map(len, column)) for column in by_column]
    for row in [columns, *cells]:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        write("  ".join(padded).rstrip())


def rich_console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, emoji=False)


def format_metrics(values: Mapping[str, float], prefix: str = "") -> list[str]:
    """Format the values of `config.METRICS` under the prefix: ["top-1 64.54%", ...]."""
    from vitcli.config import METRICS

    by_name = {name: values.get(prefix + key) for key, (_, name) in METRICS.items()}
    parts = [f"{name} {value:.2%}" for name, value in by_name.items() if value is not None]
    loss = values.get(f"{prefix}loss")  # for a model without classes
    return parts if parts or loss is None else [f"loss {loss:.4f}"]


def format_bytes(count: int) -> str:
    """Format a number of bytes: "2.9 kB", "410 MB"."""
    from rich.filesize import decimal

    number, unit = decimal(count).split()
    return f"{number if len(number) <= 3 else number.partition('.')[0]} {unit}"


def format_duration(seconds: float) -> str:
    """Format seconds in the two largest units: "8 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    remaining, parts = round(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, remaining = divmod(remaining, length)
        if count or parts:
            parts.append(f"{count} {unit}")
    first, *rest = parts or ["0 s"]
    return " ".join([first, *(part for part in rest[:1] if not part.startswith("0 "))])
