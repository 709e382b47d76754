"""The images in class directories: listed once, cached, and listed again only after a directory has
changed.

Names are handled a whole directory at a time: with a million of them, work on each name would cost
as much as the listing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitcli.data.cache import cache_directory, keep_arrays, read_arrays
from vitcli.data.files import IMAGE_SUFFIXES, is_image, walk
from vitcli.data.source import Names
from vitcli.errors import DataError

KEPT_FROM = 10_000
"""Images from which on a listing is cached: a smaller one is made in no time."""
SETTLED = 2.0
"""Seconds after which the next change of a directory is certain to alter its modification time."""

_COMMON = ("jpeg", "jpg", "png")
_SUFFIXES = (*_COMMON, *sorted(IMAGE_SUFFIXES.difference(_COMMON)))


class Listing(NamedTuple):
    """The images of a directory of class directories."""

    counts: dict[str, int]
    """Images of each class directory, in order of their names."""
    names: Names
    """Of all images, class by class, relative to the dataset."""
    skipped: dict[str, int]
    """Files that cannot be read, by kind."""


def list_classes(root: Path, place: Path) -> Listing:
    """The images of each class directory in `place`, which is `root` or a directory below it.

    Links are followed; a link with the name of an image counts as one, and its target is checked
    when it is read.
    """
    key = hashlib.sha256(os.fsencode(f"v1\0{root.resolve()}\0{place.resolve()}")).hexdigest()[:20]
    kept = cache_directory("listings") / f"{key}.npz"
    if arrays := read_arrays(kept):
        told = json.loads(str(arrays["told"]))
        if arrays["times"].tolist() == _times(place, told["counts"]):
            return Listing(told["counts"], Names(arrays["text"], arrays["ends"]), told["skipped"])
    classes = subdirectories(place)
    times = _times(place, classes)  # before the names: a change meanwhile makes them outdated
    listing, nested = _list(root, place, classes)
    old = max(times) < (time.time() - SETTLED) * 1e9
    if len(listing.names) >= KEPT_FROM and old and not nested:
        told = json.dumps({"counts": listing.counts, "skipped": listing.skipped})
        text, ends = listing.names.arrays()
        keep_arrays(kept, text=text, ends=ends, times=times, told=told)
    return listing


def subdirectories(directory: Path) -> list[str]:
    """The names of the directories in a directory, sorted, without hidden ones.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=directory) from error
    return [name for name in names if not name.startswith((".", "__"))]


def _times(place: Path, classes: Iterable[str]) -> list[int]:
    """Modification times of a directory and the class directories in it; 0 if one is missing."""
    paths = (place, *(place / name for name in classes))
    return [path.stat().st_mtime_ns if path.is_dir() else 0 for path in paths]


def _list(root: Path, place: Path, classes: Sequence[str]) -> tuple[Listing, bool]:
    """The listing, and whether a class directory holds others."""
    skipped, counts, nested = Counter[str](), dict[str, int](), False
    pieces: list[bytes] = []
    # "/" on every system, so that a recorded split holds on another.
    above = "" if place == root else place.relative_to(root).as_posix() + "/"
    for name in classes:
        directory, inner = os.path.join(place, name), f"{above}{name}/"
        try:
            found = sorted(os.listdir(directory))
        except OSError:
            found = [""]  # the error appears when it is read
        joined = _join(inner, found)
        if not _all_images(joined, len(found)):
            others = (entry for entry in found if not is_image(entry))
            nested |= any(os.path.isdir(os.path.join(directory, entry)) for entry in others)
            paths = (path[len(directory) + 1 :] for path in walk(directory, skipped))
            found = sorted(path.replace(os.sep, "/") for path in paths)
            joined = _join(inner, found)
        counts[name] = len(found)
        pieces.append(joined.encode("utf-8", "surrogateescape"))
    text = np.frombuffer(b"".join(pieces), np.uint8)
    pieces.clear()
    ends = np.flatnonzero(text == 0)
    ends -= np.arange(len(ends))
    names = Names(text[text != 0], ends)
    return Listing(counts, names, dict(skipped)), nested


def _join(directory: str, names: list[str]) -> str:
    return directory + f"\0{directory}".join(names) + "\0" if names else ""


def _all_images(joined: str, count: int) -> bool:
    """Whether all of `count` joined paths are those of images (`is_image`), judged together."""
    if "/." in joined:
        return False
    lower, found = joined.lower(), 0
    for suffix in _SUFFIXES:
        found += lower.count(f".{suffix}\0")
        if found == count:
            return True
    return False
