"""Datasets stored as image files in one directory per class."""

import os
from collections import Counter
from collections.abc import Callable
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
from vitcli.data.files import describe_skipped, find_files, is_file, is_image
from vitcli.data.listing import Listing, list_classes, subdirectories
from vitcli.data.source import Dataset, Names, Source, last_split, split_of
from vitcli.errors import DataError, warn
from vitcli.words import pluralize

_CONTAINERS = {"data", "image", "images", "img", "imgs", "photos"}
"""Names of directories that contain the class directories rather than being one."""
_EXPECTED = (
    "put the images of each class in a directory of its own: {0}/cat/1.jpg, {0}/dog/2.jpg; "
    "or pass a CSV file with the columns path and label"
)


def open_directory(
    root: Path, class_list: Classes | None, report: Callable[[str], None]
) -> Dataset:
    """Open a directory of class directories, or of train/, val/ and test/ that contain them.
    Classes are in order of their ids, or those of `class_list`. `report` is called with a message
    before a long listing."""
    split_dirs = split_directories(root, warns=True)
    for split, split_dir in split_dirs.items():
        if container := _find_container(split_dir):
            warn(f"the classes are the directories in {container}")
            if split_dir == root:
                return open_directory(container, class_list, report)
            split_dirs[split] = container
    skipped = Counter[str]()
    listings = dict[str, Listing]()
    for split, split_dir in split_dirs.items():
        listing = list_classes(root, split_dir, report)
        skipped.update(listing.skipped)
        loose = [e.name for e in os.scandir(split_dir) if is_image(e.name) and is_file(e)]
        images = pluralize(len(loose), "image")
        if not len(listing.names):
            if split == "test" and len(split_dirs) > 1:  # often images without labels
                warn(f"ignored {split_dir}, which has no class directories with images")
                continue
            what = f"{images}, but no class directories" if loose else "no images"
            if skipped:
                what += f" ({describe_skipped(skipped)})"
            hint = _EXPECTED.format(split_dir)
            if any(name.startswith("ILSVRC2012_val_") for name in loose):
                hint += "; with --real-labels, `vit evaluate` takes ImageNet's images as they are"
            elif split == "val":
                hint += f"; to hold out training images instead, remove {split_dir}"
            raise DataError(what, where=split_dir, hint=hint)
        used = [name for name, count in listing.counts.items() if count]
        splits = {last_split(name, "") for name in used}
        if len(splits) == len(used) > 1 and "" not in splits:  # such as train2017 and val2017
            what = f"{quote_list(used)} contain images, but no class directories"
            raise DataError(what, where=split_dir, hint=_EXPECTED.format(split_dir / used[0]))
        if empty := [name for name, count in listing.counts.items() if not count]:
            warn(f"ignored {quote_list(empty)} (no images)", split_dir)
        if loose:
            warn(f"ignored {images} outside the class directories", split_dir)
        listings[split] = listing
    if skipped:
        warn(describe_skipped(skipped), root)
    raw, data_classes = _label_by_directory(listings, root)
    return label_dataset(raw, class_list, root, data_classes)


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
        raw[split] = RawSplit(labels, names, root)
    return raw, tuple(by_id[id] for id in position)


def open_unlabeled(root: Path, classes: Classes) -> Source | None:
    """The images directly in a directory, sorted by name; None if there are none, or if there are
    class directories. Their classes are unknown: all have label 0 of `classes`."""
    if not root.is_dir() or has_class_directories(root):
        return None
    files = sorted(e.name for e in os.scandir(root) if is_image(e.name) and is_file(e))
    labels = np.zeros(len(files), np.int64)
    return Source(classes, labels, Names.pack(files), root) if files else None


def open_images(root: Path) -> Dataset | None:
    """The images directly in a directory, or in its train/, val/ and test/, without labels; None if
    there are none, or if there are class directories."""
    one_class = (ClassLabel("image", "image"),)
    split_dirs = split_directories(root, warns=True)
    sources = {split: open_unlabeled(path, one_class) for split, path in split_dirs.items()}
    if sources.get("train") is None:
        return None
    return Dataset(**sources)


def split_directories(root: Path, warns: bool = False) -> dict[str, Path]:
    """The directory of each split; a directory without splits is the training split.

    Args:
        warns: whether to warn about ignored directories.
    """
    names = subdirectories(root)
    splits = {name: split for name in names if (split := split_of(name))}
    nested = {
        name: split
        for name in names
        if (split := last_split(name, "")) and subdirectories(root / name)
    }
    distinct = len(set(nested.values())) == len(nested) > 1
    if distinct and all(subdirectories(root / name) for name in names):
        splits = nested  # such as training_set and test_set
    # A class may have such a name: "train" is also a vehicle.
    flat = splits.keys().isdisjoint(nested)
    if not splits or (len(splits) < len(names) and (flat or "train" not in splits.values())):
        if nested and warns:
            what = "there is no directory 'train', so every directory is a class"
            warn(f"{what}, including {quote_list(nested)}", root)
        return {"train": root}
    for split in set(splits.values()):
        duplicates = [name for name in splits if splits[name] == split]
        if len(duplicates) > 1:
            raise DataError(
                f"{quote_list(duplicates)} are both the {split} split",
                where=root,
                hint="remove or rename one",
            )
    ignored = [name for name in names if name not in splits]
    if ignored and warns:
        warn(f"ignored {quote_list(ignored)} (not train, val or test)", root)
    split_dirs = {split: root / name for name, split in splits.items()}
    return {split: split_dirs[split] for split in ("train", "val", "test") if split in split_dirs}


def _find_container(directory: Path) -> Path | None:
    """The only directory in a directory that contains class directories: DATA/images/cat/1.jpg or,
    in archives from Kaggle, DATA/train/train/cat/1.jpg."""
    names, containers = subdirectories(directory), {*_CONTAINERS, directory.resolve().name.lower()}
    candidates = [directory / name for name in names if name.lower() in containers]
    others = [directory / name for name in names if name.lower() not in containers]
    if len(candidates) != 1 or any(map(_has_images, others)):
        return None
    has_images = any(is_image(entry.name) for entry in os.scandir(candidates[0]))
    return candidates[0] if len(subdirectories(candidates[0])) > 1 and not has_images else None


def has_class_directories(root: Path) -> bool:
    """Whether there are images in a subdirectory."""
    return any(_has_images(root / name) for name in subdirectories(root))


def _has_images(directory: Path) -> bool:
    return any(find_files(directory, is_image))
