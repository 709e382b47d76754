"""Runs `vit` inside the test's process: an import of torch for each command would take minutes."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from cli import training_runs
from vitcli import plots
from vitcli.cli import output
from vitcli.cli.main import app


@pytest.fixture(autouse=True)
def no_progress_on_a_slow_machine(monkeypatch):
    """A line of progress every ten seconds would appear wherever a test takes so long."""
    monkeypatch.setattr(output, "PLAIN_EVERY", 1e9)
    monkeypatch.setattr(output, "quiet", False)


@pytest.fixture
def vit():
    """`vit("predict", path, ...)`: exit code, stdout and stderr of the command."""

    def run(*words: object, **settings: Any) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words], prog_name="vit", **settings)

    return run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """`terminal("stderr")` makes a stream a terminal that shows colours. To be called in the test:
    pytest changes the streams between a fixture and its test."""

    def make(name: str) -> io.StringIO:
        stream = Terminal()
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    return make


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Two classes of eight images."""
    root = tmp_path_factory.mktemp("data") / "pets"
    rng = np.random.default_rng(0)
    for name, level in (("cats", 60), ("dogs", 190)):
        (root / name).mkdir(parents=True)
        for i in range(8):
            pixels = np.clip(rng.normal(level, 20, (20, 20, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def parent(images, tmp_path_factory):
    """A pre-trained model of 16 px."""
    folder = tmp_path_factory.mktemp("runs") / "parent"
    options = [*training_runs.TINY, *training_runs.SHORT]
    with pytest.MonkeyPatch.context() as patch:
        leave_undrawn(patch)
        result = training_runs.vit("pretrain", "--data", images, *options, "-o", folder)
    assert result.exit_code == 0, result.stderr
    return folder


def leave_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("training_curves", "confusion_matrix", "reliability", "accuracy_by_rate"):
        monkeypatch.setattr(plots, name, lambda *arguments: None)


@pytest.fixture
def undrawn(monkeypatch):
    """Runs draw nothing: their figures would take longer than training."""
    leave_undrawn(monkeypatch)
