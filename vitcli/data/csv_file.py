"""Datasets listed in a CSV file of image paths and labels."""

from __future__ import annotations

import csv
import os
import stat
from pathlib import Path

from vitcli.data.classes import Classes, RawSplit, label_dataset, parse_labels, quote_list
from vitcli.data.source import Dataset, FileReader, Names, split_of
from vitcli.errors import DataError
from vitcli.words import pluralize

_HINT = "start the file with the line path,label and write one line per image"
_PATH_COLUMNS = ("path", "file", "filename", "file_name", "image", "image_path", "filepath")
_LABEL_COLUMNS = ("label", "class", "target", "category", "class_name")
_SPLIT_COLUMNS = ("split", "part", "set", "subset")


def open_csv(path: Path, known: Classes | None) -> Dataset:
    """Open a CSV (or TSV) with a header and one row per image: its path, relative to the CSV's
    directory, its label (a class name or index) and optionally its split, in a column `split`."""
    rows = _read_rows(path)
    root = path.parent
    missing, shared, doubtful, repeated = list[str](), list[str](), list[str](), list[str]()
    first = dict[object, tuple[str, str]]()
    kept: dict[str, list[tuple[str, str]]] = {split: [] for split in rows}
    for split, pairs in rows.items():
        may_be_held_out = split == "train" and "val" not in rows
        seen = set[object]()
        for file, label in pairs:
            found = _identity(os.path.join(root, file))
            if found is None:
                missing.append(file)
                continue
            first_split, first_label = first.setdefault(found, (split, label))
            if first_split != split:
                shared.append(file)
            elif first_label != label:
                doubtful.append(file)
            if may_be_held_out and found in seen:
                repeated.append(file)
            else:
                seen.add(found)
                kept[split].append((file, label))
    if missing:
        raise DataError(
            f"missing images: {quote_list(missing, 3)}",
            where=path,
            hint=f"paths are relative to the CSV's directory, {root.resolve()}",
        )
    noticed = {
        "in more than one split": shared,
        "with more than one label": doubtful,
        "listed more than once (only the first row is used)": repeated,
    }
    warnings = [
        f"{path}: {pluralize(len(files), 'image')} {what}: {quote_list(files, 3)}"
        for what, files in noticed.items()
        if files
    ]
    labels = parse_labels({split: [label for _, label in pairs] for split, pairs in kept.items()})
    raw: dict[str, RawSplit] = {}
    for split, pairs in kept.items():
        names = Names.pack(file for file, _ in pairs)
        raw[split] = RawSplit(labels[split], names, FileReader(root, names), root)
    return label_dataset(raw, known, path, warnings)


def _identity(path: str) -> tuple[int, int] | None:
    """The device and inode of a file, which all links to it share; None if it is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _read_rows(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Read the rows as {split: [(path, label)]}."""
    rows: dict[str, list[tuple[str, str]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            delimiter = "\t" if "\t" in first else ";" if ";" in first and "," not in first else ","
            table = csv.reader(file, delimiter=delimiter)
            header = [cell.strip().lower() for cell in next(table, [])]
            image = _column(header, _PATH_COLUMNS, path)
            label = _column(header, _LABEL_COLUMNS, path)
            split = next((header.index(name) for name in _SPLIT_COLUMNS if name in header), None)
            for cells in table:
                if not any(cells):
                    continue
                where = f"{path}, line {table.line_num}"
                if len(cells) <= max(image, label, split or 0):
                    columns = pluralize(len(cells), "column")
                    raise DataError(f"{columns}, but the header has {len(header)}", where=where)
                if not cells[image].strip() or not cells[label].strip():
                    raise DataError("the row has no path or no label", where=where)
                word = "train" if split is None else cells[split].strip()
                named = split_of(word)
                if named is None:
                    hint = "use train, val or test"
                    raise DataError(f"'{word}' is not a split", where=where, hint=hint)
                pair = cells[image].strip(), cells[label].strip()
                rows.setdefault(named, []).append(pair)
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError("not a UTF-8 CSV file", where=path) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    if not rows:
        raise DataError("no images listed", where=path, hint=_HINT)
    return rows


def _column(header: list[str], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    found = f"has {quote_list(header)}" if header else "is empty"
    raise DataError(f"no column '{names[0]}': the first line {found}", where=path, hint=_HINT)
