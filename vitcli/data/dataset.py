"""Where images and labels come from: `--data` of any kind becomes parts of `Source`s.

- folder.py: a folder of class folders, with or without train/, val/, test/; a CSV
- parquet.py: a parquet file, or a folder of them as the Hub keeps data sets
- shards.py: WebDataset tar shards: a folder, a pattern, one shard
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitcli.config import ClassLabel, DataConfig
from vitcli.data import directory, parquet, shards
from vitcli.data.classes import listed, match_classes
from vitcli.data.images import decode
from vitcli.data.source import Dataset, Ints, Source, is_image, join_sources
from vitcli.errors import DataError, ImageError
from vitcli.machine import cpu_cores

Split = Literal["auto", "train", "val", "test"]

_CHECKED_AT_ONCE = 256
_PART_NAMES = {"train": "training part", "val": "validation part", "test": "test part"}


@dataclass(frozen=True)
class Splits:
    """A data set as training sees it."""

    train: Source
    val: Source | None
    """Selects the best step. Comes with the data, or was held out of the training part."""
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
    report: Callable[[str], None] = lambda text: None,
    select: bool = True,
) -> Splits:
    """Opens a data set for training.

    Args:
        config: where it is, and how to hold out a validation part if it has none.
        classes: of a model; labels become indices into them, matched by id, then by unique name.
        record: a split that was written down (`Splits.record`): the same images are held out,
            whatever was added to the data since.
        report: called with a line before something that may take minutes (once for each data set).
        select: whether something is to be selected on a validation part; if not, none is held out
            where there is a test part.

    Raises:
        DataError: it is not there, of no known kind, damaged, empty, has a single class, or one
            without training images.
        MissingExtraError: the library that reads it is not installed.
    """
    parts = open_dataset(config, report)
    train, val = parts.train, parts.val
    if train is None:
        raise DataError(
            "there is no training part, only one to validate or test on",
            where=config.path,
            hint="give the folder above it, or files with 'train' in their names",
        )
    counts = train.counts()
    if np.count_nonzero(counts) < 2 and classes is None:
        raise DataError(
            f"all images are of one class, '{train.classes[int(counts.argmax())].name}'",
            where=config.path,
            hint="to learn to tell classes apart takes two at least, each in a folder of its own",
        )
    warnings = list(parts.warnings)
    _require_trained(train, val if not config.merge_val else None, parts.test, config.path)
    if not counts.all():  # a list of classes may have more than the data
        absent = [train.classes[i].name for i in np.flatnonzero(counts == 0)]
        warnings.append(f"{config.path}: no training images of {listed(absent)}")
    fingerprint = train.fingerprint()
    if record is not None and record.get("fingerprint") != fingerprint:
        warnings.append(f"{config.path} has changed since its split was written down")
    place = str(Path(config.path).expanduser().resolve())
    written: dict[str, Any] = {"data": place, "fingerprint": fingerprint}
    if config.merge_val:
        note, written["kind"] = "validation: none, all of it is trained on", "merged"
        if val is not None:
            train, val = join_sources(train, val), None
    elif val is not None:
        note = f"validation: the data's own part, {len(val):,} images"
        written["kind"] = "given"
    elif parts.test is not None and not select:
        note = "validation: none"
        written["kind"] = "none"
    else:
        held, note = _hold_out(train, config, record, warnings)
        written["kind"] = "held out" if len(held) else "none"
        if len(held):
            val = train.select(held)
            written |= {"fraction": config.val_fraction, "seed": config.split_seed}
            written["val"] = list(val.names)
            train = train.select(np.setdiff1d(np.arange(len(train)), held))
    return Splits(
        _aligned(train, classes, config.path),
        None if val is None else _aligned(val, classes, config.path),
        None if parts.test is None else _aligned(parts.test, classes, config.path),
        note,
        tuple(warnings),
        written,
    )


def open_split(
    config: DataConfig,
    split: Split = "auto",
    classes: tuple[ClassLabel, ...] | None = None,
    record: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Source, str, tuple[str, ...]]:
    """Opens one part of a data set, to evaluate on.

    Args:
        config: where it is; nothing is held out of it.
        split: "auto" takes the test part if the data has one, else its validation part, else all.
        classes: of a model; labels become indices into them, matched by id, then by unique name.
        record: the split of a run on this data: "val" (and "auto", where the data has no parts)
            is then what that run held out; images that it was trained on are warned of.
        report: as in `open_data`.

    Returns:
        (the images, which part this is in words, warnings)

    Raises:
        DataError: as `open_data`; there is no such part; a class that the model does not have.
    """
    parts = open_dataset(config, report)
    named = {"test": parts.test, "val": parts.val, "train": parts.train}
    there = {name: source for name, source in named.items() if source is not None}
    chosen = next(iter(there)) if split == "auto" else split
    warnings = list(parts.warnings)
    words = "all images" if len(there) == 1 and chosen in there else _PART_NAMES[chosen]
    source = there.get(chosen)
    wants_held = split == "val" or (split == "auto" and chosen == "train")
    kind = record.get("kind") if record is not None else None
    if wants_held and kind == "held out" and "val" not in there and "train" in there:
        held, _ = _hold_out(there["train"], config, record, warnings)
        source, words = there["train"].select(held), "images held out of training"
    elif (chosen == "train" and record is not None) or (chosen == "val" and kind == "merged"):
        warnings.append("the model was trained on these images: its figures here are no measure")
    if source is None or not len(source):
        raise DataError(
            f"there is no {_PART_NAMES[chosen]}",
            where=config.path,
            hint=f"this data has a {' and a '.join(_PART_NAMES[name] for name in there)}",
        )
    return _aligned(source, classes, config.path), words, tuple(warnings)


def open_dataset(config: DataConfig, report: Callable[[str], None] = lambda text: None) -> Dataset:
    """The parts of a data set as they lie on disk, whatever its kind."""
    path = Path(config.path).expanduser()
    classes_file = Path(config.classes).expanduser() if config.classes else None
    if "{" in config.path and not path.exists():
        return shards.open_shards(path, classes_file, report)
    if not path.exists():
        raise DataError(
            "there is no such file or folder",
            where=config.path,
            hint="give a folder of class folders, a .csv, a .parquet or .tar shards",
        )
    if path.is_dir():
        if not _has_class_folders(path):  # an archive may lie beside those that came out of it
            if _holds(path, shards.is_shard):
                return shards.open_shards(path, classes_file, report)
            if _holds(path, parquet.is_parquet):
                return parquet.open_parquet(path, classes_file)
        return directory.open_directory(path, classes_file)
    if shards.is_shard(path):
        return shards.open_shards(path, classes_file, report)
    if parquet.is_parquet(path):
        return parquet.open_parquet(path, classes_file)
    if path.suffix.lower() in (".csv", ".tsv"):
        return directory.open_csv(path, classes_file)
    raise DataError(
        "is not a data set of a known kind",
        where=config.path,
        hint="give a folder of class folders, a .csv, a .parquet or .tar shards",
    )


def unreadable_images(
    source: Source, on_progress: Callable[[int], None] = lambda count: None
) -> list[ImageError]:
    """Decodes every image, in threads; an error for each that cannot be read, in order.

    Args:
        on_progress: called now and then with how many more images were checked.
    """

    def check(index: int) -> ImageError | None:
        try:
            decode(source.read(index), (1, 1))  # a JPEG at 1/8 of its size, the fastest
        except ImageError as error:
            return ImageError(error.what, where=source.where(index), hint=error.hint)
        return None

    found: list[ImageError] = []
    with ThreadPoolExecutor(cpu_cores()) as pool:
        for start in range(0, len(source), _CHECKED_AT_ONCE):
            indices = range(start, min(start + _CHECKED_AT_ONCE, len(source)))
            found += [error for error in pool.map(check, indices) if error is not None]
            on_progress(len(indices))
    return found


def _require_trained(train: Source, val: Source | None, test: Source | None, path: str) -> None:
    """Raises DataError for classes that are to be recognised and can be learnt from nothing."""
    for words, source in (("validation", val), ("test", test)):
        if source is not None and (alone := (source.counts() > 0) & (train.counts() == 0)).any():
            raise DataError(
                f"{listed(train.classes[i].name for i in np.flatnonzero(alone))} has no images "
                "in the training part",
                where=path,
                hint=f"add some there, or take it out of the {words} part",
            )


def _has_class_folders(path: Path) -> bool:
    """Whether images lie in folders of `path`, or of its parts (train/, val/, test/)."""
    places = [path, *(p for p in path.iterdir() if p.is_dir())]
    return any(
        _holds(place, lambda p, place=place: p.parent != place and is_image(p.name))  # type: ignore[misc]
        for place in places
    )


def _holds(place: Path, wanted: Callable[[Path], bool]) -> bool:
    """Whether a folder, or a folder in it, directly holds a file that is wanted."""
    try:
        folders = [place, *(p for p in place.iterdir() if p.is_dir())]
        return any(wanted(p) and p.is_file() for inner in folders for p in inner.iterdir())
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=place) from error


# ---------------------------------------------------------------------------------------------
# The split


def _hold_out(
    train: Source, config: DataConfig, record: Mapping[str, Any] | None, warnings: list[str]
) -> tuple[Ints, str]:
    """(sorted indices of the images held out for validation, a line that says which)."""
    if record is not None and record.get("kind") == "held out":
        wanted = set(record["val"])
        held = np.array([i for i, name in enumerate(train.names) if name in wanted], np.int64)
        if len(held) < len(wanted):
            warnings.append(
                f"{config.path}: {len(wanted) - len(held):,} of the {len(wanted):,} validation "
                "images that were written down are gone"
            )
        return held, f"validation: the {len(held):,} images that were held out before"
    if config.val_fraction == 0 or (record is not None and record.get("kind") == "none"):
        return np.empty(0, np.int64), "validation: none"
    held = stratified(train, config.val_fraction, config.split_seed)
    single = [train.classes[i].name for i in np.flatnonzero(train.counts() == 1)]
    if single:
        warnings.append(
            f"{config.path}: only one image of {listed(single)}: trained on, not validated"
        )
    if not len(held):
        return held, "validation: none, as no class has two images"
    note = (
        f"validation: {len(held):,} of {len(train):,} images held out, "
        f"{config.val_fraction:.0%} of each class (split seed {config.split_seed})"
    )
    return held, note


def stratified(source: Source, fraction: float, seed: int) -> Ints:
    """Sorted indices of `fraction` of each class: at least one image of a class that has two,
    never all of them. A function of the seed, the class's index and its images' order alone."""
    order = np.argsort(source.labels, kind="stable")
    ends = np.cumsum(source.counts())
    held = [np.empty(0, np.int64)]
    for index, end in enumerate(ends):
        members = order[ends[index - 1] if index else 0 : end]
        if len(members) > 1:
            count = min(max(1, round(fraction * len(members))), len(members) - 1)
            held.append(np.random.default_rng((seed, index)).permutation(members)[:count])
    return np.sort(np.concatenate(held))


def _aligned(source: Source, classes: tuple[ClassLabel, ...] | None, path: str) -> Source:
    """The source with labels that are indices into a model's classes."""
    if not classes or classes == source.classes:
        return source
    # Only classes that have images must be among the model's.
    present = np.flatnonzero(source.counts())
    table = np.full(len(source.classes), -1, np.int64)
    wanted = [source.classes[i] for i in present]
    table[present] = match_classes(wanted, classes, path, "the model")
    return dataclasses.replace(source, classes=classes, labels=table[source.labels])
