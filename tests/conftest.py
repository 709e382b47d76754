"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI set, a comparison with timm or transformers that is skipped has failed."""
    report = yield
    if report.skipped and item.get_closest_marker("peers") and os.environ.get("CI"):
        report.outcome = "failed"
    return report
