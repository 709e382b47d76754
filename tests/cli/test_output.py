"""Output: JSON, tables, notes, progress bars on a terminal and plain lines elsewhere."""

import dataclasses
import io
import json
import re
import sys

import pytest

from cli.conftest import strip_ansi
from vitcli.cli import output
from vitcli.cli.training_display import TrainingDisplay
from vitcli.errors import OutputError
from vitcli.hub.retry import Transfer
from vitcli.train import events


@pytest.fixture
def clock(monkeypatch):
    """A clock set by the test; bars refresh independently of it."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(output, "PLAIN_EVERY", 10.0)
    return now


def test_json_line_is_always_valid(capsys):
    value = {"file": "caf\udce9 ü.jpg", "score": float("nan"), "n": [float("inf"), 1.5]}
    output.json_line(value)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == {"file": "caf\udce9 ü.jpg", "score": None, "n": [None, 1.5]}
    output.json_line({"label": "Grüne Mamba\x9b\u202e"})
    assert capsys.readouterr().out == '{"label": "Grüne Mamba\\u009b\\u202e"}\n'
    ascii = io.TextIOWrapper(io.BytesIO(), "ascii", "backslashreplace")
    output.json_line({"label": "Grüne Mamba"}, ascii)
    assert json.loads(ascii.buffer.getvalue()) == {"label": "Grüne Mamba"}


def test_messages_on_stderr_escape_control_characters(capsys, monkeypatch):
    output.note("a\x1b note\u202e")
    monkeypatch.setattr(output, "quiet", True)
    output.note("hidden")
    output.warning("care\rful")
    output.error("x\nhint: y: broken", "mend it\x9b")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "a\\x1b note\\u202e\nwarning: care\\x0dful\n"
        "error: x\\x0ahint: y: broken\nhint: mend it\\x9b\n"
    )


def test_colors_only_on_color_terminals(terminal, monkeypatch):
    screen = terminal("stderr")
    output.error("red")
    assert screen.getvalue() == "\x1b[1;31merror\x1b[0m: red\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert output.style("red", "31", screen) == "red"


def test_entries_wrap_between_words_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = f"a few words, an/{'x' * 50}, self-explanatory\x1b"
    assert output.format_entry("plan", text, 11, io.StringIO()) == f"plan       {text[:-1]}\\x1b"
    assert output.format_entry("plan", "a\nb", 11, io.StringIO()) == "plan       a\\x0ab"
    assert output.format_entry("plan", text, 11, terminal("stderr")).splitlines() == [
        "plan       a few words,",
        f"           an/{'x' * 50},",
        "           self-explanatory\\x1b",
    ]
    monkeypatch.setenv("COLUMNS", "20")
    assert "\n" not in output.format_entry("plan", text, 11, sys.stderr)


def test_table_rows_are_single_lines_without_markup(capsys, terminal):
    header, rows = ["na\nme", "[/n]"], [["[red]\nb", "1,000"], ["c\x1b", "2"]]
    output.table(header, rows, numeric=[1])
    plain = "na\\x0ame     [/n]\n[red]\\x0ab  1,000\nc\\x1b           2\n"
    assert capsys.readouterr().out == plain
    screen = terminal("stdout")
    output.table(header, rows, numeric=[1])
    for cell in ("na\\x0ame", "[/n]", "[red]\\x0ab", "c\\x1b"):
        assert cell in screen.getvalue()


def test_wide_table_keeps_its_numbers(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    numbers, screen = [f"{1000 + i}" for i in range(20)], terminal("stdout")
    output.table(["飛行機", "words", *numbers], [["cat", "a b " * 20, *numbers]], range(2, 22))
    assert all(screen.getvalue().count(number) == 2 for number in numbers)


def test_durations_have_two_units():
    seconds = (0.2, 59.4, 60, 7500, 3605, 90_000)
    expected = ["0 s", "59 s", "1 min", "2 h 5 min", "1 h", "1 d 1 h"]
    assert list(map(output.format_duration, seconds)) == expected


def test_check_writable(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "no" / "x.png", tmp_path / "file" / "x.png", tmp_path):
        with pytest.raises(OutputError) as caught:
            output.check_writable(str(path))
        assert caught.value.where == str(path)
    for path in (tmp_path / "new", tmp_path / "file", "/dev/null"):
        output.check_writable(str(path))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_progress_as_plain_lines(capsys, clock):
    with output.Meter("images", 100) as meter:
        for _ in range(6):
            clock[0] += 4
            meter.advance(5)
    assert capsys.readouterr().err.splitlines() == [
        "images: 15 of 100, 1 min 8 s left, 1.25/s",
        "images: 30 of 100, 56 s left, 1.25/s",
    ]
    with output.Meter("images") as meter:
        clock[0] += 50  # loading the model
        meter.advance(64)
        clock[0] += 10
        meter.advance(5000)
    assert capsys.readouterr().err == "images: 64\nimages: 5,064, 500/s\n"
    with output.DownloadDisplay() as display:
        display(Transfer("mo\ndel", 0, 400_000_000))
        clock[0] += 10
        display(Transfer("mo\ndel", 100_000_000, 400_000_000))
    line = "fetching mo\\x0adel: 100.0 of 400.0 MB, 30 s left, 10 MB/s\n"
    assert capsys.readouterr().err == line
    with output.Meter("images", 10) as meter:  # too short to report
        clock[0] += 0.5
        meter.advance(10)
    assert capsys.readouterr().err == ""


def last_bar_line(screen: io.StringIO) -> str:
    """The last line of a progress bar, without colors."""
    return re.split(r"\s*[\r\n]\s*", strip_ansi(screen.getvalue()).strip())[-1]


def test_stalled_download_shows_no_speed(terminal, clock):
    screen = terminal("stderr")
    with output.DownloadDisplay() as display:
        display(Transfer("model", 0, 400_000_000))
        clock[0] += 1
        display(Transfer("model", 100_000_000, 400_000_000))
        display.bar.refresh()
        assert last_bar_line(screen).endswith("100.0 of 400.0 MB, 3 s left, 100 MB/s")
        clock[0] += 5
        display.bar.refresh()
        assert last_bar_line(screen).endswith("100.0 of 400.0 MB, no data for 5 s")


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
    with output.Meter("images", 100) as meter:
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
        (84, "9 s left, loss 0.6916, accuracy 58.3%, 25.4 images/s"),  # all would fit now
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
