"""List the images in class directories.

Names are processed a whole directory at a time: with a million of them, per-name work would cost
as much as the listing itself.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitcli.data.files import IMAGE_SUFFIXES, is_directory, is_hidden, is_image, walk
from vitcli.data.source import Names
from vitcli.errors import DataError, wrap_os_errors

REPORTED_CLASSES = 1000
"""Minimum number of class directories for their listing, which may take minutes, to be reported."""


class Listing(NamedTuple):
    """The images of a directory of class directories."""

    counts: dict[str, int]
    """Number of images in each class directory, sorted by directory name."""
    names: Names
    """Names of all images, grouped by class, relative to the dataset root."""
    skipped: dict[str, int]
    """Number of unsupported files, by kind."""


def list_classes(root: Path, directory: Path, report: Callable[[str], None]) -> Listing:
    """List the images of each class directory of `directory`, which is `root` or below it.

    Symlinks are followed; one that is named like an image counts as an image, and its target is
    only checked when it is read. `report` is called with a message before a long listing.
    """
    classes = subdirectories(directory)
    if len(classes) >= REPORTED_CLASSES:
        report(f"listing the images of {len(classes):,} class directories")
    skipped, counts = Counter[str](), dict[str, int]()
    text, ends = bytearray(), [np.empty(0, np.int64)]
    # "/" on every platform, so that a recorded split is portable.
    parent_prefix = "" if directory == root else directory.relative_to(root).as_posix() + "/"
    for name in classes:
        class_dir, prefix = os.path.join(directory, name), f"{parent_prefix}{name}/"
        entries = list[os.DirEntry[str]]()
        with contextlib.suppress(OSError), os.scandir(class_dir) as scan:
            entries += scan
        files = sorted([entry.name for entry in entries])
        joined = _join(prefix, files)
        # Directories, too, may have names like images: stack.tif/
        has_directories = any(entry.is_dir(follow_symlinks=False) for entry in entries)
        if not files or has_directories or not _all_images(files, joined):
            paths = (path[len(class_dir) + 1 :] for path in walk(class_dir, skipped))
            files = sorted(path.replace(os.sep, "/") for path in paths)
            joined = _join(prefix, files)
        counts[name] = len(files)
        encoded = np.frombuffer(joined.encode("utf-8", "surrogateescape"), np.uint8)
        ends.append(len(text) + np.flatnonzero(encoded == 0))
        text += encoded.data
    names = Names(np.frombuffer(text, np.uint8), np.concatenate(ends))
    return Listing(counts, names, dict(skipped))


def subdirectories(directory: Path) -> list[str]:
    """The sorted names of the subdirectories of a directory, without hidden ones.

    Raises:
        DataError: the directory cannot be read.
    """
    with wrap_os_errors(DataError, "cannot be read", directory), os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries if is_directory(entry))
    return [name for name in names if not is_hidden(name)]


def _join(directory: str, names: list[str]) -> str:
    return directory + f"\0{directory}".join(names) + "\0" if names else ""


def _all_images(names: list[str], joined: str) -> bool:
    """Whether all of these sorted names are image names (`is_image`); checked in bulk if they have
    one suffix, as in most directories."""
    suffix = joined.rpartition(".")[2]
    has_one = suffix[:-1].lower() in IMAGE_SUFFIXES and joined.count(f".{suffix}") == len(names)
    # Names that start with a dot sort before "/".
    return (has_one and names[0] > "/") or all(map(is_image, names))
