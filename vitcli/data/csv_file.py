"""Datasets listed in a CSV file of image paths and labels."""

import csv
import os
from pathlib import Path

from vitcli.data.classes import Classes, RawSplit, label_dataset, quote_list
from vitcli.data.source import Dataset, Names, require_split
from vitcli.errors import DataError, warn
from vitcli.words import pluralize

_HINT = "name the columns in the first line: path,label; then write one line per image"
_PATH_COLUMNS = (
    "path", "file", "filename", "file_name", "image", "image_path", "filepath", "filepaths",
    "image_id", "image_name",
)  # fmt: skip
_LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "class_name")
_SPLIT_COLUMNS = ("split", "part", "set", "subset")


def open_csv(path: Path, class_list: Classes | None) -> Dataset:
    """Open a CSV (or TSV) with a header and one row per image: its path, relative to the CSV's
    directory, its label (a class name or index) and optionally its split, in a column `split`."""
    rows = _read_rows(path)
    root = path.parent
    missing, shared, conflicting, duplicates = (dict[str, None]() for _ in range(4))
    first_rows = dict[str, tuple[str, str]]()
    kept: dict[str, list[tuple[str, str]]] = {split: [] for split in rows}
    for split, pairs in rows.items():
        may_be_held_out = split == "train" and "val" not in rows
        seen = set[str]()
        for file, label in pairs:
            if not os.path.isfile(os.path.join(root, file)):
                missing[file] = None
                continue
            place = os.path.abspath(os.path.join(root, file))
            first_split, first_label = first_rows.setdefault(place, (split, label))
            if first_split != split:
                shared[file] = None
            elif first_label != label:
                conflicting[file] = None
            if may_be_held_out and place in seen:
                duplicates[file] = None
            else:
                seen.add(place)
                kept[split].append((file, label))
    if missing:
        raise DataError(
            f"missing images: {quote_list([*missing], 3)}",
            where=path,
            hint=f"paths are relative to the CSV's directory, {root.resolve()}, and have the form "
            "images/001.jpg, with / and a suffix",
        )
    problems = {
        "in more than one split": shared,
        "with more than one label": conflicting,
        "listed more than once (only the first row is used)": duplicates,
    }
    for what, files in problems.items():
        if files:
            warn(f"{pluralize(len(files), 'image')} {what}: {quote_list([*files], 3)}", path)
    raw: dict[str, RawSplit] = {}
    for split, pairs in kept.items():
        names = Names.pack(file for file, _ in pairs)
        raw[split] = RawSplit([label for _, label in pairs], names, root)
    return label_dataset(raw, class_list, path)


def _read_rows(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Read the rows as {split: [(path, label)]}."""
    rows: dict[str, list[tuple[str, str]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=max("\t;,", key=line.count))
            header = [cell.strip().lower() for cell in next(reader, [])]
            image = _column(header, _PATH_COLUMNS, path)
            label = _column(header, _LABEL_COLUMNS, path)
            split = next((header.index(name) for name in _SPLIT_COLUMNS if name in header), None)
            for cells in reader:
                if not any(map(str.strip, cells)):
                    continue
                where = f"{path}, line {reader.line_num}"
                surplus = any(map(str.strip, cells[len(header) :]))
                if surplus or len(cells) <= max(image, label, split or 0):
                    what = f"{pluralize(len(cells), 'column')}, but the header has {len(header)}"
                    hint = "put quotes around values that contain the separator" * surplus or None
                    raise DataError(what, where=where, hint=hint)
                if not cells[image].strip() or not cells[label].strip():
                    raise DataError("the row has no path or no label", where=where)
                word = "train" if split is None else cells[split].strip()
                pair = cells[image].strip(), cells[label].strip()
                rows.setdefault(require_split(word, header[split or 0], where), []).append(pair)
    except (UnicodeDecodeError, csv.Error) as error:
        hint = "in Excel, save it as 'CSV UTF-8'"
        raise DataError("not a UTF-8 CSV file", where=path, hint=hint) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error
    if not rows:
        raise DataError("no images listed", where=path, hint=_HINT)
    return rows


def _column(header: list[str], names: tuple[str, ...], path: Path) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    content = f"has {quote_list(header)}" if header else "is empty"
    raise DataError(f"no column '{names[0]}': the first line {content}", where=path, hint=_HINT)
