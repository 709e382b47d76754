"""All printing: results to stdout; progress, notes and errors to stderr.

Tables and progress bars are drawn by Rich on a terminal, and are plain lines elsewhere. Rich is
imported only when it is used. NO_COLOR disables colors.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from vitcli.errors import VitError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from vitcli.hub.retry import Transfer

PLAIN_EVERY = 10.0
"""Seconds between plain progress lines."""
SPEED_WINDOW = 10.0
"""Seconds over which the speed of a download is averaged."""
FIRST_BATCH = 0.2
"""Seconds in which the results of the first batch arrive."""
STALL_SECONDS = 2.0
"""Seconds without data after which a bar shows a stall instead of a speed."""
MIN_BAR = 4
"""Width of the bar below which numbers beside it are omitted."""
MAX_UNWRAPPED, MIN_WRAPPED = 14, 6
"""Width up to which a text column is never wrapped, and minimum width of wrapped columns."""

quiet = debug = False
"""Whether to omit notes and progress, and to print tracebacks of errors. Set by every command."""


# ---------------------------------------------------------------------------------------------
# Lines


def line(text: str = "", file: TextIO | None = None) -> None:
    """Print a line of results, flushed so that the reader of a pipe gets it immediately. If a
    message cannot be written to stderr, it and all later ones are dropped: results matter more."""
    try:
        print(text, file=file or sys.stdout, flush=True)
    except OSError:
        if file is not sys.stderr:
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
    line(text, file)


def format_entry(name: str, text: str, indent: int, stream: TextIO) -> str:
    """Format a name and, from column `indent` on, a text, wrapped between words on a terminal."""
    text, width = printable(text), shutil.get_terminal_size().columns - indent
    if stream.isatty() and width >= 30:
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        text = f"\n{'':<{indent}}".join(lines)
    return f"{name:<{indent}}{text}".rstrip()


def note(*lines: str, always: bool = False) -> None:
    """Print a note to stderr; with --quiet, only if `always` is set."""
    if always or not quiet:
        line("\n".join(map(printable, lines)), sys.stderr)


def warning(text: str) -> None:
    """Print a warning to stderr, even with --quiet."""
    line(f"{style('warning', '1;33', sys.stderr)}: {printable(text)}", sys.stderr)


def error(text: str, hint: str | None = None) -> None:
    """Print an error message and an optional hint to stderr."""
    line(f"{style('error', '1;31', sys.stderr)}: {printable(text)}", sys.stderr)
    if hint:
        line(f"hint: {printable(hint)}", sys.stderr)


def confirm(question: str) -> bool:
    """Ask on stderr whether to go on. Raises VitError if stdin is closed."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        line(file=sys.stderr)
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
        console = _console(sys.stdout)
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
        line("  ".join(padded).rstrip())


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


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


# ---------------------------------------------------------------------------------------------
# Progress


class Display:
    """A progress bar on a terminal, occasional plain lines elsewhere; nothing with --quiet."""

    shows_stalls = False
    """Whether the bar shows stalls."""

    def __init__(self) -> None:
        self.started = self.last_printed = time.monotonic()
        self.bar: Progress | None = None
        self.most: int | None = None  # once a number is omitted, it stays so, or the bar would jump

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar; the next `show` starts a new one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(
        self, label: str, done: int, total: int | None, numbers: Sequence[str], force: bool = False
    ) -> None:
        """Show the progress.

        Args:
            numbers: shown beside the bar, the two most important first; a narrow terminal omits
                the others.
            force: whether to print a plain line immediately.
        """
        now = time.monotonic()
        if quiet:
            return
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            if self.bar is None:
                self.bar = _progress_bar(self.shows_stalls)
                self.bar.add_task("", numbers="", at=now)
            kept = list(numbers[: self.most])
            name, text = _fit_width(printable(label), kept, self.bar.console.width)
            self.most = len(kept) if len(kept) < len(numbers) else None
            (task,) = self.bar.task_ids
            self.bar.update(
                task, description=name, completed=done, total=total, numbers=text, at=now
            )
            self.bar.start()
        elif force or now - self.last_printed >= PLAIN_EVERY:
            self.last_printed = now
            note(f"{label}: {', '.join(numbers)}")


class Meter(Display):
    """Progress of a job and the time left. Nothing is shown during the first second.

    The speed is that after the first batch, which may have waited for the model to be loaded.
    """

    def __init__(self, label: str, total: int | None = None, hidden: bool = False) -> None:
        super().__init__()
        self.label, self.total, self.done, self.hidden = label, total, 0, hidden
        self.first_time, self.first_done = 0.0, 0

    def update(self, done: int, total: int) -> None:
        """Set the progress to `done` of `total`."""
        self.total = total
        self.advance(done - self.done)

    def advance(self, count: int = 1) -> None:
        """Advance by `count`."""
        self.done += count
        now = time.monotonic()
        self.first_time = self.first_time or now
        if now - self.first_time < FIRST_BATCH:
            self.first_done = self.done
        if now - self.started < 1.0 or self.hidden:
            return
        numbers = [f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"]
        if self.done > self.first_done:
            speed = (self.done - self.first_done) / (now - self.first_time)
            if self.total and self.done < self.total:
                numbers.append(f"{format_duration((self.total - self.done) / speed)} left")
            numbers.append(f"{speed:.3g}/s")
        self.show(self.label, self.done, self.total, numbers)


class DownloadDisplay(Display):
    """Progress of a download, called with each `Transfer`."""

    shows_stalls = True
    was_called = False
    """Whether there was anything to download."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: deque[tuple[float, str, int]] = deque()

    def __call__(self, transfer: Transfer) -> None:
        self.was_called = True
        if transfer.note:
            self.close()
            note(transfer.note)
            return
        name, done, total = transfer.name, transfer.done, transfer.total
        now = time.monotonic()
        self.samples.append((now, name, done))
        while self.samples[0][0] < now - SPEED_WINDOW or self.samples[0][1] != name:
            self.samples.popleft()
        first_time, _, first_done = self.samples[0]
        rate = (done - first_done) / max(now - first_time, 0.1)
        numbers = [f"{done / 1e6:,.1f}{f' of {total / 1e6:,.1f}' if total else ''} MB"]
        if total and done < total and rate:
            numbers.append(f"{format_duration((total - done) / rate)} left")
        self.show(f"fetching {name}", done, total, [*numbers, f"{rate / 1e6:.3g} MB/s"])


def _fit_width(label: str, numbers: list[str], width: int) -> tuple[str, str]:
    """Fit the label and the numbers, removing the last ones from the list, into `width`; the bar
    takes the rest."""
    from rich.cells import cell_len
    from rich.text import Text

    available = width - 4  # a space on each side of the bar, and room for ^C
    while len(numbers) > 2 and cell_len(label) + len(", ".join(numbers)) > available - MIN_BAR:
        numbers.pop()
    name, text = Text(label), ", ".join(numbers)
    name.truncate(max(available - len(text), 0), overflow="ellipsis")
    return name.plain, text


def _progress_bar(stalls: bool) -> Progress:
    from rich.constrain import Constrain
    from rich.progress import BarColumn, Progress, Task, TextColumn
    from rich.text import Text

    class Numbers(TextColumn):
        """The numbers beside the bar; during a stall, the first one and the time without data."""

        def render(self, task: Task) -> Text:
            silence = time.monotonic() - task.fields["at"]
            if not stalls or silence < STALL_SECONDS or task.finished:
                return super().render(task)
            first = task.fields["numbers"].partition(", ")[0]
            return Text(f"{first}, no data for {format_duration(silence)}")

    class Bar(Progress):
        """A bar that leaves room for the ^C of a Ctrl-C, which would wrap and keep the line."""

        def get_renderable(self) -> Constrain:
            return Constrain(super().get_renderable(), console.width - 2)

    console = _console(sys.stderr)
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Numbers("{task.fields[numbers]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # results share the terminal with the bar
    )
