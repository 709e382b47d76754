"""Small data sets on disk, drawn here."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

MakeFolder = Callable[[dict[str, int]], Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept in the cache folders of whoever runs the tests."""
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "vit-cache"))


def jpeg(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    """A JPEG (width, height) of its own for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Makes class folders: {"train/cat": 3} are three images."""

    def make(counts: dict[str, int]) -> Path:
        root = tmp_path / "images"
        root.mkdir(exist_ok=True)
        for number, (folder, count) in enumerate(counts.items()):
            (root / folder).mkdir(parents=True)
            for i in range(count):
                (root / folder / f"{i:03}.jpg").write_bytes(jpeg(1000 * number + i))
        return root

    return make
