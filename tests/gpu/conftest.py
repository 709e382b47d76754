"""Everything here needs CUDA: `make test-gpu`, on a machine that has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that a model learns in a few steps: dark and bright noise."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, low in (("dark", 0), ("bright", 128)):
        (root / name).mkdir()
        for i in range(32):
            pixels = rng.integers(low, low + 128, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root
