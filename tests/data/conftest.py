"""Small datasets on disk."""

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitcli.config import ClassLabel
from vitcli.data.source import Names, Source


@pytest.fixture(autouse=True)
def temporary_cache(tmp_path, monkeypatch):
    """Use a temporary cache directory instead of the user's."""
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "vit-cache"))


def jpeg(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    """A JPEG of `size` (width, height), different for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1] // 4, size[0] // 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize(size).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def tar_bytes(files: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def labeled(labels: Sequence[int] | np.ndarray, classes: Sequence[ClassLabel]) -> Source:
    """A source with these labels, whose image files do not exist."""
    names = Names.pack(f"{i}.jpg" for i in range(len(labels)))
    return Source(tuple(classes), np.array(labels, np.int64), names, Path())


@pytest.fixture
def make_directory(tmp_path):
    """Create class directories: {"train/cat": 3} makes three images."""

    def make(counts: dict[str, int]) -> Path:
        root = tmp_path / "images"
        root.mkdir(exist_ok=True)
        for number, (directory, count) in enumerate(counts.items()):
            (root / directory).mkdir(parents=True)
            for i in range(count):
                (root / directory / f"{i:03}.jpg").write_bytes(jpeg(1000 * number + i))
        return root

    return make


def flip_bit(content: bytes, place: int) -> bytes:
    """Flip a bit of the byte at `place`."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:100],
    "a bit": lambda content: flip_bit(content, len(content) // 2),
    "a bit of the header": lambda content: flip_bit(content, 20),
    "zeros": lambda content: content[:200] + bytes(100) + content[300:],
}
"""Kinds of damage to a file in the cache directory."""
