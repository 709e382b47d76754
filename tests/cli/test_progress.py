"""Progress: bars on a terminal, plain lines elsewhere."""

import dataclasses
import io
import re

import pytest

from cli.conftest import strip_ansi
from vitcli.cli import output, progress
from vitcli.cli.training_display import TrainingDisplay
from vitcli.hub_requests import Transfer
from vitcli.train import events


@pytest.fixture
def clock(monkeypatch):
    """A clock set by the test; bars refresh independently of it."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "PLAIN_EVERY", 10.0)
    return now


def test_progress_as_plain_lines(capsys, clock):
    with progress.Meter("images", 100) as meter:
        for _ in range(6):
            clock[0] += 4
            meter.advance(5)
    assert capsys.readouterr().err.splitlines() == [
        "images: 15 of 100, 1 min 8 s left, 1.25/s",
        "images: 30 of 100, 56 s left, 1.25/s",
    ]
    with progress.Meter("images") as meter:
        clock[0] += 50  # loading the model
        meter.advance(64)
        clock[0] += 10
        meter.advance(5000)
    assert capsys.readouterr().err == "images: 64\nimages: 5,064, 500/s\n"
    with progress.DownloadDisplay() as display:
        display(Transfer("mo\ndel", 0, 400_000_000))
        clock[0] += 10
        display(Transfer("mo\ndel", 100_000_000, 400_000_000))
    line = "fetching mo\\x0adel: 100.0 of 400.0 MB, 30 s left, 10 MB/s\n"
    assert capsys.readouterr().err == line
    with progress.Meter("images", 10) as meter:  # too short to report
        clock[0] += 0.5
        meter.advance(10)
    assert capsys.readouterr().err == ""


def last_bar_line(screen: io.StringIO) -> str:
    """The last line of a progress bar, without colors."""
    return re.split(r"\s*[\r\n]\s*", strip_ansi(screen.getvalue()).strip())[-1]


def step(step: int, steps: int) -> events.Step:
    return events.Step(step, steps, 0.6916, 0.583, 1e-3, 25.4, 93.0)


def test_training_prints_first_last_and_periodic_steps(capsys, clock):
    with TrainingDisplay() as display:
        for number in range(1, 31):
            clock[0] += 1
            display(step(number, 30))
            if number == 15:
                display(events.Note("step 15: 61.2% on validation"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "step 1 of 30: 1 min 33 s left, loss 0.6916, accuracy 58.3%, 25.4 images/s, lr 0.001"
    )
    starts = [line.partition(":")[0] for line in lines]
    assert starts == ["step 1 of 30", "step 11 of 30", "step 15", "step 21 of 30", "step 30 of 30"]


def test_results_are_printed_during_progress(terminal, clock, capsys):
    screen = terminal("stderr")
    with progress.Meter("images", 100) as meter:
        meter.advance(40)
        clock[0] += 2
        meter.advance(10)
        output.line("a result")
    assert "images" in screen.getvalue() and "50 of 100, 10 s left, 5/s" in screen.getvalue()
    assert capsys.readouterr().out == "a result\n"  # not swallowed by the display


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (100, "9 s left, loss 0.6916, accuracy 58.3%, 25.4 images/s, lr 0.001"),
        (50, "9 s left, loss 0.6916"),
    ],
)
def test_training_progress_fits_narrow_terminals(terminal, monkeypatch, width, expected):
    screen = terminal("stderr")
    monkeypatch.setenv("COLUMNS", str(width))
    with TrainingDisplay() as display:
        display(step(5, 300))
        display(dataclasses.replace(step(6, 300), eta=9.0))
    text = last_bar_line(screen)
    assert re.fullmatch(rf"step 6 of 300 [━╸╺]* {expected}", text) and len(text) <= width
