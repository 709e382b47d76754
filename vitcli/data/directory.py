"""Datasets stored as image files in one directory per class."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.classes import (
    Classes,
    RawSplit,
    label_dataset,
    parse_class,
    quote_list,
    require_unique_ids,
)
from vitcli.data.files import describe_skipped, is_file, is_image, walk
from vitcli.data.listing import Listing, list_classes, subdirectories
from vitcli.data.source import Dataset, FileReader, Names, Source, split_of
from vitcli.errors import DataError
from vitcli.words import pluralize

_CONTAINERS = {"data", "image", "images", "img", "imgs", "photos"}
"""Names of directories that contain the class directories rather than being one."""


def open_directory(root: Path, known: Classes | None) -> Dataset:
    """Open a directory of class directories, or of train/, val/ and test/ that contain them.
    Classes are in order of their ids, or those of the list of classes (`known`)."""
    warnings: list[str] = []
    places = split_directories(root, warnings)
    if inner := _container(places, root):
        opened = open_directory(inner, known)
        note = f"the classes are the directories in {inner}"
        return Dataset(opened.train, opened.val, opened.test, (note, *opened.warnings))
    skipped = Counter[str]()
    listings = dict[str, Listing]()
    for split, place in places.items():
        listing = list_classes(root, place)
        skipped.update(listing.skipped)
        loose = sum(is_image(entry.name) and is_file(entry) for entry in os.scandir(place))
        images = pluralize(loose, "image")
        if not len(listing.names):
            if split == "test" and len(places) > 1:  # often images without labels
                warnings.append(f"{place} has no class directories with images: ignored")
                continue
            what = f"{images}, but no class directories" if loose else "no images"
            if skipped:
                what += f" ({describe_skipped(skipped)})"
            hint = (
                f"put the images of each class in a directory of its own: {root}/cat/1.jpg, "
                f"{root}/dog/2.jpg"
            )
            raise DataError(what, where=place, hint=hint)
        if empty := [name for name, count in listing.counts.items() if not count]:
            warnings.append(f"{place}: no images in {quote_list(empty)}: ignored")
        if loose:
            warnings.append(f"{place}: ignored {images} outside the class directories")
        listings[split] = listing
    if skipped:
        warnings.append(f"{root}: {describe_skipped(skipped)}")
    raw, named = _label_by_directory(listings, root)
    return label_dataset(raw, known, root, warnings, named)


def _label_by_directory(
    listings: dict[str, Listing], root: Path
) -> tuple[dict[str, RawSplit], Classes]:
    """Label the images of each split by their directories; return the splits and all classes."""
    by_id = dict[str, ClassLabel]()
    for listing in listings.values():
        classes = [parse_class(name) for name, count in listing.counts.items() if count]
        require_unique_ids(classes, root)
        by_id = {label.id: label for label in classes} | by_id
    position = {id: index for index, id in enumerate(sorted(by_id))}
    raw = dict[str, RawSplit]()
    for split, (counts, names, _) in listings.items():
        indices = [position[parse_class(name).id] if count else 0 for name, count in counts.items()]
        labels = np.repeat(np.array(indices, np.int64), list(counts.values()))
        raw[split] = RawSplit(labels, names, FileReader(root, names), root)
    return raw, tuple(by_id[id] for id in position)


def open_unlabeled(root: Path, classes: Classes) -> Source | None:
    """The images directly in a directory, sorted by name; None if there are none, or if there are
    class directories. Their classes are unknown: all have label 0 of `classes`."""
    if not root.is_dir():
        return None
    if any(_has_images(root / name) for name in subdirectories(root)):
        return None
    files = sorted(e.name for e in os.scandir(root) if is_image(e.name) and is_file(e))
    names = Names.pack(files)
    labels = np.zeros(len(names), np.int64)
    return Source(classes, labels, names, FileReader(root, names), root) if files else None


def open_images(root: Path) -> Dataset | None:
    """The images directly in a directory, or in its train/, val/ and test/, without labels; None if
    there are none, or if there are class directories."""
    warnings: list[str] = []
    one_class = (ClassLabel("image", "image"),)
    places = split_directories(root, warnings)
    sources = {split: open_unlabeled(place, one_class) for split, place in places.items()}
    if sources.get("train") is None:
        return None
    return Dataset(**sources, warnings=tuple(warnings))


def split_directories(root: Path, warnings: list[str] | None = None) -> dict[str, Path]:
    """The directory of each split; a directory without splits is the training split.

    Args:
        warnings: messages about ignored directories are appended to it.
    """
    names = subdirectories(root)
    named = {name: split for name in names if (split := split_of(name))}
    # A class may have such a name: "train" is also a vehicle.
    flat = not any(subdirectories(root / name) for name in named)
    if not named or (len(named) < len(names) and (flat or "train" not in named.values())):
        if named and not flat and warnings is not None:
            what = "there is no directory 'train', so every directory is a class"
            warnings.append(f"{root}: {what}, including {quote_list(named)}")
        return {"train": root}
    for split in set(named.values()):
        same = [name for name in named if named[name] == split]
        if len(same) > 1:
            raise DataError(
                f"{quote_list(same)} are both the {split} split",
                where=root,
                hint="remove or rename one",
            )
    others = [name for name in names if name not in named]
    if others and warnings is not None:
        warnings.append(f"{root}: ignored {quote_list(others)} (not train, val or test)")
    places = {split: root / name for name, split in named.items()}
    return {split: places[split] for split in ("train", "val", "test") if split in places}


def _container(places: dict[str, Path], root: Path) -> Path | None:
    """The single directory that contains the class directories, as in DATA/images/cat/1.jpg."""
    names = subdirectories(root)
    inner = [root / name for name in names if name.lower() in _CONTAINERS]
    if list(places.values()) != [root] or len(inner) != 1:
        return None
    if any(_has_images(root / name) for name in names if root / name != inner[0]):
        return None
    directly = any(is_image(entry.name) for entry in os.scandir(inner[0]))
    return inner[0] if len(subdirectories(inner[0])) > 1 and not directly else None


def _has_images(directory: Path) -> bool:
    return next(walk(str(directory), Counter()), None) is not None
