"""Output: JSON, tables and notes."""

import io
import json

import pytest

from vitcli.cli import output
from vitcli.errors import OutputError


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
    assert output.format_entry("plan", text, 11, io.StringIO()) == [f"plan       {text[:-1]}\\x1b"]
    assert output.format_entry("plan", text, 11, terminal("stderr")) == [
        "plan       a few words,",
        f"           an/{'x' * 50},",
        "           self-explanatory\\x1b",
    ]


def test_table_rows_are_single_lines_without_markup(capsys, terminal):
    header, rows = ["na\nme", "[/n]"], [["[red]\nb", "1,000"], ["c\x1b:cat:", "2"]]
    output.table(header, rows, numeric=[1])
    plain = "na\\x0ame     [/n]\n[red]\\x0ab  1,000\nc\\x1b:cat:      2\n"
    assert capsys.readouterr().out == plain
    screen = terminal("stdout")
    output.table(header, rows, numeric=[1])
    for cell in ("na\\x0ame", "[/n]", "[red]\\x0ab", "c\\x1b:cat:"):
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
