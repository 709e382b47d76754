"""All printing: results to stdout; progress, notes and errors to stderr.

Tables and bars are drawn by Rich on a terminal (and it is imported only there); elsewhere they are
plain lines. There are no colours where NO_COLOR is set.
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

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from vitcli.hub.retry import Transfer

PLAIN_EVERY = 10.0
"""Seconds between two plain lines of progress."""
SPEED_OF = 10.0
"""Seconds that the speed of a download is averaged over."""
STALLED = 2.0
"""Seconds without data after which a bar says so instead of a speed."""
WHOLE, FOLDED = 14, 6
"""Characters of a column of words up to which it is never folded, and to which others may be."""

quiet = debug = False
"""Whether notes and progress are left out, and errors have tracebacks. Every command sets them."""


# ---------------------------------------------------------------------------------------------
# Lines


def line(text: str = "", file: TextIO | None = None) -> None:
    """One line of results, flushed, so that the reader of a pipe gets it at once."""
    print(text, file=file or sys.stdout, flush=True)


def json_line(value: Any, file: TextIO | None = None) -> None:
    """One JSON object on one line; numbers that JSON cannot write (NaN) become null."""
    from vitcli.typed_json import finite  # `vit --help` starts faster without it

    file = file or sys.stdout
    text = json.dumps(finite(value), ensure_ascii=False)
    try:
        text.encode(file.encoding or "utf-8")
    except UnicodeEncodeError:  # the stream cannot encode it, or a file name is not Unicode
        text = json.dumps(finite(value))
    line(text, file)


def entry(name: str, text: str, indent: int, stream: TextIO) -> str:
    """A name, and `indent` columns from the left a text, folded between words on a terminal."""
    text, room = printable(text), shutil.get_terminal_size().columns - indent
    if stream.isatty() and room >= 30:
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        text = f"\n{'':<{indent}}".join(lines)
    return f"{name:<{indent}}{text}".rstrip()


def note(text: str, always: bool = False) -> None:
    """Something good to know, on stderr; with --quiet only if it is `always` needed."""
    if always or not quiet:
        line(_printable_lines(text), sys.stderr)


def warning(text: str) -> None:
    """Something that may be wrong, on stderr, also with --quiet."""
    line(f"{paint('warning', '1;33', sys.stderr)}: {_printable_lines(text)}", sys.stderr)


def error(text: str, hint: str | None = None) -> None:
    """What failed, on stderr, and what to do about it."""
    text = f"{text}\nhint: {hint}" if hint else text
    line(f"{paint('error', '1;31', sys.stderr)}: {_printable_lines(text)}", sys.stderr)


def mute() -> None:
    """From now on nothing is printed, up to `unmute`: for the ranks that do not talk."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def unmute() -> None:
    """Ends `mute` on stderr, for the error that ends the command."""
    sys.stderr = sys.__stderr__ or sys.stderr


def paint(text: str, codes: str, stream: TextIO | None = None) -> str:
    """The text in ANSI codes (such as "1;31") where the stream, by default stdout, has colours."""
    stream = stream or sys.stdout
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{codes}m{text}\x1b[0m"


_CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)]}


def printable(text: str) -> str:
    """The text on one line, without control characters: names of files and classes may hold any."""
    return text.translate(_CONTROLS)


def _printable_lines(text: str) -> str:
    """The same for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def check_writable(path: str | None, parents: bool = False) -> None:
    """Finds out before the work whether a file can be written.

    Args:
        parents: whether missing directories will be made.

    Raises:
        OutputError: it cannot.
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> None:
    """A table on stdout: Rich's on a terminal, columns of spaces elsewhere.

    Args:
        numbers: the columns that are aligned right.
    """
    right, columns = set(numbers), list(map(printable, columns))
    cells = [list(map(printable, row)) for row in rows]
    by_column = list(zip(columns, *cells, strict=True))
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.cells import cell_len
        from rich.markup import escape
        from rich.table import Table

        widths = [max(map(cell_len, column)) for column in by_column]
        # The first column (which is often typed next), numbers and short words stay whole.
        whole = [i == 0 or i in right or width <= WHOLE for i, width in enumerate(widths)]
        least = [w if keep else FOLDED for w, keep in zip(widths, whole, strict=True)]
        console = _console(sys.stdout)
        # Lines that are still too wide are broken by the terminal; Rich would cut off digits.
        console.width = max(console.width, sum(least) + len(least))
        roomy = sum(widths) + 2 * len(widths) <= console.width
        drawn = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, int(roomy), 0, 0))
        for i, column in enumerate(columns):
            side: Literal["left", "right"] = "right" if i in right else "left"
            drawn.add_column(escape(column), justify=side, no_wrap=whole[i], overflow="fold")
        for row in cells:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
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


def metrics(values: Mapping[str, float], prefix: str = "") -> list[str]:
    """The values of `config.METRICS` under the prefix in words: ["top-1 64.54%", ...]."""
    from vitcli.config import METRICS

    known = {name: values.get(prefix + key) for key, (_, name) in METRICS.items()}
    words = [f"{name} {value:.2%}" for name, value in known.items() if value is not None]
    loss = values.get(f"{prefix}loss")  # of a model without classes
    return words if words or loss is None else [f"loss {loss:.4f}"]


def size(count: int) -> str:
    """Bytes in words: "2.9 kB", "410 MB"."""
    from rich.filesize import decimal

    number, unit = decimal(count).split()
    return f"{number if len(number) <= 3 else number.partition('.')[0]} {unit}"


def duration(seconds: float) -> str:
    """Seconds in words, in the two largest units: "8 s", "3 min 20 s", "2 h 5 min", "3 d 4 h"."""
    left, parts = round(seconds), list[str]()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count} {unit}")
    first, *others = parts or ["0 s"]
    return " ".join([first, *(part for part in others[:1] if not part.startswith("0 "))])


# ---------------------------------------------------------------------------------------------
# Progress


class Display:
    """A bar on a terminal, a plain line now and then elsewhere; nothing with --quiet."""

    stalls = False
    """Whether the bar says when nothing comes."""

    def __init__(self) -> None:
        self.started = self.last = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bar from the screen; what is shown next starts a new one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(
        self, what: str, done: int, total: int | None, numbers: Sequence[str], now: bool = False
    ) -> None:
        """Shows how far it is.

        Args:
            numbers: what stands beside the bar, the two most important first: a narrow terminal
                goes without the others.
            now: print a plain line at once.
        """
        at = time.monotonic()
        if quiet:
            return
        if sys.stderr.isatty():
            if self.bar is None:
                self.bar = _progress_bar(self.stalls)
                self.bar.start()
                self.bar.add_task("", numbers="", at=at)
            name, text = _fit(printable(what), list(numbers), self.bar.console.width)
            (task,) = self.bar.task_ids
            self.bar.update(
                task, description=name, completed=done, total=total, numbers=text, at=at
            )
        elif now or at - self.last >= PLAIN_EVERY:
            self.last = at
            note(f"{printable(what)}: {', '.join(numbers)}")


class Meter(Display):
    """How far a job is, and how long it will take. Nothing is shown in its first second."""

    def __init__(self, what: str, total: int | None = None, hidden: bool = False) -> None:
        super().__init__()
        self.what, self.total, self.done, self.hidden = what, total, 0, hidden

    def reach(self, done: int, total: int) -> None:
        """So many of so many are done."""
        self.total = total
        self.advance(done - self.done)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        seconds = time.monotonic() - self.started
        if seconds < 1.0 or self.hidden:
            return
        numbers = [f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"]
        if self.done and self.done < (self.total or 0):
            left = seconds * ((self.total or 0) - self.done) / self.done
            numbers.append(f"{duration(left)} left")
        self.show(self.what, self.done, self.total, [*numbers, f"{self.done / seconds:.3g}/s"])


class FetchDisplay(Display):
    """A download: called with each of its transfers."""

    stalls = True
    shown = False
    """Whether there was anything to download."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[tuple[float, str, int]] = deque()

    def __call__(self, transfer: Transfer) -> None:
        self.shown = True
        if transfer.note:
            self.close()
            note(printable(transfer.note))
            return
        name, done, total = transfer.name, transfer.done, transfer.total
        now = time.monotonic()
        self.recent.append((now, name, done))
        while self.recent[0][0] < now - SPEED_OF or self.recent[0][1] != name:
            self.recent.popleft()
        then, _, before = self.recent[0]
        rate = (done - before) / max(now - then, 0.1)
        numbers = [f"{done / 1e6:,.1f}{f' of {total / 1e6:,.1f}' if total else ''} MB"]
        if total and done < total and rate:
            numbers.append(f"{duration((total - done) / rate)} left")
        self.show(f"fetching {name}", done, total, [*numbers, f"{rate / 1e6:.3g} MB/s"])


def _fit(what: str, numbers: list[str], width: int) -> tuple[str, str]:
    """As much as a line of that width can hold besides a bar, which takes the rest."""
    from rich.cells import cell_len
    from rich.text import Text

    room = width - 2  # a blank on each side of the bar
    while len(numbers) > 2 and cell_len(what) + len(", ".join(numbers)) > room:
        numbers.pop()
    name, text = Text(what), ", ".join(numbers)
    name.truncate(max(room - len(text), 0), overflow="ellipsis")
    return name.plain, text


def _progress_bar(stalls: bool) -> Progress:
    from rich.progress import BarColumn, Progress, Task, TextColumn
    from rich.text import Text

    class Numbers(TextColumn):
        """The numbers beside the bar; in a stall, the first of them and how long it has lasted."""

        def render(self, task: Task) -> Text:
            silence = time.monotonic() - task.fields["at"]
            if not stalls or silence < STALLED or task.finished:
                return super().render(task)
            first = task.fields["numbers"].partition(", ")[0]
            return Text(f"{first}, no data for {duration(silence)}")

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Numbers("{task.fields[numbers]}", markup=False),
        console=_console(sys.stderr),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # where results share the screen with the bar
    )
