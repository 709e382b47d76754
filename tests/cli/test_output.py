"""What is printed where: JSON, tables, notes, bars on a terminal and lines elsewhere."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from vitcli.cli import output


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets; bars do not look at it."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(output, "PLAIN_EVERY", 10.0)
    return now


def test_json_is_valid_whatever_it_holds(capsys):
    value = {"file": "caf\udce9 ü.jpg", "score": float("nan"), "n": [float("inf"), 1.5]}
    output.json_line(value)
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == {"file": "caf\udce9 ü.jpg", "score": None, "n": [None, 1.5]}
    output.json_line({"label": "Grüne Mamba"})
    assert capsys.readouterr().out == '{"label": "Grüne Mamba"}\n'


def test_notes_and_errors_go_to_stderr(capsys):
    output.note("a note")
    output.note("unheard", quiet=True)
    output.warning("careful")
    output.error("x: broken\nmend it")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "a note\nwarning: careful\nerror: x: broken\nmend it\n"


def test_colours_only_where_they_belong(terminal, monkeypatch):
    screen = terminal("stderr")
    output.error("red")
    assert screen.getvalue() == "\x1b[1;31merror\x1b[0m: red\n"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert output.paint("red", "31", screen) == "red"


def test_names_cannot_command_a_terminal():
    assert output.printable("a\x1b[2Jb\rc\nd\x9b") == "a\\x1b[2Jb\\x0dc\\x0ad\\x9b"


def test_errors_warnings_and_notes_have_lines_and_no_other_controls(capsys):
    for tell in (output.error, output.warning, output.note):
        tell("a\x1bb\nc\rd")
        assert capsys.readouterr().err.endswith("a\\x1bb\nc\\x0dd\n")


def test_entries_are_folded_between_words_on_a_terminal(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    text = f"a few words, an/{'x' * 50}, self-explanatory\x1b"
    assert output.entry("plan", text, 11, io.StringIO()) == f"plan       {text[:-1]}\\x1b"
    assert output.entry("plan", "a\nb", 11, io.StringIO()) == "plan       a\\x0ab"
    assert output.entry("plan", text, 11, terminal("stderr")).splitlines() == [
        "plan       a few words,",
        f"           an/{'x' * 50},",
        "           self-explanatory\\x1b",
    ]
    monkeypatch.setenv("COLUMNS", "20")
    assert "\n" not in output.entry("plan", text, 11, sys.stderr)


def test_plain_tables_have_columns(capsys):
    output.table(["name", "n"], [["a", "1,000"], ["long one", "2"]], numbers=[1])
    assert capsys.readouterr().out == "name          n\na         1,000\nlong one      2\n"


def test_a_row_of_a_table_is_a_line(capsys, terminal):
    cells = ["na\nme", "[/n]"], [["a\nb", "1"], ["c", "2"]]
    output.table(*cells, numbers=[1])
    assert capsys.readouterr().out == "na\\x0ame  [/n]\na\\x0ab       1\nc            2\n"
    screen = terminal("stdout")
    output.table(*cells, numbers=[1])
    assert "na\\x0ame" in screen.getvalue() and "[/n]" in screen.getvalue()
    assert "a\\x0ab" in screen.getvalue()


def test_tables_on_a_terminal_show_what_stands_there(terminal):
    screen = terminal("stdout")
    output.table(["name", "n"], [["[red]a[/red]", "1"], ["b\x1b[31m", "2"]], numbers=[1])
    assert "[red]a[/red]" in screen.getvalue() and "b\\x1b[31m" in screen.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (60, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds, text):
    assert output.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 kB"),
        (2930, "2.9 kB"),
        (5_800_000, "5.8 MB"),
        (410_383_692, "410 MB"),
        (1.64e9, "1.6 GB"),
    ],
)
def test_sizes(count, text):
    assert output.size(count) == text


def test_a_meter_says_a_line_now_and_then(capsys, clock):
    with output.Meter("images", 100) as meter:
        for _ in range(6):
            clock[0] += 4
            meter.advance(5)
    assert capsys.readouterr().err.splitlines() == [
        "images: 15 of 100, 1.25/s, 1 min 8 s left",
        "images: 30 of 100, 1.25/s, 56 s left",
    ]


def test_a_meter_without_an_end_counts(capsys, clock):
    with output.Meter("images") as meter:
        clock[0] += 10
        meter.advance(5000)
    assert capsys.readouterr().err == "images: 5,000, 500/s\n"


def test_a_line_of_progress_is_one(capsys, clock, terminal):
    def fetch():
        with output.FetchDisplay() as fetching:
            clock[0] += 10
            fetching("a\nb", 1_000_000, None)

    fetch()
    assert capsys.readouterr().err == "fetching a\\x0ab: 1 MB, 0.1 MB/s\n"
    screen = terminal("stderr")
    fetch()
    assert "fetching a\\x0ab" in screen.getvalue()


def test_quiet_meters_and_short_jobs_say_nothing(capsys, clock):
    with output.Meter("images", 10, quiet=True) as meter:
        clock[0] += 60
        meter.advance(5)
    with output.Meter("images", 10) as meter:
        clock[0] += 0.5
        meter.advance(10)
    assert capsys.readouterr().err == ""


def drawn(screen: io.StringIO) -> str:
    """The last line of a bar, without colours."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    return [line for part in re.split(r"[\r\n]", text) if (line := part.strip())][-1]


def test_a_meter_draws_a_bar_on_a_terminal(terminal, clock, capsys):
    screen = terminal("stderr")
    with output.Meter("images", 100) as meter:
        clock[0] += 10
        meter.advance(50)
        output.line("a result")
    assert "images" in screen.getvalue() and "50 of 100, 5/s, 10 s left" in screen.getvalue()
    assert capsys.readouterr().out == "a result\n"  # not swallowed by the display


def test_downloads(capsys, clock):
    with output.FetchDisplay() as fetching:
        fetching("model.safetensors", 0, 400_000_000)
        clock[0] += 10
        fetching("model.safetensors", 100_000_000, 400_000_000)
    line = "fetching model.safetensors: 100 of 400 MB, 10 MB/s, 30 s left\n"
    assert capsys.readouterr().err == line


def test_training_says_the_first_and_the_last_step_and_some_between(capsys, clock):
    with output.TrainingDisplay() as display:
        for step in range(1, 31):
            clock[0] += 1
            event = {"step": step, "steps": 30, "loss": 1 / step, "lr": 3e-3, "accuracy": 0.5}
            display(event | {"images_per_second": 123.4, "eta": 30.0 - step})
            if step == 15:
                display.note("step 15: 61.2% on validation")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "step 1 of 30: loss 1.0000, accuracy 50.0%, lr 0.003, 123 images/s, 29 s left"
    )
    starts = [line.partition(":")[0] for line in lines]
    assert starts == ["step 1 of 30", "step 11 of 30", "step 15", "step 21 of 30", "step 30 of 30"]


def test_training_draws_a_bar_on_a_terminal(terminal):
    screen = terminal("stderr")
    with output.TrainingDisplay() as display:
        display({"step": 3, "steps": 10, "loss": 0.5, "eta": 70})
        display.note("saved")
    shown = screen.getvalue()
    assert "step 3 of 10" in shown and "loss 0.5000, 1 min 10 s left" in shown and "saved" in shown


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (100, "loss 0.6916, accuracy 58.3%, lr 0.001, 25.4 images/s, 1 min 33 s left"),
        (84, "loss 0.6916, accuracy 58.3%, lr 0.001, 25.4 images/s, 1 min 33 s left"),
        (83, "loss 0.6916, accuracy 58.3%, 25.4 images/s, 1 min 33 s left"),
        (60, "loss 0.6916, accuracy 58.3%, 1 min 33 s left"),
        (50, "loss 0.6916, 1 min 33 s left"),
        (30, "1 min 33 s left"),
    ],
)
def test_narrow_terminals_show_how_far_training_is(terminal, monkeypatch, width, shown):
    screen = terminal("stderr")
    monkeypatch.setenv("COLUMNS", str(width))
    event = {"step": 6, "steps": 300, "loss": 0.6916, "accuracy": 0.583, "lr": 1e-3}
    with output.TrainingDisplay() as display:
        display(event | {"images_per_second": 25.4, "eta": 93.0})
    text = drawn(screen)
    assert re.fullmatch(rf"step 6 of 300 [━╸╺]* {shown}", text) and len(text) <= width


@pytest.mark.parametrize("width", [80, 60])
def test_narrow_terminals_show_how_far_other_work_is(terminal, clock, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    screen = terminal("stderr")
    with output.Meter("images at 384 x 384", 50_000) as meter:
        clock[0] += 10
        meter.advance(1234)
    assert drawn(screen).startswith("images at 384 x 384 ")
    assert " 1,234 of 50,000, " in drawn(screen) and drawn(screen).endswith(", 6 min 35 s left")
    screen = terminal("stderr")
    with output.FetchDisplay() as fetching:
        clock[0] += 10
        fetching("some [/name]/model-00001-of-00002.safetensors", 268_000_000, 1_208_000_000)
    text = drawn(screen)
    assert text.startswith("fetching some [/name]/") and len(text) <= width
    assert text.endswith(" 268 of 1,208 MB, 35 s left")
