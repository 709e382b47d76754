"""List the images in class directories; listings are cached until a directory changes.

Names are processed a whole directory at a time: with a million of them, per-name work would cost
as much as the listing itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitcli.data.cache import cache_directory, read_arrays, save_arrays
from vitcli.data.files import IMAGE_SUFFIXES, is_directory, is_image, walk
from vitcli.data.source import Names
from vitcli.errors import DataError, wrap_os_errors

MIN_CACHED = 10_000
"""Minimum number of images for a listing to be cached; smaller ones are fast to make."""
SETTLED = 2.0
"""Seconds after which another change of a directory is sure to alter its modification time."""


class Listing(NamedTuple):
    """The images of a directory of class directories."""

    counts: dict[str, int]
    """Number of images in each class directory, sorted by directory name."""
    names: Names
    """Names of all images, grouped by class, relative to the dataset root."""
    skipped: dict[str, int]
    """Number of unsupported files, by kind."""


def list_classes(root: Path, place: Path) -> Listing:
    """List the images of each class directory in `place`, which is `root` or a directory below it.

    Symlinks are followed; one that is named like an image counts as an image, and its target is
    only checked when it is read.
    """
    parts = ("v3", *sorted(IMAGE_SUFFIXES), root.resolve(), place.resolve())
    key = hashlib.sha256(os.fsencode("\0".join(map(str, parts)))).hexdigest()[:20]
    kept = cache_directory("listings") / f"{key}.npz"
    if arrays := read_arrays(kept, 4):
        text, ends, times, told = arrays
        counts, skipped = json.loads(str(told))
        if times.tolist() == _times(place, counts):
            return Listing(counts, Names(text, ends), skipped)
    classes = subdirectories(place)
    now = _times(place, classes)  # before listing: a change during it invalidates the cache
    listing, nested = _list(root, place, classes)
    old = max(now) < (time.time() - SETTLED) * 1e9
    if len(listing.names) >= MIN_CACHED and old and not nested:
        both = json.dumps([listing.counts, listing.skipped])
        save_arrays(kept, *listing.names.arrays(), now, both)
    return listing


def subdirectories(directory: Path) -> list[str]:
    """The sorted names of the subdirectories of a directory, without hidden ones.

    Raises:
        DataError: the directory cannot be read.
    """
    with wrap_os_errors(DataError, "cannot be read", directory), os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if is_directory(entry))
    return [name for name in names if not name.startswith((".", "__"))]


def _times(place: Path, classes: Iterable[str]) -> list[int]:
    """Modification times of a directory and its class directories; 0 if one is missing."""
    paths = (place, *(place / name for name in classes))
    return [path.stat().st_mtime_ns if path.is_dir() else 0 for path in paths]


def _list(root: Path, place: Path, classes: Sequence[str]) -> tuple[Listing, bool]:
    """Return the listing, and whether any class directory has subdirectories."""
    skipped, counts, nested = Counter[str](), dict[str, int](), False
    text, ends = bytearray(), [np.empty(0, np.int64)]
    # "/" on every platform, so that a recorded split is portable.
    above = "" if place == root else place.relative_to(root).as_posix() + "/"
    for name in classes:
        directory, inner = os.path.join(place, name), f"{above}{name}/"
        try:
            found = sorted(os.listdir(directory))
        except OSError:
            found = [""]  # reading it raises the error
        joined = _join(inner, found)
        if not _all_images(found, joined):
            with contextlib.suppress(OSError), os.scandir(directory) as entries:
                nested |= any(map(is_directory, entries))
            paths = (path[len(directory) + 1 :] for path in walk(directory, skipped))
            found = sorted(path.replace(os.sep, "/") for path in paths)
            joined = _join(inner, found)
        counts[name] = len(found)
        encoded = np.frombuffer(joined.encode("utf-8", "surrogateescape"), np.uint8)
        ends.append(len(text) + np.flatnonzero(encoded == 0))
        text += encoded.data
    names = Names(np.frombuffer(text, np.uint8), np.concatenate(ends))
    return Listing(counts, names, dict(skipped)), nested


def _join(directory: str, names: list[str]) -> str:
    return directory + f"\0{directory}".join(names) + "\0" if names else ""


def _all_images(names: list[str], joined: str) -> bool:
    """Whether all of these sorted names are image names (`is_image`), checked in bulk."""
    if not names or names[0] < "/":  # names that start with a dot sort before "/"
        return all(map(is_image, names))
    kind = joined.rpartition(".")[2]  # most directories have a single suffix
    if kind[:-1].lower() in IMAGE_SUFFIXES and joined.count(f".{kind}") == len(names):
        return True
    lower = joined.lower()
    return sum(lower.count(f".{suffix}\0") for suffix in IMAGE_SUFFIXES) == len(names)
