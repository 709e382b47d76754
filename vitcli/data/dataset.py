"""Open a dataset of any kind (`--data`) as splits: `Source`s of labeled images.

- directory.py: a directory of class directories, with or without train/, val/, test/
- csv_file.py: a CSV that lists images
- parquet.py: a Parquet file, or a directory of them as the Hub stores datasets
- shards.py: WebDataset tar shards: a directory, a pattern, or one shard
- remote_shards.py: tar shards at URLs, whose training split is a `Stream`
- hub_dataset.py: a dataset on the Hub, whose training split is a `Stream`
"""

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitcli.config import DATA_HINT, HUB, ClassLabel, DataConfig
from vitcli.data import csv_file, directory, parquet, shards
from vitcli.data.classes import quote_list, read_classes
from vitcli.data.files import find_files
from vitcli.data.hub_dataset import open_hub
from vitcli.data.images import decode
from vitcli.data.remote_shards import open_remote_shards
from vitcli.data.source import Dataset, Ints, Source, concat_sources, split_of
from vitcli.data.stream import Stream, StreamOptions
from vitcli.data.tar import is_tar
from vitcli.errors import DataError, ImageError, warn
from vitcli.machine import cpu_cores
from vitcli.words import join_or, pluralize, public_url

Split = Literal["auto", "train", "val", "test"]

_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}


@dataclass(frozen=True)
class Splits:
    """A dataset prepared for training."""

    train: Source | Stream
    val: Source | None
    """Used to select the best step. The dataset's own, or held out of the training split."""
    test: Source | None
    """Never used for selection."""
    split_note: str
    """Where the validation split comes from."""
    record: dict[str, Any]
    """The split as JSON, saved in the run directory; `open_splits` reproduces the split from it."""

    @property
    def images(self) -> Source:
        """The training split as a `Source`. Raises DataError if it is a stream."""
        return require_source(self.train)

    @property
    def classes(self) -> tuple[ClassLabel, ...]:
        """The classes of every split, in index order."""
        return self.train.classes


def open_splits(
    config: DataConfig,
    record: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda text: None,
    select: bool = True,
    streaming: StreamOptions | None = None,
    labeled: bool = True,
) -> Splits:
    """Open a dataset for training.

    Args:
        config: the dataset's path, and how to hold out a validation split if it has none.
        record: a recorded split (`Splits.record`): the same images are held out, even if images
            have been added since.
        report: called with a line of text before an operation that may take minutes.
        select: whether a validation split is used for selection; if not, none is held out of a
            dataset that has a test split.
        streaming: options for remote data.
        labeled: whether labels are needed; if not, all images may be of one class, or in a
            directory without class directories.

    Raises:
        DataError: it cannot be read, is empty, has a single class, or one without training images.
        MissingExtraError: the library that reads it is not installed.
    """
    dataset = open_dataset(config, report, streaming or StreamOptions(), labeled)
    train, val = dataset.train, dataset.val
    if train is None:
        raise DataError(
            "there is no training split, only validation or test images",
            where=config.path,
            hint="pass the parent directory, files with 'train' in their names, or a CSV with rows "
            "of the split train",
        )
    if isinstance(train, Source):
        _check_classes(train, dataset, config, labeled)
    location, fingerprint = _location(config), train.fingerprint()
    if record is not None and record.get("fingerprint") != fingerprint:
        warn("has changed since its split was recorded", location)
    new_record: dict[str, Any] = {"data": location, "fingerprint": fingerprint, "kind": "none"}
    if config.merge_val:
        require_mergeable(train)
        note, new_record["kind"] = "validation: none, trained on all images", "merged"
        if val is not None:
            train, val = concat_sources(require_source(train), val), None
    elif val is not None:
        note = f"validation: the dataset's own split, {pluralize(len(val), 'image')}"
        new_record["kind"] = "given"
    elif isinstance(train, Stream):
        note = "validation: none, because training data is streamed; add shards of a validation "
        note += "split"
    elif dataset.test is not None and not select:
        note = "validation: none"
    else:
        held_out, note = _hold_out(train, config, record)
        if len(held_out):
            val = train.select(held_out)
            new_record |= {
                "kind": "held out",
                "fraction": config.val_fraction,
                "seed": config.split_seed,
                "val": list(val.names),
            }
            train = train.select(np.delete(np.arange(len(train)), held_out))
    return Splits(train, val, dataset.test, note, new_record)


def _location(config: DataConfig) -> str:
    """The dataset's location as stored in a split record."""
    return public_url(config.path) if config.is_remote else os.path.realpath(config.path)


def _check_classes(train: Source, dataset: Dataset, config: DataConfig, labeled: bool) -> None:
    """Warn about classes without any images.

    Raises:
        DataError: there is one class, or one with validation or test images but no training images.
    """
    present = train.counts() > 0
    if labeled and np.count_nonzero(present) < 2:
        name, _, subpath = train.names[0].partition("/")
        is_dir = os.path.isdir(config.path)
        nested = is_dir and "/" in subpath and not split_of(name)
        raise DataError(
            f"all images are of one class, '{train.classes[int(present.argmax())].name}'",
            where=config.path,
            hint="training needs at least two classes"
            + (", each in its own directory" if is_dir else "")
            + (f"; if these are in {config.path}/{name}, pass that directory" if nested else ""),
        )
    val = None if config.merge_val else dataset.val
    for split_name, source in (("validation", val), ("test", dataset.test)):
        if source is not None and (untrained := (source.counts() > 0) & ~present).any():
            names = quote_list(train.classes[i].name for i in np.flatnonzero(untrained))
            hint = f"add some, or remove the class from the {split_name} split"
            raise DataError(f"no training images of {names}", where=config.path, hint=hint)
    if not present.all():  # a list of classes may have more than the data
        missing = [train.classes[i].name for i in np.flatnonzero(~present)]
        warn(f"no training images of {quote_list(missing)}", config.path)


def open_split(
    config: DataConfig,
    split: Split = "auto",
    record: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Source, str]:
    """Open one split of a dataset for evaluation.

    Args:
        config: the dataset; nothing is held out of it.
        split: "auto" takes the test split if there is one, else the validation split, else all.
        record: the split record of a run. If the run used this data, even at another path, "val"
            (and "auto", if the data has no splits) is what the run held out, and there is a warning
            if the model was trained on these images.

    Returns:
        (images, name of the split for messages)
    """
    dataset = open_dataset(config, report)
    if record is not None and record.get("data") != _location(config):
        if dataset.train is None or dataset.train.fingerprint() != record.get("fingerprint"):
            record = None
        else:
            what = "has the same file names and labels as the model's training data"
            report(f"{config.path} {what}, so it is treated as a copy")
    kind = record.get("kind") if record is not None else None
    held_out, uses_test = None, dataset.test is not None and split in ("auto", "test")
    has_held_out = kind == "held out" and dataset.val is None and not uses_test
    if has_held_out and isinstance(dataset.train, Source):
        indices, _ = _hold_out(dataset.train, config, record)
        remaining = np.delete(np.arange(len(dataset.train)), indices)
        held_out = dataset.train.select(indices)
        dataset = replace(dataset, train=dataset.train.select(remaining), val=held_out)
    splits = {"test": dataset.test, "val": dataset.val, "train": dataset.train}
    available = {name: source for name, source in splits.items() if source is not None}
    chosen = next(iter(available)) if split == "auto" else split
    if chosen not in available:
        raise DataError(
            f"there is no {_SPLIT_NAMES[chosen]} split",
            where=config.path,
            hint=f"use --split {join_or([*available, 'auto'])}",
        )
    source = require_source(available[chosen])
    if source is held_out:
        if not len(source):
            what = "the images held out for validation no longer exist"
            raise DataError(what, where=config.path, hint="evaluate on other images")
        return source, "held-out validation images"
    if record is not None and (chosen == "train" or (chosen == "val" and kind == "merged")):
        what = "the model was trained on these images, so the metrics are optimistic"
        warn(what, config.path)
    return source, "all images" if [*available] == [chosen] else f"{_SPLIT_NAMES[chosen]} split"


def require_mergeable(split: Source | Stream) -> None:
    """Raise DataError if validation images cannot be added to a training split."""
    if isinstance(split, Stream):
        raise DataError(
            "validation images cannot be added to streamed training data",
            where=split.root,
            hint="with several learning rates, pass --no-retrain",
        )


def require_source(split: Source | Stream) -> Source:
    """Return the split if it has random access; raise DataError if it is a stream."""
    if isinstance(split, Stream):
        raise DataError(
            "the training split is streamed, which `vit evaluate`, `vit fewshot`, --strict, "
            "--probe-every, --balanced-sampling and --class-weights balanced do not support",
            where=split.root,
            hint="download the shards and pass their directory",
        )
    return split


def open_dataset(
    config: DataConfig,
    report: Callable[[str], None] = lambda text: None,
    streaming: StreamOptions | None = None,
    labeled: bool = True,
) -> Dataset:
    """Open a dataset of any kind with its own splits. The list of classes is the configured one,
    else a `classes.txt` next to the data. Unless it must be `labeled`, the dataset may be a
    directory of images without class directories. Without `streaming`, a training split that would
    be streamed is not opened, and is empty."""
    class_file = Path(config.classes) if config.classes else None
    if config.is_remote:
        class_list = read_classes(class_file) if class_file else None
        opener = open_hub if config.path.startswith(HUB) else open_remote_shards
        return opener(config.path, class_list, streaming, report)
    config.reachable(offline=False)
    path = Path(config.path)
    exists, is_dir = os.path.exists(path), os.path.isdir(path)
    if exists and not is_dir and not os.path.isfile(path):
        raise DataError("neither a file nor a directory", where=config.path, hint=DATA_HINT)
    parent = path if is_dir else os.path.dirname(path if exists else re.split("{|::", str(path))[0])
    class_file = class_file or Path(parent, "classes.txt")
    class_list = read_classes(class_file) if config.classes or os.path.isfile(class_file) else None
    if is_dir:
        # Class directories take precedence over an archive that they may have come from.
        if not directory.has_class_directories(path):
            if any(find_files(path, is_tar)):
                return shards.open_shards(path, class_list, report)
            if any(find_files(path, parquet.is_parquet)):
                return parquet.open_parquet(path, class_list)
        images = None if labeled else directory.open_images(path)
        return images or directory.open_directory(path, class_list, report)
    if not exists or is_tar(path.name):
        return shards.open_shards(path, class_list, report)
    if parquet.is_parquet(path.name):
        return parquet.open_parquet(path, class_list)
    if path.suffix.lower() in (".csv", ".tsv"):
        return csv_file.open_csv(path, class_list)
    is_archive = path.suffix.lower() in (".zip", ".7z", ".rar")
    hint = "extract it, and pass the directory" if is_archive else DATA_HINT
    raise DataError("not a supported dataset", where=config.path, hint=hint)


def unreadable_images(source: Source) -> list[ImageError]:
    """Decode all images in threads; return the errors of those that cannot be read, in order."""

    def check(index: int) -> ImageError | None:
        try:
            decode(source.read(index), (1, 1))  # a JPEG at 1/8 size, the fastest
        except ImageError as error:
            return ImageError(error.what, where=source.where(index), hint=error.hint)
        return None

    with ThreadPoolExecutor(cpu_cores()) as pool:
        return [error for error in pool.map(check, range(len(source))) if error is not None]


# ---------------------------------------------------------------------------------------------
# Holding out a validation split


def _hold_out(
    train: Source, config: DataConfig, record: Mapping[str, Any] | None
) -> tuple[Ints, str]:
    """Return (sorted indices of the images held out for validation, a note about them)."""
    if record is not None and record.get("kind") == "held out":
        held = stratified(train, record["fraction"], record["seed"])
        if [train.names[i] for i in held] == record["val"]:  # even if names repeat
            return held, _held_out_note(train, len(held), record["fraction"])
        recorded = set(record["val"])
        held = np.array([i for i, name in enumerate(train.names) if name in recorded], np.int64)
        if len(held) < len(recorded):
            missing = f"{len(recorded) - len(held):,} of the {len(recorded):,}"
            warn(f"{missing} recorded validation images no longer exist", config.path)
        return held, f"validation: the {pluralize(len(held), 'image')} that the run held out"
    if config.val_fraction == 0 or (record is not None and record.get("kind") == "none"):
        return np.empty(0, np.int64), "validation: none"
    held = stratified(train, config.val_fraction, config.split_seed)
    singletons = [train.classes[i].name for i in np.flatnonzero(train.counts() == 1)]
    if singletons:
        verb = "has" if len(singletons) == 1 else "each have"
        who = f"{quote_list(singletons)} {verb}" if len(train.classes) > 1 else "there is"
        what = f"{who} only one image, which is used for training, not validation"
        warn(what, config.path)
    if not len(held):
        return held, "validation: none, because no class has two images"
    return held, _held_out_note(train, len(held), config.val_fraction)


def _held_out_note(train: Source, held_out: int, fraction: float) -> str:
    share = f"{100 * fraction:g}%{' of each class' if len(train.classes) > 1 else ''}"
    if any(count > 1 and round(fraction * count) < 1 for count in train.counts()):
        share += ", at least one per class"
    return f"validation: {held_out:,} of {len(train):,} images held out ({share})"


def stratified(source: Source, fraction: float, seed: int) -> Ints:
    """Sorted indices of a stratified sample: `fraction` of each class, at least one image if the
    class has two, never all. Depends only on the seed, the class index and the order of images."""
    order = np.argsort(source.labels, kind="stable")
    chosen = [np.empty(0, np.int64)]
    for index, members in enumerate(np.split(order, np.cumsum(source.counts())[:-1])):
        if len(members) > 1:
            count = min(max(1, round(fraction * len(members))), len(members) - 1)
            chosen.append(np.random.default_rng((seed, index)).permutation(members)[:count])
    return np.sort(np.concatenate(chosen))
