"""What the commands print: results to stdout; progress, notes and errors to stderr.

On a terminal, tables and bars by Rich (imported only then); elsewhere plain lines. No colour where
NO_COLOR is set. Nothing else in the package prints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

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
    line(json.dumps(_finite(value), ensure_ascii=False), file)


def note(text: str, quiet: bool = False) -> None:
    """Something good to know, on stderr; nothing with --quiet."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def warning(text: str) -> None:
    """Something that may be wrong, on stderr, also with --quiet."""
    print(f"{paint('warning', '1;33', sys.stderr)}: {text}", file=sys.stderr, flush=True)


def error(text: str) -> None:
    """What failed, on stderr; a second line of the text says what to do."""
    print(f"{paint('error', '1;31', sys.stderr)}: {text}", file=sys.stderr, flush=True)


def paint(text: str, codes: str, stream: TextIO) -> str:
    """The text in ANSI codes (such as "1;31") where the stream shows colour."""
    plain = not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[{codes}m{text}\x1b[0m"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int]) -> None:
    """A table on stdout: Rich's on a terminal, columns of spaces elsewhere.

    Args:
        numbers: the columns that are set flush right.
    """
    right, cells = set(numbers), [list(row) for row in rows]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.markup import escape
        from rich.table import Table

        drawn = Table(box=SIMPLE_HEAD, pad_edge=False)
        for i, column in enumerate(columns):
            drawn.add_column(column, justify="right" if i in right else "left")
        for row in cells:
            drawn.add_row(*map(escape, row))
        _console(sys.stdout).print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line("  ".join(padded).rstrip())


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False)


def duration(seconds: float) -> str:
    """Seconds in words: "8 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


# ---------------------------------------------------------------------------------------------
# Progress


class Meter:
    """How far a long job is: a bar on a terminal, a plain line now and then elsewhere.

    Use as a context manager; nothing is shown with `quiet`, nor in the first second of a job.
    """

    def __init__(self, what: str, total: int | None = None, quiet: bool = False) -> None:
        self.what, self.total, self.quiet = what, total, quiet
        self.done = 0
        self.started = self.last = time.monotonic()
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        now = time.monotonic()
        if self.quiet or now - self.started < 1.0:
            return
        if sys.stderr.isatty():
            self._draw(self._figures(now))
        elif now - self.last >= PLAIN_EVERY:
            self.last = now
            note(f"{self._counted()}, {self._figures(now)}")

    def _counted(self) -> str:
        of = f" of {self.total:,}" if self.total else ""
        return f"{self.what}: {self.done:,}{of}"

    def _figures(self, now: float) -> str:
        rate = self.done / (now - self.started)
        left = (self.total - self.done) / rate if self.total and self.done else None
        return f"{rate:.3g}/s" + (f", {duration(left)} left" if left is not None else "")

    def _draw(self, figures: str) -> None:
        if self.bar is None:
            self.bar = _progress_bar()
            self.bar.start()
            self.bar.add_task(self.what, figures="")
        task = self.bar.task_ids[0]
        self.bar.update(task, completed=self.done, total=self.total, figures=figures)


class TrainingDisplay:
    """Renders a training run's events: call it with each of them.

    An event holds `step` and `steps`, and any of `loss`, `accuracy` (of the last evaluation, 0 to
    1), `lr`, `images_per_second` and `eta` (seconds). A live bar on a terminal; elsewhere a line
    for the first and the last step and every ten seconds.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.last = -PLAIN_EVERY
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        step, steps = event["step"], event["steps"]
        if self.quiet:
            return
        if sys.stderr.isatty():
            if self.bar is None:
                self.bar = _progress_bar()
                self.bar.start()
                self.bar.add_task("training", total=steps, figures="")
            self.bar.update(self.bar.task_ids[0], completed=step, figures=training_figures(event))
            return
        now = time.monotonic()
        if step == steps or now - self.last >= PLAIN_EVERY:
            self.last = now
            note(f"step {step:,} of {steps:,}: {training_figures(event)}")

    def note(self, text: str) -> None:
        """A line that stays (an evaluation, a saved state), above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False)
        else:
            note(text, self.quiet)


def training_figures(event: Mapping[str, Any]) -> str:
    """The figures of a training event that are known, in one line."""
    words = {
        "loss": lambda x: f"loss {x:.4f}",
        "accuracy": lambda x: f"accuracy {x:.1%}",
        "lr": lambda x: f"lr {x:.3g}",
        "images_per_second": lambda x: f"{x:.3g} images/s",
        "eta": lambda x: f"{duration(x)} left",
    }
    return ", ".join(word(event[key]) for key, word in words.items() if event.get(key) is not None)


def _progress_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        console=_console(sys.stderr),
        transient=True,
    )
