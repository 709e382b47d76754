"""Pictures in files of their own: a folder of class folders, or a CSV that lists them."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitcli.data.labels import (
    folder_label,
    listed,
    match_classes,
    name_labels,
    read_classes,
    require_unique_ids,
)
from vitcli.data.records import PICTURE_SUFFIXES, FileReader, Names, Parts, new_source, part_of
from vitcli.errors import DataError

_LAYOUT = "put the pictures of each class into a folder of its own: DATA/cat/1.jpg, DATA/dog/2.jpg"


def open_folder(root: Path, classes_file: Path | None) -> Parts:
    """The parts of a folder of class folders, or of train/, val/ and test/ that hold them.

    Classes are those of all parts, in order of their folders' names, or of the list of classes
    (`--classes FILE`, else a `classes.txt` in the folder).

    Raises:
        DataError: no class folders, no pictures, a class that is not in the training part.
    """
    folders = {name: root / name for name in _subfolders(root)}
    named = {name: part for name in folders if (part := part_of(name))}
    warnings: list[str] = []
    if named and ("train" in named.values() or len(named) == len(folders)):
        twice = [p for p in set(named.values()) if list(named.values()).count(p) > 1]
        if twice:
            both = [name for name, part in named.items() if part == twice[0]]
            raise DataError(
                f"{listed(both)} both mean the {twice[0]} part", where=root, hint="remove one"
            )
        ignored = [name for name in folders if name not in named]
        if ignored:
            warnings.append(f"{root}: {listed(ignored)} is not train, val or test: left out")
        places = {part: folders[name] for name, part in named.items()}
    else:
        places = {"train": root}
    found = {part: _class_folders(place, warnings) for part, place in places.items()}
    if "test" in found and not found["test"]:
        warnings.append(f"{places['test']} has no class folders: left out")
        del found["test"]
    _require_pictures(found, places)
    if classes_file is None and (root / "classes.txt").is_file():
        classes_file = root / "classes.txt"
    names = sorted({name for part in found.values() for name in part})
    spelt = tuple(folder_label(name) for name in names)
    require_unique_ids(spelt, root)
    classes, table = spelt, np.arange(len(spelt))
    if classes_file is not None:
        classes = read_classes(classes_file)
        table = match_classes(spelt, classes, root, str(classes_file))
    index = {name: int(table[i]) for i, name in enumerate(names)}
    sources = {}
    for part, by_class in found.items():
        ordered = sorted(by_class.items())
        files = Names.pack(
            os.path.relpath(places[part], root) + os.sep + file if places[part] != root else file
            for _, class_files in ordered
            for file in class_files
        )
        labels = np.repeat(
            np.array([index[name] for name, _ in ordered], np.int64),
            [len(class_files) for _, class_files in ordered],
        )
        sources[part] = new_source(classes, labels, files, FileReader(root, files), root)
    return Parts(sources.get("train"), sources.get("val"), sources.get("test"), tuple(warnings))


def _subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=folder) from error
    return [name for name in names if not name.startswith((".", "__"))]


def _class_folders(place: Path, warnings: list[str]) -> dict[str, list[str]]:
    """{class folder: its pictures, relative to `place`, in order}; empty ones are left out."""
    found = {name: sorted(_pictures(place, name)) for name in _subfolders(place)}
    empty = [name for name, files in found.items() if not files]
    if empty and len(empty) < len(found):
        warnings.append(f"{place}: no pictures in {listed(empty)}: left out")
    return {name: files for name, files in found.items() if files}


def _pictures(place: Path, name: str) -> Iterator[str]:
    for folder, inner, files in os.walk(place / name, followlinks=True):
        inner[:] = [i for i in inner if not i.startswith(".")]
        for file in files:
            if not file.startswith(".") and file.rpartition(".")[2].lower() in PICTURE_SUFFIXES:
                yield os.path.relpath(os.path.join(folder, file), place)


def _require_pictures(found: dict[str, dict[str, list[str]]], places: dict[str, Path]) -> None:
    for part, by_class in found.items():
        if not by_class:
            loose = sum(
                file.suffix[1:].lower() in PICTURE_SUFFIXES for file in places[part].iterdir()
            )
            what = f"{loose:,} pictures, but no class folders" if loose else "no pictures in it"
            raise DataError(what, where=places[part], hint=_LAYOUT)
    if "train" in found:
        for part in ("val", "test"):
            alone = sorted(set(found.get(part, {})) - set(found["train"]))
            if alone:
                raise DataError(
                    f"{listed(alone)} has no pictures in the training part",
                    where=places[part],
                    hint="add pictures of it to the training part, or remove it here",
                )


# ---------------------------------------------------------------------------------------------
# CSV

_PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath")
_LABEL_COLUMNS = ("label", "class", "target", "category", "id", "class_name")
_PART_COLUMNS = ("split", "part", "set", "subset")


def open_csv(path: Path, classes_file: Path | None) -> Parts:
    """The parts of a CSV (or TSV) with a header and a row for each picture: its path, relative to
    the CSV's folder, and its label, a class's name or index; a column `split` names parts.

    Raises:
        DataError: not text, a column missing, a row cut short, a file that is not there.
    """
    rows: dict[str, tuple[list[str], list[str]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if "\t" in first else ";" if ";" in first and "," not in first else ","
            table = csv.reader(file, delimiter=delimiter)
            header = [cell.strip().lower() for cell in next(table, [])]
            picture = _column(header, _PATH_COLUMNS, path)
            label = _column(header, _LABEL_COLUMNS, path)
            part_column = next((header.index(c) for c in _PART_COLUMNS if c in header), None)
            for cells in table:
                if not cells:
                    continue
                where = f"{path}, line {table.line_num}"
                if len(cells) != len(header) or not cells[picture] or not cells[label].strip():
                    raise DataError("the row is not complete", where=where)
                word = "train" if part_column is None else cells[part_column].strip()
                part = part_of(word)
                if part is None:
                    raise DataError(
                        f"'{word}' is not a part", where=where, hint="write train, val or test"
                    )
                files, labels = rows.setdefault(part, ([], []))
                files.append(cells[picture].strip())
                labels.append(cells[label].strip())
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("cannot be read as a CSV in UTF-8", where=path) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    if not rows:
        raise DataError("lists no pictures", where=path)
    absent = [f for files, _ in rows.values() for f in files if not (path.parent / f).is_file()]
    if absent:
        raise DataError(
            f"{len(absent):,} of its pictures are not there: {listed(absent, 3)}",
            where=path,
            hint=f"paths are relative to the CSV's folder, {path.parent}",
        )
    known = read_classes(classes_file) if classes_file else None
    numeric = all(label.isdecimal() for _, labels in rows.values() for label in labels)
    raw = {
        part: np.array([int(n) for n in labels], np.int64) if numeric else np.array(labels)
        for part, (_, labels) in rows.items()
    }
    classes, labels_of, warnings = name_labels(raw, known, path)
    sources = {}
    for part, indices in labels_of.items():
        names = Names.pack(rows[part][0])
        sources[part] = new_source(
            classes, indices, names, FileReader(path.parent, names), path.parent
        )
    return Parts(sources.get("train"), sources.get("val"), sources.get("test"), tuple(warnings))


def _column(header: list[str], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise DataError(
        f"has no column '{names[0]}'; its first line names {listed(header)}",
        where=path,
        hint="the first line of the CSV must be: path,label",
    )
