"""Runs `vit` inside the test's process: an import of torch for each command would take minutes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from vitcli.cli import output
from vitcli.cli.main import app


@pytest.fixture(autouse=True)
def no_progress_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of progress every ten seconds would appear wherever a test takes so long."""
    monkeypatch.setattr(output, "PLAIN_EVERY", 1e9)


@pytest.fixture
def vit() -> Callable[..., Result]:
    """`vit("predict", path, ...)`: exit code, stdout and stderr of the command."""

    def run(*words: object, **settings: Any) -> Result:
        return CliRunner().invoke(app, [str(word) for word in words], prog_name="vit", **settings)

    return run
