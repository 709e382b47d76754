"""The on-disk cache of data computed from datasets."""

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vitcli.atomic import atomic_write
from vitcli.errors import DataError, OutputError


def cache_directory(kind: str) -> Path:
    """The directory for cached data of a kind: in $VIT_CACHE, else the user's cache directory."""
    if os.environ.get("VIT_CACHE"):
        return Path(os.environ["VIT_CACHE"]) / kind
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "vit" / kind
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vit" / kind


def copy_limited(source: BinaryIO, target: BinaryIO, limit: float, where: object) -> None:
    """Copy a stream of unknown length to a new file. Raises DataError after `limit` bytes."""
    while block := source.read(1 << 20):
        target.write(block)
        if target.tell() > limit:
            what = f"contains more than {limit:,} bytes, which is suspiciously large"
            raise DataError(what, where=where)


def read_arrays(path: Path) -> list[npt.NDArray[Any]] | None:
    """Return the arrays written by `save_arrays`, or None if they are missing or corrupt."""
    try:
        with np.load(path, allow_pickle=False) as arrays:  # zip files have checksums
            return [*arrays.values()]
    except Exception:  # numpy evaluates headers, so a corrupt one may raise anything
        return None


def save_arrays(path: Path, *arrays: npt.ArrayLike) -> None:
    """Save arrays as npz. Write errors are ignored: the next run recomputes the arrays."""
    with contextlib.suppress(OSError, OutputError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, durable=False) as file:
            np.savez(file, *arrays)
