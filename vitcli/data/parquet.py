"""Parquet files as the Hub keeps data sets, through the `datasets` library.

`datasets` writes them once as Arrow into its own cache, which is mapped: random access without
holding the data in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.labels import folder_label, listed, name_labels, read_classes
from vitcli.data.records import Ints, Names, Parts, Source, part_of
from vitcli.errors import DataError, MissingExtraError, PictureError

_PICTURE_COLUMNS = ("image", "img", "picture", "jpg", "jpeg", "png", "pixel_values", "image_bytes")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "category", "fine_label", "y")


@dataclass(frozen=True)
class ArrowReader:
    """Pictures in a column of a mapped Arrow table."""

    column: Any  # pyarrow.ChunkedArray of binary, or of struct<bytes, path>
    names: Names

    def read(self, row: int) -> bytes:
        value = self.column[row].as_py()
        if isinstance(value, dict):
            data, path = value.get("bytes"), value.get("path")
            if data is None and path and Path(path).is_file():
                data = Path(path).read_bytes()
            value = data
        if not isinstance(value, bytes):
            raise PictureError("the row holds no picture", where=self.names[row])
        return value


def open_parquet(path: Path, classes_file: Path | None) -> Parts:
    """The parts of a parquet file, or of a folder of them, told by the words train, validation
    and test in the names (data/train-00000-of-00001.parquet)."""
    files = sorted(p for p in path.rglob("*.parquet")) if path.is_dir() else [path]
    grouped: dict[str, list[Path]] = {}
    for file in files:
        inner = file.relative_to(path) if path.is_dir() else Path(file.name)
        words = (w for piece in reversed(inner.parts) for w in re.split(r"[^A-Za-z]+", piece))
        grouped.setdefault(next((p for w in words if (p := part_of(w))), "train"), []).append(file)
    tables = {part: _load(group) for part, group in grouped.items()}
    first = tables.get("train") or next(iter(tables.values()))
    picture, label = _columns(first, path)
    known = read_classes(classes_file) if classes_file else _named_classes(first, label)
    raw = {part: _labels(table, label, path) for part, table in tables.items()}
    kept: dict[str, Ints] = {}
    warnings: list[str] = []
    for part, labels in raw.items():
        keep = labels >= 0 if labels.dtype.kind in "iu" else labels != ""
        kept[part] = np.flatnonzero(keep)
        if not keep.all():
            warnings.append(f"{path}: {np.sum(~keep):,} unlabelled rows of '{part}' are left out")
    filled = {part: labels[kept[part]] for part, labels in raw.items() if len(kept[part])}
    if not filled:
        raise DataError("holds no labelled picture", where=path)
    classes, labels_of, notes = name_labels(filled, known, path)
    parts = {}
    for part, labels in labels_of.items():
        names = Names.pack(_row_names(grouped[part]))
        rows = kept[part]
        reader = ArrowReader(tables[part].data.column(picture), names)
        root = str(grouped[part][0].parent)
        parts[part] = Source(classes, labels, names.select(rows), reader, rows, root)
    return Parts(parts.get("train"), parts.get("val"), parts.get("test"), (*warnings, *notes))


def _load(files: list[Path]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "data", "reading parquet files") from error
    bars = datasets.utils.logging.is_progress_bar_enabled()
    datasets.utils.logging.disable_progress_bar()
    try:
        return datasets.load_dataset(
            "parquet", data_files=[str(file) for file in files], split="train"
        )
    except Exception as error:  # datasets raises what pyarrow, fsspec and the disk raise
        reason = str(error.__cause__ or error).splitlines()[0]
        raise DataError(f"cannot be read as parquet: {reason}", where=files[0]) from error
    finally:
        if bars:
            datasets.utils.logging.enable_progress_bar()


def _columns(table: Any, path: Path) -> tuple[str, str]:
    """The names of the picture's and the label's column."""
    features = table.features
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    pictures = [name for name, kind in kinds.items() if kind == "Image"]
    pictures += [name for name in _PICTURE_COLUMNS if name in features and name not in pictures]
    if not pictures:
        raise DataError(
            f"no column holds pictures; there are {listed(features)}",
            where=path,
            hint="pictures are expected as encoded bytes in a column 'image'",
        )
    named = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels = [name for name in _LABEL_COLUMNS if name in features] + named
    if not labels:
        raise DataError(
            f"no column holds labels; there are {listed(features)}",
            where=path,
            hint="labels are expected in a column 'label'",
        )
    return pictures[0], next((name for name in labels if name in named), labels[0])


def _named_classes(table: Any, label: str) -> tuple[ClassLabel, ...] | None:
    names = getattr(table.features[label], "names", None)
    if not names:
        return None
    classes = tuple(folder_label(name) for name in names)
    if len({c.id for c in classes}) < len(classes):  # then a name is not an identity
        classes = tuple(ClassLabel(str(i), name) for i, name in enumerate(names))
    return classes


def _labels(table: Any, column: str, path: Path) -> Any:
    if column not in table.features:
        raise DataError(f"one part has no column '{column}'", where=path)
    values = table.data.column(column)
    if values.type in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool"):
        return values.fill_null(-1).to_numpy().astype(np.int64)
    return values.cast("string").fill_null("").to_numpy().astype(np.str_)


def _row_names(files: list[Path]) -> list[str]:
    import pyarrow.parquet

    counts = [pyarrow.parquet.ParquetFile(file).metadata.num_rows for file in files]
    return [
        f"{file.name} row {row}"
        for file, count in zip(files, counts, strict=True)
        for row in range(count)
    ]
