"""The README tells the truth: its commands are run, and print what it says they print.

A ```console block holds commands (`$ ...`), each followed by its output, standard error included.
They are run in one folder, in order, with the photographs of tests/images in it. A line `...`
stands for any lines; numbers may differ a little, as the last digits do between processors. The
comment `<!-- not run: why -->` before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vitcli.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")


def console_blocks() -> list[list[tuple[str, list[str]]]]:
    """(command, lines printed) of each block that is to be run."""
    blocks = []
    pattern = r"(<!-- not run: [^>]*-->\s*)?^```console\n(.*?)^```"
    for match in re.finditer(pattern, README, re.DOTALL | re.MULTILINE):
        if match[1]:
            continue
        steps: list[tuple[str, list[str]]] = []
        for line in match[2].splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            else:
                steps[-1][1].append(line)
        blocks.append(steps)
    return blocks


def sorted_answers(line: str) -> str:
    """Answers ("a.jpg: cat 51%; dog 20%; bird 19%") after the first by name."""
    first, *others = line.split("; ")
    return "; ".join([first, *sorted(others)])


def same_line(expected: str, found: str) -> bool:
    """Equal but for spaces, for the last digits of numbers, and for the order of the answers after
    the first, whose scores may lie nearer than processors agree."""
    expected, found = map(sorted_answers, (expected, found))
    words = [" ".join(NUMBER.sub("#", line).split()) for line in (expected, found)]
    numbers = [[float(n.replace(",", "")) for n in NUMBER.findall(x)] for x in (expected, found)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=0.05, abs=0.02)


def same_lines(expected: list[str], found: list[str]) -> bool:
    """Whether each line is as expected; `...` stands for any number of lines."""
    if not expected:
        return not found
    if expected[0].strip() == "...":
        return any(same_lines(expected[1:], found[i:]) for i in range(len(found) + 1))
    return bool(found) and same_line(expected[0], found[0]) and same_lines(expected[1:], found[1:])


def test_lines_are_compared_as_told() -> None:
    assert same_lines(["a  0.913", "...", "end"], ["a 0.912", "x", "y", "end"])
    assert not same_lines(["a 0.913"], ["a 0.813"])
    assert same_lines(["x: a 51%; b 20.2%; c 20%"], ["x: a 51%; c 20.1%; b 20%"])
    assert not same_lines(["x: a 51%; b 20%"], ["x: b 51%; a 20%"])
    assert not same_lines(["cat 0.9"], ["dog 0.9"])
    assert not same_lines(["a"], ["a", "b"])


def test_commands_print_what_the_readme_says(tmp_path: Path) -> None:
    for image in (ROOT / "tests" / "images").iterdir():
        shutil.copy(image, tmp_path)
    environment = {
        **os.environ,
        "COLUMNS": "100",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    vit = f"{shlex.quote(sys.executable)} -m vitcli"
    for steps in console_blocks():
        for command, expected in steps:
            done = subprocess.run(
                re.sub(r"(^|\| *)vit ", rf"\1{vit} ", command),
                shell=True,
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            # A machine so slow that progress is told prints lines that are no part of the answer.
            told = re.sub(r"^images: \d.*/s.*\n", "", done.stdout, flags=re.MULTILINE)
            found = told.rstrip().splitlines()
            while expected and not expected[-1].strip():
                expected.pop()
            told = "\n".join(expected)
            assert same_lines(expected, found), f"$ {command}\n{done.stdout}\nREADME:\n{told}"


def test_every_command_is_in_the_table() -> None:
    table = README.partition("## Commands")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `vit (\w[\w-]*)", table, re.MULTILINE)) == set(COMMANDS)


def test_every_room_is_described() -> None:
    section = README.partition("## Architecture")[2].partition("\n## ")[0]
    paths = [
        p for p in (ROOT / "vitcli").iterdir() if p.name[0] not in "_." and p.name != "py.typed"
    ]
    for path in paths:
        name = f"{path.name}/" if path.is_dir() else path.name
        assert f"`{name}`" in section, f"the architecture section does not mention {name}"


def test_links_into_the_repository_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README)
    missing = [target for target in targets if not (ROOT / target).exists()]
    assert not missing
