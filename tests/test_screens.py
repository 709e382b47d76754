"""The screens of the command line."""

from __future__ import annotations

import re

import pytest

from vitcli.cli import main


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_shows_examples_of_options_that_exist(name: str) -> None:
    command = main._load(name)
    examples = re.findall(
        rf"^ +vit {name} .*", command.help.partition("Examples:")[2], re.MULTILINE
    )
    assert 2 <= len(examples) <= 3
    known = {option for parameter in command.params for option in parameter.opts}
    for example in examples:
        assert set(re.findall(r"(?<= )--?[a-z][\w-]*", example)) <= known
