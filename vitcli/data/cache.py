"""What is computed from datasets once and kept in the user's cache directory."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.atomic import whole_file
from vitcli.errors import OutputError


def cache_directory(kind: str) -> Path:
    """Where data computed from datasets is cached: $VIT_CACHE, else the user's cache directory."""
    if os.environ.get("VIT_CACHE"):
        return Path(os.environ["VIT_CACHE"]) / kind
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "vit" / kind
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vit" / kind


def read_arrays(path: Path, count: int) -> list[npt.NDArray[Any]] | None:
    """The arrays that `keep_arrays` wrote; None if they are missing or damaged."""
    try:
        with path.open("rb") as file:
            *arrays, checksum = [np.load(file, allow_pickle=False) for _ in range(count + 1)]
    except Exception:  # numpy evaluates the header, so a damaged one may raise anything
        return None
    return arrays if checksum == _checksum(arrays) else None


def keep_arrays(path: Path, *arrays: npt.ArrayLike) -> None:
    """Keeps arrays in a file; where that cannot be written, the next run computes them again."""
    with contextlib.suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, durable=False) as file:
            checked = [np.asarray(array, order="C") for array in arrays]
            for array in (*checked, np.array(_checksum(checked))):
                np.save(file, array, allow_pickle=False)


def _checksum(arrays: Iterable[npt.NDArray[Any]]) -> int:
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(f"{array.dtype} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(array.data, checksum)
    return checksum
