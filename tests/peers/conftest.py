"""The real timm and transformers, for the tests that compare with them."""

from types import ModuleType

import pytest


def _require(name: str) -> ModuleType:
    """Import a peer library; if it is missing, skip the test (in CI, the test fails)."""
    pytest.importorskip("peers.torchvision_operators")
    return pytest.importorskip(name)


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    return _require("timm")


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    _require("timm")  # its wrapper loads timm's layout
    return _require("transformers")
