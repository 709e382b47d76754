"""Where pictures and labels come from: `--data` of any kind becomes parts of `Source`s.

a folder of class folders, with or without train/, val/, test/     folder.py
a CSV of path and label                                            folder.py
a parquet file, or a folder of them                                parquet.py
tar shards: a folder, a pattern, one shard                         shards.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitcli.config import ClassLabel, DataConfig
from vitcli.data.labels import match_classes
from vitcli.data.records import Ints, Names, Parts, Source
from vitcli.errors import DataError

__all__ = ["Names", "Source", "Splits", "open_data", "open_part"]

Part = Literal["auto", "train", "val", "test", "all"]


@dataclass(frozen=True)
class Splits:
    """A data set as training sees it."""

    train: Source
    val: Source | None
    """Selects the best step. Comes with the data, or was split off the training part."""
    test: Source | None
    """Never selects anything."""
    split_note: str
    """Where the validation part comes from, in one line."""
    warnings: tuple[str, ...]
    """What a user should know about this data, each in one line."""
    record: dict[str, Any]
    """The split as JSON can hold it: written to a run's folder, given back to `open_data`."""

    @property
    def classes(self) -> tuple[ClassLabel, ...]:
        """The classes of every part, in index order."""
        return self.train.classes


def open_data(
    config: DataConfig,
    classes: tuple[ClassLabel, ...] | None = None,
    record: Mapping[str, Any] | None = None,
) -> Splits:
    """Opens a data set for training.

    Args:
        config: where it is, and how to split off a validation part if it has none.
        classes: of a model; labels become indices into them, matched by id, then by unique name.
        record: a split that was written down (`Splits.record`): its pictures are held out again,
            whatever was added to the data since.

    Raises:
        DataError: it is not there, of no known kind, damaged, empty, or has a single class.
        MissingExtraError: the library that reads it is not installed.
    """
    parts = open_parts(config)
    train = parts.train
    if train is None:
        raise DataError(
            "there is no training part", where=config.path, hint="expected a part named 'train'"
        )
    if len(np.unique(train.labels)) < 2 and classes is None:
        only = train.classes[int(train.labels[0])].name if len(train) else "nothing"
        raise DataError(
            f"all pictures are of one class, '{only}'",
            where=config.path,
            hint="learning to tell classes apart needs two at least, each in a folder of its own",
        )
    warnings = list(parts.warnings)
    fingerprint = train.fingerprint()
    if parts.val is not None:
        val: Source | None = parts.val
        note = f"the data's own validation part: {len(parts.val):,} pictures"
        written: dict[str, Any] = {"kind": "given"}
    else:
        held, note, written = _hold_out(train, config, record, warnings)
        val = train.select(held) if len(held) else None
        train = train.select(np.setdiff1d(np.arange(len(train)), held))
    if record is not None and record.get("fingerprint") != fingerprint:
        warnings.append(f"{config.path} has changed since its split was written down")
    written = {"data": config.path, "fingerprint": fingerprint, **written}
    opened = [_aligned(s, classes, config.path) for s in (train, val, parts.test)]
    assert opened[0] is not None
    return Splits(opened[0], opened[1], opened[2], note, tuple(warnings), written)


def open_part(
    config: DataConfig, part: Part = "auto", classes: tuple[ClassLabel, ...] | None = None
) -> tuple[Source, str, tuple[str, ...]]:
    """Opens one part of a data set, to evaluate on; nothing is split off.

    auto: the test part if the data has one, else its validation part, else all of it.

    Returns:
        (the pictures, which part this is in words, warnings)
    """
    parts = open_parts(config)
    named = {"test": parts.test, "val": parts.val, "train": parts.train}
    if part == "auto":
        part, source = next((name, s) for name, s in named.items() if s is not None)  # type: ignore[assignment]
    else:
        source = parts.train if part == "all" and not (parts.val or parts.test) else None
        source = source or named.get(part)
    if source is None:
        there = ", ".join(name for name, s in named.items() if s is not None)
        raise DataError(f"there is no part '{part}'", where=config.path, hint=f"it has: {there}")
    aligned = _aligned(source, classes, config.path)
    assert aligned is not None
    words = {"test": "test part", "val": "validation part", "train": "training part"}
    alone = sum(s is not None for s in named.values()) == 1
    return aligned, "all pictures" if alone else words[part], parts.warnings


def open_parts(config: DataConfig) -> Parts:
    """The data set as it lies on disk."""
    from vitcli.data import folder, parquet, shards

    path = Path(config.path).expanduser()
    classes_file = Path(config.classes).expanduser() if config.classes else None
    name = path.name.lower()
    if "{" in str(path) or (path.is_file() and shards.is_shard(path)):
        return shards.open_shards(path, classes_file)
    if not path.exists():
        raise DataError("there is no such file or folder", where=config.path)
    if path.is_dir():
        if _holds(path, shards.is_shard):
            return shards.open_shards(path, classes_file)
        if _holds(path, lambda p: p.suffix == ".parquet"):
            return parquet.open_parquet(path, classes_file)
        return folder.open_folder(path, classes_file)
    if name.endswith(".parquet"):
        return parquet.open_parquet(path, classes_file)
    if name.endswith((".csv", ".tsv")):
        return folder.open_csv(path, classes_file)
    raise DataError(
        "is not a data set that vit knows",
        where=config.path,
        hint="give a folder of class folders, a .csv, a .parquet or .tar shards",
    )


def _holds(folder: Path, wanted: Any) -> bool:
    """Whether a folder, or a folder in it, directly holds a file that is wanted."""
    inner = [folder, *(p for p in folder.iterdir() if p.is_dir())]
    return any(wanted(p) for place in inner for p in place.iterdir() if p.is_file())


# ---------------------------------------------------------------------------------------------
# The split


def _hold_out(
    train: Source, config: DataConfig, record: Mapping[str, Any] | None, warnings: list[str]
) -> tuple[Ints, str, dict[str, Any]]:
    """(indices of the validation pictures, a note, the record) for data without such a part."""
    if record is not None and record.get("kind") == "held out":
        wanted = set(record["val"])
        held = np.array([i for i, name in enumerate(train.names) if name in wanted], np.int64)
        if len(held) < len(wanted):
            warnings.append(
                f"{config.path}: {len(wanted) - len(held):,} of the {len(wanted):,} validation "
                "pictures that were written down are gone"
            )
        note = f"held out for validation, as written down before: {len(held):,} pictures"
        return held, note, dict(record)
    if config.val_fraction == 0:
        return np.empty(0, np.int64), "no validation part", {"kind": "none"}
    held = stratified(train, config.val_fraction, config.split_seed)
    single = [train.classes[c].name for c in np.flatnonzero(train.counts() == 1)]
    if single:
        from vitcli.data.labels import listed

        warnings.append(
            f"{config.path}: {listed(single)} has one picture: it is trained on, not validated"
        )
    note = (
        f"held out for validation: {len(held):,} of {len(train):,} pictures, "
        f"{config.val_fraction:.0%} of each class (split seed {config.split_seed})"
    )
    kept = {
        "kind": "held out",
        "fraction": config.val_fraction,
        "seed": config.split_seed,
        "val": [train.names[int(i)] for i in held],
    }
    return held, note, kept


def stratified(source: Source, fraction: float, seed: int) -> Ints:
    """Sorted indices of `fraction` of each class, at least one picture of each class that has
    two; a function of the seed, the class's place and its pictures' order alone."""
    order = np.argsort(source.labels, kind="stable")
    starts = np.concatenate([[0], np.cumsum(source.counts())])
    held = []
    for index, (start, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        members = order[start:end]
        if len(members) > 1:
            count = min(max(1, round(fraction * len(members))), len(members) - 1)
            held.append(np.random.default_rng((seed, index)).permutation(members)[:count])
    return np.sort(np.concatenate(held)) if held else np.empty(0, np.int64)


def _aligned(
    source: Source | None, classes: tuple[ClassLabel, ...] | None, path: str
) -> Source | None:
    """The source with labels that are indices into a model's classes."""
    if source is None or not classes or classes == source.classes:
        return source
    # Only classes that have pictures must be among the model's.
    present = np.flatnonzero(source.counts())
    table = np.full(len(source.classes), -1, np.int64)
    table[present] = match_classes([source.classes[i] for i in present], classes, path, "the model")
    return dataclasses.replace(source, classes=classes, labels=table[source.labels])
