"""What the commands print: results to stdout; progress, notes and errors to stderr.

On a terminal, tables and bars by Rich (imported only then); elsewhere plain lines. No colour where
NO_COLOR is set. Nothing else in the package prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PLAIN_EVERY = 10.0
"""Seconds between two plain lines of progress."""


# ---------------------------------------------------------------------------------------------
# Lines


def line(text: str = "", file: TextIO | None = None) -> None:
    """One line of results, written out at once: whoever reads a pipe sees each as it comes."""
    print(text, file=file or sys.stdout, flush=True)


def json_line(value: Any, file: TextIO | None = None) -> None:
    """One JSON object on one line; numbers that JSON cannot write (NaN) become null."""
    text = json.dumps(_finite(value), ensure_ascii=False)
    if any("\ud800" <= c <= "\udfff" for c in text):  # a file name that is no text
        text = json.dumps(_finite(value))
    line(text, file)


def entry(name: str, text: str, indent: int, stream: TextIO) -> str:
    """A name and, `indent` columns from the left, what there is to say; on a terminal folded there
    between words."""
    text, room = printable(text), shutil.get_terminal_size().columns - indent
    if stream.isatty() and room >= 30:
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
        text = f"\n{'':<{indent}}".join(lines)
    return f"{name:<{indent}}{text}".rstrip()


def note(text: str, quiet: bool = False) -> None:
    """Something good to know, on stderr; nothing with --quiet."""
    if not quiet:
        line(_printable_lines(text), sys.stderr)


def warning(text: str) -> None:
    """Something that may be wrong, on stderr, also with --quiet."""
    line(f"{paint('warning', '1;33', sys.stderr)}: {_printable_lines(text)}", sys.stderr)


def error(text: str) -> None:
    """What failed, on stderr; a second line of the text says what to do."""
    line(f"{paint('error', '1;31', sys.stderr)}: {_printable_lines(text)}", sys.stderr)


def is_terminal() -> bool:
    """Whether someone watches stderr."""
    return sys.stderr.isatty()


def paint(text: str, codes: str, stream: TextIO) -> str:
    """The text in ANSI codes (such as "1;31") where the stream shows colour."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{codes}m{text}\x1b[0m"


_CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)]}


def printable(text: str) -> str:
    """The text on one line, without what would command a terminal: file and class names come from
    anywhere."""
    return text.translate(_CONTROLS)


def _printable_lines(text: str) -> str:
    """The same of text that has lines of its own, such as an error and what to do."""
    return "\n".join(map(printable, text.split("\n")))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@contextlib.contextmanager
def results_file(path: str | None) -> Iterator[TextIO]:
    """Where results go: a file that is written whole or not at all, or stdout."""
    if path is None:
        yield sys.stdout
        return
    from vitcli.atomic import whole_file

    with whole_file(path) as file:
        text = io.TextIOWrapper(file, "utf-8", "surrogateescape", "\n")
        yield text
        text.detach()


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> None:
    """A table on stdout: Rich's on a terminal, columns of spaces elsewhere.

    Args:
        numbers: the columns that are set flush right.
    """
    right, columns = set(numbers), list(map(printable, columns))
    cells = [list(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table

        console = _console(sys.stdout)
        roomy = sum(widths) + 2 * len(widths) <= console.width
        drawn = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, int(roomy), 0, 0))
        for i, column in enumerate(columns):
            # What a row is about (it is what one types next), numbers and short words stay whole.
            whole = i == 0 or i in right or widths[i] <= 12
            side: Literal["left", "right"] = "right" if i in right else "left"
            drawn.add_column(escape(column), justify=side, no_wrap=whole, overflow="fold")
        for row in cells:
            drawn.add_row(*map(escape, row))
        console.print(drawn)
        return
    for row in [columns, *cells]:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line("  ".join(padded).rstrip())


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


def figures(values: Mapping[str, float], prefix: str = "") -> list[str]:
    """Those of `metrics.FIGURES` that are there under the prefix: ["top-1 64.54%", ...]."""
    from vitcli.config import FIGURES

    known = {name: values.get(prefix + key) for key, (_, name) in FIGURES.items()}
    return [f"{name} {value:.2%}" for name, value in known.items() if value is not None]


def size(count: int) -> str:
    """Bytes in words: "2.9 kB", "5.8 MB", "410 MB", "1.6 GB"."""
    value, unit = count / 1e3, "kB"
    for larger in ("MB", "GB"):
        if value >= 1e3:
            value, unit = value / 1e3, larger
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "3 min 20 s", "2 h 5 min", "3 days 4 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days {hours % 24} h"


# ---------------------------------------------------------------------------------------------
# Progress


class _Display:
    """A bar on a terminal, a plain line now and then elsewhere; nothing when quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.started = self.last = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar off the screen; what is shown next begins a new one."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def show(
        self,
        what: str,
        done: int,
        total: int | None,
        figures: Sequence[str],
        spare: Sequence[str] = (),
        now: bool = False,
    ) -> None:
        """How far it is.

        Args:
            spare: the figures that a narrow terminal goes without, the first of them first.
            now: do not wait with the plain line.
        """
        if self.quiet:
            return
        if sys.stderr.isatty():
            if self.bar is None:
                self.bar = _progress_bar()
                self.bar.start()
                self.bar.add_task("", figures="")
            what, told = _fit(printable(what), figures, spare, self.bar.console.width)
            task = self.bar.task_ids[0]
            self.bar.update(task, description=what, completed=done, total=total, figures=told)
        elif now or time.monotonic() - self.last >= PLAIN_EVERY:
            self.last = time.monotonic()
            note(f"{printable(what)}: {', '.join(figures)}")


class Meter(_Display):
    """How far a job is, and how long it will take. Nothing is shown in its first second."""

    def __init__(self, what: str, total: int | None = None, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.what, self.total, self.done = what, total, 0

    def reach(self, done: int, total: int) -> None:
        """So many of so many are done."""
        self.total = total
        self.advance(done - self.done)

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        seconds = time.monotonic() - self.started
        if seconds < 1.0:
            return
        rate = self.done / seconds
        speed = f"{rate:.3g}/s"
        figures = [f"{self.done:,}", speed]
        if self.total:
            left = f"{duration((self.total - self.done) / rate)} left"
            figures = [f"{self.done:,} of {self.total:,}", speed, left]
        self.show(self.what, self.done, self.total, figures, [speed])


class FetchDisplay(_Display):
    """A download: called with a file's name, its bytes that are there and those there will be."""

    def __call__(self, name: str, done: int, total: int | None) -> None:
        rate = done / max(time.monotonic() - self.started, 0.1)
        speed = f"{rate / 1e6:.3g} MB/s"
        figures = [f"{done / 1e6:,.0f}{f' of {total / 1e6:,.0f}' if total else ''} MB", speed]
        if total and done < total and rate:
            figures.append(f"{duration((total - done) / rate)} left")
        self.show(f"fetching {name}", done, total, figures, [speed])


class TrainingDisplay(_Display):
    """A training run: called with each of its events. The first one shows at once.

    An event holds `step` and `steps`, and any of `loss`, `accuracy` (in [0, 1]), `lr`,
    `images_per_second` and `eta` (seconds).
    """

    begun = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        step, steps = event["step"], event["steps"]
        what = f"step {step:,} of {steps:,}"
        if "trial" in event:  # of a sweep
            what = f"learning rate {event['trial']:g}, {what}"
        now = not self.begun or step == steps
        self.begun = True
        known = training_figures(event)
        spare = [known[key] for key in _SPARE if key in known]
        self.show(what, step, steps, list(known.values()), spare, now)

    def count(self, what: str, done: int, total: int) -> None:
        """How far a pass over images is, between two steps."""
        self.show(what, done, total, [f"{done:,} of {total:,}"])

    def note(self, text: str) -> None:
        """A line that stays (an evaluation, a saved state), above the bar."""
        note(text, self.quiet)


_SPARE = ("lr", "images_per_second", "accuracy", "loss")
"""What a narrow terminal does not show of a training event, the first of them first."""


def training_figures(event: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a training event that are known, in words."""
    words = {
        "loss": "loss {:.4f}",
        "accuracy": "accuracy {:.1%}",
        "lr": "lr {:.3g}",
        "images_per_second": "{:.3g} images/s",
    }
    known = {k: word.format(event[k]) for k, word in words.items() if event.get(k) is not None}
    if event.get("eta") is not None:
        known["eta"] = f"{duration(event['eta'])} left"
    return known


def _fit(what: str, figures: Sequence[str], spare: Sequence[str], width: int) -> tuple[str, str]:
    """What a line of that width has room for beside a bar, which takes what is left: a name, cut
    only where nothing more can be spared, and the figures."""
    from rich.cells import cell_len
    from rich.text import Text

    name, kept, room = Text(what), list(figures), width - 2  # a blank on each side of the bar
    for figure in spare:
        if cell_len(what) + len(", ".join(kept)) > room:
            kept.remove(figure)
    told = ", ".join(kept)
    name.truncate(max(room - len(told), 0), overflow="ellipsis")
    return name.plain, told


def _progress_bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        console=_console(sys.stderr),
        transient=True,
        redirect_stdout=False,  # results are no part of the display
    )
