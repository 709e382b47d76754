"""The text of the command line: the snapshot, and the examples in help screens."""

import re
from pathlib import Path

import pytest

import screens
from vitcli.cli import main

HERE = Path(__file__).parent


def test_screens_are_up_to_date(tmp_path: Path) -> None:
    """If this fails, run `make screens` and review the diff."""
    found = tmp_path / "screens.txt"
    screens.main(found)
    assert found.read_text("utf-8") == (HERE / "screens.txt").read_text("utf-8")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_examples_use_existing_options(name: str) -> None:
    command = main._load_command(name)
    examples = re.findall(
        rf"^ +vit {name} .*", command.help.partition("Examples:")[2], re.MULTILINE
    )
    assert 2 <= len(examples) <= 3
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
    for example in examples:
        assert set(re.findall(r"(?<= )--?[a-z][\w-]*", example)) <= known
