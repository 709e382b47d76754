"""Progress on stderr: bars drawn by Rich on a terminal, occasional plain lines elsewhere. Rich is
imported only when it is used."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from vitcli.cli import output

if TYPE_CHECKING:
    from rich.progress import Progress

    from vitcli.hub_requests import Transfer

PLAIN_EVERY = 10.0
"""Seconds between plain progress lines."""
SPEED_WINDOW = 10.0
"""Seconds over which the speed of a download is averaged."""
DELAY = 1.0
"""Seconds before the progress of a job is shown."""
FIRST_BATCH = 0.2
"""Seconds in which the results of the first batch arrive."""
STALL_SECONDS = 2.0
"""Seconds without data after which a bar shows a stall instead of a speed."""
MIN_BAR = 4
"""Width of the bar below which numbers beside it are omitted."""


class Display:
    """A progress bar on a terminal, occasional plain lines elsewhere; nothing with --quiet."""

    shows_stalls = False
    """Whether the bar shows stalls."""

    def __init__(self) -> None:
        self.started = self.last_printed = time.monotonic()
        self.bar: Progress | None = None
        self.max_numbers: int | None = None

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
        if output.quiet:
            return
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            if self.bar is None:
                self.bar = _progress_bar(self.shows_stalls)
                self.bar.add_task("", numbers="", at=now)
            width = self.bar.console.width
            name, kept = _fit_width(output.printable(label), numbers[: self.max_numbers], width)
            if len(kept) < len(numbers):  # once a number is omitted, it stays so: no bar jumps
                self.max_numbers = len(kept)
            fields: Any = {"description": name, "numbers": ", ".join(kept), "at": now}
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, **fields)
            self.bar.start()
        elif force or now - self.last_printed >= PLAIN_EVERY:
            self.last_printed = now
            output.note(f"{label}: {', '.join(numbers)}")


class Meter(Display):
    """Progress of a job and the time left. Nothing is shown before `DELAY`.

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
        if now - self.started < DELAY or self.hidden:
            return
        numbers = [f"{self.done:,} of {self.total:,}" if self.total else f"{self.done:,}"]
        if self.done > self.first_done:
            speed = (self.done - self.first_done) / (now - self.first_time)
            if self.total and self.done < self.total:
                numbers.append(f"{output.format_duration((self.total - self.done) / speed)} left")
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
            output.note(transfer.note)
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
            numbers.append(f"{output.format_duration((total - done) / rate)} left")
        self.show(f"fetching {name}", done, total, [*numbers, f"{rate / 1e6:.3g} MB/s"])


def _fit_width(label: str, numbers: Sequence[str], width: int) -> tuple[str, Sequence[str]]:
    """Return the label, truncated, and as many of the numbers as fit beside it and a bar."""
    from rich.cells import cell_len
    from rich.text import Text

    available = width - 4  # a space on each side of the bar, and room for ^C
    while len(numbers) > 2 and cell_len(label + ", ".join(numbers)) > available - MIN_BAR:
        numbers = numbers[:-1]
    name = Text(label)
    name.truncate(max(available - len(", ".join(numbers)), 0), overflow="ellipsis")
    return name.plain, numbers


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
            return Text(f"{first}, no data for {output.format_duration(silence)}")

    class Bar(Progress):
        """A bar that leaves room for the ^C of a Ctrl-C, which would wrap and keep the line."""

        def get_renderable(self) -> Constrain:
            return Constrain(super().get_renderable(), console.width - 2)

    console = output.rich_console(sys.stderr)
    return Bar(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Numbers("{task.fields[numbers]}", markup=False),
        console=console,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # results share the terminal with the bar
    )
