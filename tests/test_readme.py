"""The examples in README.md and docs/ run and print what the pages show.

In a ```console block every line that starts with `$ ` is a command, and the lines below it are its
output, stderr included. A line `...` matches any number of lines, and numbers may differ by a few
percent, as the last digits vary between processors. A ```python block must run without an error.
A block is skipped only if it is preceded by the comment `<!-- not run: reason -->`.

The README starts after `make demo`, in a clone with a virtual environment; the pages of docs/ start
in a copy of tests/images with that environment activated. Commands with patterns, pipes or several
parts run in a shell. Other `vit` commands and Python run in this process: starting one for each
would take most of the time.
"""

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from conftest import disable_figures
from vitcli.cli import main
from vitcli.config import ModelConfig, Preprocess
from vitcli.hub.registry import entries

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
BLOCK = re.compile(r"(<!-- not run: [^>]+-->\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
PROGRESS = re.compile(r"^\w+: [\d,]+(?: of .*|, .*/s)$\n?", re.MULTILINE)
"""Progress lines, which only slow machines print."""


def steps(page: str) -> Iterator[tuple[str, list[str] | None]]:
    """Yield the commands of a page with their output; None for a program in Python."""
    for left_out, kind, text in BLOCK.findall(PAGES[page]):
        if left_out or kind not in {"console", "python", "sh"}:
            continue
        assert kind != "sh", f"{page}: use ```console, or give a reason with <!-- not run: -->"
        if kind == "python":
            yield text, None
            continue
        for example in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *output = example.rstrip().splitlines()
            yield command, output


def sort_predictions(line: str) -> str:
    """Sort predictions ("a.jpg: cat 51%; dog 20%; bird 19%") after the first by name: their scores
    may differ by less than results do between processors."""
    first, *others = line.split("; ")
    return "; ".join([first, *sorted(others)])


def same_line(expected: str, found: str) -> bool:
    """Whether lines match except for spaces, last digits of numbers and order of predictions."""
    expected, found = map(sort_predictions, (expected, found))
    texts = [" ".join(NUMBER.sub("#", line).split()) for line in (expected, found)]
    if texts[0] != texts[1]:
        return False
    for one, other in zip(NUMBER.finditer(expected), NUMBER.finditer(found), strict=True):
        least = 0.11 if expected[one.end() : one.end() + 1] == "%" else 0.02
        values = (float(match[0].replace(",", "")) for match in (one, other))
        if next(values) != pytest.approx(next(values), rel=0.05, abs=least):
            return False
    return True


def same_lines(expected: list[str], found: list[str]) -> bool:
    """Whether all lines match; `...` matches any number of lines."""
    if not expected:
        return not found
    if expected[0].strip() == "...":
        return any(same_lines(expected[1:], found[i:]) for i in range(len(found) + 1))
    return bool(found) and same_line(expected[0], found[0]) and same_lines(expected[1:], found[1:])


SLOW = {"docs/export.md"}  # conversion to ONNX takes longest


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in PAGES
        if any(steps(page))
    ],
)
def test_examples_print_documented_output(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Path(sys.executable).parents[1]
    if not (environment / "bin" / "activate").exists():
        pytest.skip("needs a virtual environment, as `make test` makes it")
    images = tmp_path / "tests" / "images"
    shutil.copytree(ROOT / "tests" / "images", images)
    (tmp_path / ".venv").symlink_to(environment)
    variables = {"COLUMNS": "100", "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    variables |= {"NO_COLOR": "1", "VIT_CACHE": str(tmp_path / "cache")}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path if page == "README.md" else images)
    session = f"cd {Path.cwd()}\n"  # the commands that change the state of the shell
    if page != "README.md":
        session += f". {environment}/bin/activate\n"
    for command, expected in steps(page):
        if expected is None:
            exec(command, {"__name__": "__main__"})
            continue
        program, *args = shlex.split(command)
        if program == "vit" and not re.search(r"[*<>;|&]", re.sub(r"'[^']*'", "", command)):
            result = CliRunner().invoke(main.app, args, prog_name="vit")
            status, text = result.exit_code, result.output
        else:
            script = shlex.quote(session + command)
            status, text = subprocess.getstatusoutput(f"bash -c {script} </dev/null")
        if program in (".", "cd"):
            session += f"{command}\n"
        if program == "cd":
            monkeypatch.chdir(*args)
        found = PROGRESS.sub("", text).rstrip().splitlines()
        shown = "\n".join([f"$ {command}", text, page, *expected])
        assert same_lines(expected, found), shown
        assert status == 0 or any("error" in line for line in expected), shown


@functools.cache
def known_options() -> set[str]:
    """All options shown in help screens; only the first of several long names."""

    def options(command: typer.main.Any) -> Iterator[str]:
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                long = [name for name in parameter.opts if name.startswith("--")]
                yield from [*long[:1], *parameter.secondary_opts]
        for inner in getattr(command, "commands", {}).values():
            yield from options(inner)

    found = {"--help", "--version", "--install-completion", "--show-completion"}
    for name in main.COMMANDS:
        found.update(options(main._load_command(name)))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_documented_options_exist(page: str) -> None:
    code = re.findall(r"`(--[a-z][^`]*)`|`(vit [^`]+)`|^\$ (vit .*)$", PAGES[page], re.MULTILINE)
    named = {
        name for texts in code for name in re.findall(r"(?<!\S)--[a-z][\w-]*", " ".join(texts))
    }
    assert named <= known_options()


@pytest.mark.parametrize(
    "command",
    [
        "predict cat.jpg missing.jpg",
        "predict cat.jpg --features features.npy",
        "evaluate --data few",
        "finetune --data few --steps 2 --batch-size 2 --preset pets --lr 0.1",
        "fewshot --data few --shots 1 --val-fraction 0.5",
        "inspect cat.jpg",
        "convert golden vit.npz --dry-run",
        "export golden vit.pt2",
        "resize-posemb golden --grid 5 --dry-run",
        "info golden",
        "info B/16 --images 1000",
        "models included",
        "models show vit-b16-i21k",
        "pull default nothing",
    ],
)
def test_keys_of_json_are_documented(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "tests" / "images", tmp_path, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests" / "golden" / "timm_vit_default", tmp_path / "golden")
    for file in ("few/cat/1.jpg", "few/cat/2.jpg", "few/dog/1.jpg", "few/dog/2.jpg"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "cat.jpg", tmp_path / file)
    disable_figures(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "cache"))
    name, *arguments = command.split()
    if name == "finetune":
        arguments += ["--device", "cpu", "--workers", "0", "--resolution", "32"]
    printed = CliRunner().invoke(main.app, [name, *arguments, "--json"]).stdout
    sections = re.split(r"^## ", PAGES["docs/json.md"], flags=re.MULTILINE)
    documented = next(text for text in sections if name in text.partition("\n")[0])
    assert printed
    for line in printed.splitlines():
        assert keys(json.loads(line)) <= set(re.findall(r"\w+", documented))


def test_config_fields_are_documented() -> None:
    """Fields of `--preprocess` and `--set`, and their choices."""
    section = PAGES["docs/checkpoints.md"].partition("## Fields of")[2]
    documented = set(re.findall(r"`([^`]+)`", section))
    for kind in (Preprocess, ModelConfig):
        hints = get_type_hints(kind)
        choices = {choice for hint in hints.values() for choice in get_args(hint)}
        assert hints.keys() - {"stem"} <= documented
        assert {choice for choice in choices if isinstance(choice, str)} <= documented


def keys(value: object) -> set[str]:
    """The names of all fields, except those inside configurations and provenance."""
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if not isinstance(value, dict):
        return set()
    closed = (item for name, item in value.items() if name not in {"config", "preprocess"})
    return set(value).union(*map(keys, closed)) - keys(value.get("provenance"))


def test_readme_lists_every_command() -> None:
    table = PAGES["README.md"].partition("## Commands")[2].partition("## ")[0]
    assert set(re.findall(r"^\| `vit (\w[\w-]*)", table, re.MULTILINE)) == set(main.COMMANDS)


def test_architecture_page_lists_every_module() -> None:
    text, package = PAGES["docs/architecture.md"], ROOT / "vitcli"
    described, directory = [], ""
    for line in text.partition("## Modules")[2].splitlines():
        if line.endswith(":"):
            found = re.match(r"`(\w+/)`", line)
            directory = found[1] if found else ""
        described += [directory + name for name in re.findall(r"`(\w+\.py)`", line)]
    modules = [path for path in package.rglob("*.py") if path.name[0] != "_"]
    assert sorted(described) == sorted(str(path.relative_to(package)) for path in modules)
    named = set(re.findall(r"`((?!tests)\w+/\w+\.py)`", text))
    assert named <= set(described) | {"cli/NAME.py"}


def test_readme_model_count() -> None:
    found = re.search(r"`vit models` lists (\d+)", PAGES["README.md"])
    assert found and int(found[1]) == len(entries())


def test_links_resolve() -> None:
    for page, text in PAGES.items():
        directory = (ROOT / page).parent
        for target, heading in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text):
            file = directory / target if target else ROOT / page
            assert file.exists(), (page, target)
            if heading:
                titles = re.findall(r"^#+ (.*)", file.read_text("utf-8"), re.MULTILINE)
                assert heading in {anchor(title) for title in titles}, (page, target, heading)


def anchor(title: str) -> str:
    """GitHub's anchor for a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].encode()) <= 10_000
