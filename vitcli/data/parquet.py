"""Datasets in Parquet files, as on the Hub, read with the `datasets` library.

`datasets` converts them once to Arrow in its own cache (HF_HOME) and memory-maps that: random
access without loading the data into memory.
"""

import glob
import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.data.classes import (
    Classes,
    RawSplit,
    label_dataset,
    parse_class,
    quote_list,
)
from vitcli.data.files import find_files, read_file
from vitcli.data.source import Dataset, Ints, Names, group_by_split, require_split
from vitcli.errors import DataError, ImageError, require, warn
from vitcli.words import pluralize

_IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "image_bytes", "bytes")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "category", "fine_label", "y")


@dataclass(frozen=True)
class ArrowReader:
    """Read images from a column of a memory-mapped table. Pickled, the table is only the path of
    its file, whereas a column would be all of its data."""

    table: Any
    """A `datasets.Dataset`."""
    column: str
    follow_paths: bool
    """Whether a row may have the path of an image instead of its bytes."""

    def read(self, row: int) -> bytes:
        # binary, or struct<bytes, path>
        value: Any = self.table.data.column(self.column)[row].as_py()
        if isinstance(value, dict):
            path, value = value.get("path"), value.get("bytes")
            if self.follow_paths and value is None and isinstance(path, str):
                value = read_file(path)
        if not isinstance(value, bytes):
            raise ImageError("the row has no image")
        return value


def is_parquet(name: str) -> bool:
    """Whether a file name is that of a parquet file; hidden files are excluded."""
    return name.lower().endswith(".parquet") and not name.startswith(".")


def open_parquet(path: Path, class_list: Classes | None) -> Dataset:
    """Open a parquet file, or a directory of them (data/train-00000-of-00001.parquet). Splits are
    those of `group_by_split`; if all rows are training data, of a column `split`."""
    import_datasets()
    root, files = path.parent, [path]
    if path.is_dir():
        root, files = path, [*find_files(path, is_parquet)]
    parents = {file.parent for file in files}
    base = parents.pop() if len(parents) == 1 else root
    tables, names = dict[str, Any](), dict[str, Names]()
    for split, group in group_by_split(files, root).items():
        places = sorted({file.parent.relative_to(root).as_posix() for file in group})
        if len(places) > 1:
            what = f"the {split} split is in several directories: {quote_list(places)}"
            warn(f"{what}; if they repeat images, pass one of them", path)
        rows = {file: count for file in group if (count := _count_rows(file))}
        if rows:  # `datasets` refuses empty files
            tables[split] = _load_table([*rows], path)
            counts = {file.relative_to(base).as_posix(): count for file, count in rows.items()}
            names[split] = Names.pack(f"{n} row {i}" for n in counts for i in range(counts[n]))
    return label_tables(tables, names, path, class_list, base, follow_paths=True)


def label_tables(
    tables: Mapping[str, Any],
    names: Mapping[str, Names],
    where: str | Path,
    class_list: Classes | None,
    root: str | Path,
    follow_paths: bool,
) -> Dataset:
    """Build a dataset from a table (`datasets.Dataset`) per split, and the names of its rows
    relative to `root`; for `follow_paths` see `ArrowReader`."""
    if not tables:
        raise DataError("no labeled images", where=where)
    features = next(iter(tables.values())).features
    image, label = columns(features, where)
    raw: dict[str, RawSplit] = {}
    for split, table in tables.items():
        if missing := [name for name in (image, label) if name not in table.features]:
            warn(f"ignored the {split} split, which has no column {quote_list(missing)}", where)
            continue
        rows, labels = _read_labels(table, label, where)
        if unlabeled := len(table) - len(rows):
            count = pluralize(unlabeled, "row")
            warn(f"ignored {count} of {split} without a label", where)
        parts = {split: np.arange(len(rows))}
        if [*tables] == ["train"] and "split" in table.features:
            parts = _group_rows(table.data.column("split").take(rows).to_pylist(), where)
        for part, members in parts.items():
            if len(members):
                raw[part] = RawSplit(
                    [labels[i] for i in members] if isinstance(labels, list) else labels[members],
                    names[split].select(rows[members]),
                    root,
                    ArrowReader(table, image, follow_paths),
                )
    if not raw:
        raise DataError("no labeled images", where=where)
    # Only in a list of classes may text stand for numbers: otherwise, the column would have them.
    parse_numbers = class_list is not None
    return label_dataset(raw, class_list, where, class_names(features[label]), parse_numbers)


def _group_rows(words: Sequence[object], where: object) -> dict[str, Ints]:
    """The rows of each split, from the values of the column `split`."""
    split_of_word = {word: require_split(word, "split", where) for word in {*words}}
    splits = np.array([split_of_word[word] for word in words], str)
    return {split: np.flatnonzero(splits == split) for split in ("train", "val", "test")}


def class_names(feature: Any) -> Classes | None:
    """The classes of a label column, or None if it has no class names."""
    names = getattr(feature, "names", None)
    return tuple(parse_class(name) for name in names) if names else None


def _load_table(files: list[Path], path: Path) -> Any:
    """Load files as a `datasets.Dataset`."""
    names = [glob.escape(str(file.resolve())) for file in files]  # `datasets` expands globs
    try:
        return import_datasets().load_dataset("parquet", data_files=names, split="train")
    except Exception as error:  # pyarrow's, fsspec's or the OS's
        raise _unreadable(files[0] if len(files) == 1 else path, error) from error


def import_datasets() -> Any:
    """Import `datasets` without its logging: errors are raised too. Raises MissingExtraError."""
    datasets = require("datasets", "reading Parquet files")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    return datasets


def _count_rows(file: Path) -> int:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        return int(parquet.read_metadata(file).num_rows)
    except Exception as error:  # the OS's or pyarrow's, which is not imported here
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return DataError(f"cannot be read as Parquet: {reason}", where=path)


def columns(features: Mapping[str, Any], where: object) -> tuple[str, str]:
    """Find the names of the image and label columns, by type, then by name."""
    types = {name: type(feature).__name__ for name, feature in features.items()}
    binary = [name for name in types if "binary" in str(features[name])]
    images = [name for name, type_name in types.items() if type_name == "Image"]
    images += [name for name in _IMAGE_COLUMNS if name in binary]
    labels = [name for name in _LABEL_COLUMNS if types.get(name) == "ClassLabel"]
    labels += [name for name, type_name in types.items() if type_name == "ClassLabel"]
    labels += [name for name in _LABEL_COLUMNS if name in types]
    for candidates, name in ((images, "image"), (labels, "label")):
        if not candidates:
            content = " of encoded images; list paths in a CSV file" if name == "image" else ""
            raise DataError(
                f"no column of {name}s; the columns are {quote_list(types)}",
                where=where,
                hint=f"datasets on the Hub have a column '{name}'{content}",
            )
    return images[0], labels[0]


def _read_labels(table: Any, column: str, path: object) -> tuple[Ints, Ints | list[str]]:
    """Return the indices of labeled rows, and their labels."""
    values = table.data.column(column)
    try:
        if re.match(r"(dictionary<values=)?(large_)?string", str(values.type)):
            texts = [text and text.strip() for text in values.to_pylist()]  # as in a CSV
            labeled = [row for row, text in enumerate(texts) if text]
            return np.array(labeled, np.int64), [texts[row] for row in labeled]
        numbers = values.cast("int64").fill_null(-1).to_numpy()
        rows = np.flatnonzero(numbers >= 0)
        return rows, numbers[rows]
    except Exception as error:  # pyarrow's own, which is not imported here
        raise DataError(
            f"the column '{column}' contains {values.type}, not one label per row", where=path
        ) from error
