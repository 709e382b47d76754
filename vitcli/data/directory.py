"""Images in files of their own: a folder of class folders, or a CSV that lists them."""

from __future__ import annotations

import csv
import os
import re
from pathlib import Path

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.classes import (
    class_of,
    listed,
    match_classes,
    name_labels,
    read_classes,
    require_unique_ids,
)
from vitcli.data.source import Dataset, FileReader, Names, Source, is_image, split_of
from vitcli.errors import DataError

_LAYOUT = "put the images of each class into a folder of its own: DATA/cat/1.jpg, DATA/dog/2.jpg"


def open_directory(root: Path, classes_file: Path | None) -> Dataset:
    """The parts of a folder of class folders, or of train/, val/ and test/ that hold them.

    Classes are those of all parts in order of their ids, or the list of classes (`--classes
    FILE`, else a `classes.txt` in the folder).

    Raises:
        DataError: no class folders, or no images.
    """
    warnings: list[str] = []
    places = _part_folders(root, warnings)
    found: dict[str, dict[str, Names]] = {}
    labels: dict[str, dict[str, ClassLabel]] = {}
    for part, place in places.items():
        found[part] = _class_folders(root, place, warnings)
        if not found[part]:
            if part == "test" and len(places) > 1:  # often images without labels
                warnings.append(f"{place} has no class folders with images: left out")
                del found[part]
                continue
            raise DataError(_why_empty(place), where=place, hint=_LAYOUT)
        labels[part] = {name: class_of(name) for name in found[part]}
        require_unique_ids(list(labels[part].values()), place)
    by_id = {label.id: label for by_name in labels.values() for label in by_name.values()}
    classes = tuple(by_id[id] for id in sorted(by_id))
    table = np.arange(len(classes))
    if classes_file is None and (root / "classes.txt").is_file():
        classes_file = root / "classes.txt"
    if classes_file is not None:
        spelt = classes
        classes = read_classes(classes_file)
        table = match_classes(spelt, classes, root, str(classes_file))
    position = {id: table[index] for index, id in enumerate(sorted(by_id))}
    sources = {}
    for part, by_folder in found.items():
        files = Names.join(list(by_folder.values()))
        values = [position[labels[part][name].id] for name in by_folder]
        indices = np.repeat(
            np.array(values, np.int64), [len(names) for names in by_folder.values()]
        )
        sources[part] = Source(classes, indices, files, FileReader(root, files), root)
    return Dataset(sources.get("train"), sources.get("val"), sources.get("test"), tuple(warnings))


def open_unlabelled(root: Path, classes: tuple[ClassLabel, ...]) -> Source | None:
    """The images that lie in a folder itself, in order of their names; None where there are none,
    or class folders beside them. What they show is not known: all have the label 0 of `classes`."""
    if not root.is_dir() or any(len(_images(root, root / name)) for name in _subfolders(root)):
        return None
    names = sorted(e.name for e in os.scandir(root) if is_image(e.name) and e.is_file())
    files = Names.pack(names)
    labels = np.zeros(len(names), np.int64)
    return Source(classes, labels, files, FileReader(root, files), root) if names else None


def _part_folders(root: Path, warnings: list[str]) -> dict[str, Path]:
    """{part: its folder}; a folder that has no parts is the training part."""
    names = _subfolders(root)
    named = {name: part for name in names if (part := split_of(name))}
    flat = not any(_subfolders(root / name) for name in named)  # classes may be called so: trains
    if not named or (len(named) < len(names) and (flat or "train" not in named.values())):
        return {"train": root}
    for part in set(named.values()):
        same = [name for name in named if named[name] == part]
        if len(same) > 1:
            raise DataError(f"{listed(same)} both mean {part}", where=root, hint="remove one")
    others = [name for name in names if name not in named]
    if others:
        warnings.append(f"{root}: {listed(others)} is not train, val or test: left out")
    places = {part: root / name for name, part in named.items()}
    return {part: places[part] for part in ("train", "val", "test") if part in places}


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=folder) from error
    return [name for name in names if not name.startswith((".", "__"))]


def _class_folders(root: Path, place: Path, warnings: list[str]) -> dict[str, Names]:
    """{class folder: its images relative to root, in order}; empty ones are left out."""
    found = {name: _images(root, place / name) for name in _subfolders(place)}
    filled = {name: files for name, files in found.items() if len(files)}
    if filled and len(filled) < len(found):
        empty = [name for name in found if name not in filled]
        warnings.append(f"{place}: no images in {listed(empty)}: left out")
    loose = _loose(place) if filled else 0
    if loose:
        warnings.append(f"{place}: left out, as they are outside the class folders: {loose:,}")
    return filled


def _images(root: Path, folder: Path) -> Names:
    """All below a folder, by names from `root` on; links are followed, each folder entered once."""
    files: list[str] = []
    entered = {str(above) for above in folder.resolve().parents}  # where a link may lead back to
    for inside, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(inside)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        # "/" on every system, so that a split that was written down holds on another.
        above = os.path.relpath(inside, root).replace(os.sep, "/")
        files += [f"{above}/{name}" for name in names if is_image(name)]
    return Names.pack(sorted(files))


def _loose(place: Path) -> int:
    return sum(is_image(entry.name) and entry.is_file() for entry in os.scandir(place))


def _why_empty(place: Path) -> str:
    loose = _loose(place)
    return f"images in it ({loose:,}), but no class folders" if loose else "no images in it"


# ---------------------------------------------------------------------------------------------
# CSV

_HEADER = "a CSV starts with the line: path,label   and has a line for each image"
_PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath")
_LABEL_COLUMNS = ("label", "class", "target", "category", "class_name")
_PART_COLUMNS = ("split", "part", "set", "subset")


def open_csv(path: Path, classes_file: Path | None) -> Dataset:
    """The parts of a CSV (or TSV) with a header and a row for each image: its path, relative to
    the CSV's folder, and its label, a class's name or index; a column `split` names parts.

    Raises:
        DataError: not text, a column missing, a row cut short, a file that is not there.
    """
    rows = _read_rows(path)
    absent = [f for files, _ in rows.values() for f in files if not (path.parent / f).is_file()]
    if absent:
        raise DataError(
            f"{len(absent):,} of its images are not there: {listed(absent, 3)}",
            where=path,
            hint=f"paths are relative to the CSV's folder, {path.parent.resolve()}",
        )
    known = read_classes(classes_file) if classes_file else None
    every_label = (label for _, labels in rows.values() for label in labels)
    numeric = all(re.fullmatch(r"-?\d{1,9}", label) for label in every_label)
    raw = {
        part: np.array([int(n) for n in labels], np.int64) if numeric else np.array(labels)
        for part, (_, labels) in rows.items()
    }
    classes, indices, warnings = name_labels(raw, known, path)
    sources = {}
    for part, (files, _) in rows.items():
        names = Names.pack(files)
        reader = FileReader(path.parent, names)
        sources[part] = Source(classes, indices[part], names, reader, path.parent)
    return Dataset(sources.get("train"), sources.get("val"), sources.get("test"), tuple(warnings))


def _read_rows(path: Path) -> dict[str, tuple[list[str], list[str]]]:
    """{part: (paths, labels)}"""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if "\t" in first else ";" if ";" in first and "," not in first else ","
            table = csv.reader(file, delimiter=delimiter)
            header = [cell.strip().lower() for cell in next(table, [])]
            image = _column(header, _PATH_COLUMNS, path)
            label = _column(header, _LABEL_COLUMNS, path)
            split = next((header.index(name) for name in _PART_COLUMNS if name in header), None)
            for cells in table:
                if not any(cells):
                    continue
                where = f"{path}, line {table.line_num}"
                if len(cells) <= max(image, label, split or 0):
                    raise DataError("the row is cut short", where=where)
                if not cells[image].strip() or not cells[label].strip():
                    raise DataError("the row lacks its path or its label", where=where)
                word = "train" if split is None else cells[split].strip()
                part = split_of(word)
                if part is None:
                    hint = "write train, val or test"
                    raise DataError(f"'{word}' is not a part", where=where, hint=hint)
                files, labels = rows.setdefault(part, ([], []))
                files.append(cells[image].strip())
                labels.append(cells[label].strip())
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("cannot be read as a CSV in UTF-8", where=path) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    if not rows:
        raise DataError("lists no images", where=path, hint=_HEADER)
    return rows


def _column(header: list[str], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    there = f"names {listed(header)}" if header else "is empty"
    raise DataError(
        f"has no column '{names[0]}'; its first line {there}",
        where=path,
        hint=_HEADER,
    )
