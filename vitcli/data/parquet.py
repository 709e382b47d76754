"""Parquet files as the Hub keeps data sets, through the `datasets` library.

`datasets` writes them once as Arrow into its own cache (HF_HOME), which is then mapped: random
access without holding the data in memory.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel
from vitcli.data.classes import class_of, listed, match_classes, name_labels, read_classes
from vitcli.data.source import Dataset, Ints, Names, Source, group_by_split
from vitcli.errors import DataError, ImageError, MissingExtraError

_IMAGE_COLUMNS = ("image", "img", "image", "jpg", "jpeg", "png", "image_bytes", "bytes")
_LABEL_COLUMNS = ("label", "labels", "cls", "class", "target", "category", "fine_label", "y")


class ArrowReader:
    """Images in a column of a mapped table."""

    def __init__(self, table: Any, column: str) -> None:
        self.table = table  # datasets.Dataset
        self.column = column
        self._values = table.data.column(column)  # binary, or struct<bytes, path>

    def __reduce__(self) -> tuple[type[ArrowReader], tuple[Any, str]]:
        # A data set is pickled as the path of its file, its columns as all that they hold.
        return ArrowReader, (self.table, self.column)

    def read(self, row: int) -> bytes:
        value = self._values[row].as_py()
        if isinstance(value, dict):
            data, path = value.get("bytes"), value.get("path")
            local = data is None and path is not None and Path(path).is_file()
            value = Path(str(path)).read_bytes() if local else data
        if not isinstance(value, bytes):
            raise ImageError("the row holds no image")
        return value


def is_parquet(path: Path) -> bool:
    """Whether a path is named like a parquet file."""
    return path.suffix.lower() == ".parquet" and not path.name.startswith(".")


def open_parquet(path: Path, classes_file: Path | None) -> Dataset:
    """The parts of a parquet file, or of a folder of them, told by the words train, validation
    and test in their names (data/train-00000-of-00001.parquet).

    Raises:
        DataError: damaged, no column of images or of labels, or no labelled image.
        MissingExtraError: `datasets` is not installed.
    """
    files = sorted(filter(is_parquet, path.rglob("*"))) if path.is_dir() else [path]
    grouped = group_by_split(files, path)
    loaded = {part: _load(group, path) for part, group in grouped.items()}
    tables = {part: table for part, table in loaded.items() if table is not None}
    if not tables:
        raise DataError("holds no labelled image", where=path)
    image, label = _columns(next(iter(tables.values())), path)
    warnings: list[str] = []
    raw: dict[str, npt.NDArray[Any]] = {}
    kept: dict[str, Ints] = {}
    for part, table in tables.items():
        missing = [name for name in (image, label) if name not in table.features]
        if missing:
            warnings.append(f"{path}: the {part} part has no column {listed(missing)}: left out")
            continue
        labels = _labels(table, label, path)
        has_label = labels != "" if labels.dtype.kind == "U" else labels >= 0
        kept[part] = np.flatnonzero(has_label)
        if not has_label.all():
            without = np.count_nonzero(~has_label)
            warnings.append(f"{path}: {without:,} rows of {part} have no label: left out")
        if len(kept[part]):
            raw[part] = labels[kept[part]]
    if not raw:
        raise DataError("holds no labelled image", where=path)
    first = tables[next(iter(raw))]
    named = _named_classes(first, label)
    listing = read_classes(classes_file) if classes_file else None
    classes, indices, notes = name_labels(raw, named or listing, path)
    if named and listing:  # the data's own names, in the order of the list
        table = match_classes(named, listing, path, str(classes_file))
        classes, indices = listing, {part: table[labels] for part, labels in indices.items()}
    parts = {
        part: Source(
            classes,
            labels,
            _row_names(grouped[part]).select(kept[part]),
            ArrowReader(tables[part], image),
            grouped[part][0].parent,
            kept[part],
        )
        for part, labels in indices.items()
    }
    return Dataset(parts.get("train"), parts.get("val"), parts.get("test"), (*warnings, *notes))


def _load(files: list[Path], path: Path) -> Any:
    """A `datasets.Dataset` of those files that hold rows; None where none does."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtraError("datasets", "data", "reading parquet files") from error
    files = [file for file in files if _count_rows(file)]  # `datasets` refuses empty ones
    if not files:
        return None
    log = datasets.utils.logging
    bars, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity(logging.CRITICAL)  # its errors are raised as well
    try:
        names = [str(file.resolve()) for file in files]
        return datasets.load_dataset("parquet", data_files=names, split="train")
    except Exception as error:  # what pyarrow, fsspec and the disk raise comes through
        raise _unreadable(files[0] if len(files) == 1 else path, error) from error
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _count_rows(file: Path) -> int:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        return int(parquet.read_metadata(file).num_rows)
    except Exception as error:  # pyarrow's own, which is not imported here, and the disk's
        raise _unreadable(file, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    reason = str(error.__cause__ or error).strip().partition("\n")[0]
    return DataError(f"cannot be read as parquet: {reason}", where=path)


def _columns(table: Any, path: Path) -> tuple[str, str]:
    """The names of the image's and of the label's column: by their types, then by name."""
    kinds = {name: type(feature).__name__ for name, feature in table.features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"]
    images += [name for name in _IMAGE_COLUMNS if name in kinds and _holds_bytes(table, name)]
    labels = [name for name in _LABEL_COLUMNS if kinds.get(name) == "ClassLabel"]
    labels += [name for name, kind in kinds.items() if kind == "ClassLabel"]
    labels += [name for name in _LABEL_COLUMNS if name in kinds]
    for found, what, name in ((images, "images", "image"), (labels, "labels", "label")):
        if not found:
            raise DataError(
                f"no column holds {what}; there are {listed(kinds)}",
                where=path,
                hint=f"the Hub's data sets have a column '{name}'"
                + (" with encoded images" if name == "image" else ""),
            )
    return images[0], labels[0]


def _holds_bytes(table: Any, column: str) -> bool:
    kind = str(table.data.column(column).type)
    return "binary" in kind


def _named_classes(table: Any, label: str) -> tuple[ClassLabel, ...] | None:
    names = getattr(table.features[label], "names", None)
    if not names:
        return None
    classes = tuple(class_of(name) for name in names)
    if len({entry.id for entry in classes}) < len(classes):  # then a name is no identity
        classes = tuple(ClassLabel(str(i), name) for i, name in enumerate(names))
    return classes


def _labels(table: Any, column: str, path: Path) -> npt.NDArray[Any]:
    """int64 (N,), -1 where there is none; or str (N,), "" where there is none."""
    values = table.data.column(column)
    try:
        if str(values.type) in ("string", "large_string", "string_view"):
            texts = values.fill_null("").to_numpy()
            return np.asarray(texts, np.str_)
        numbers: npt.NDArray[Any] = values.cast("int64").fill_null(-1).to_numpy()
        return numbers
    except Exception as error:  # pyarrow's own, which is not imported here
        raise DataError(
            f"the column '{column}' holds {values.type}, not one label a row", where=path
        ) from error


def _row_names(files: list[Path]) -> Names:
    return Names.pack(
        f"{file.name} row {row}" for file in files for row in range(_count_rows(file))
    )
