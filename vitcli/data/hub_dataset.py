"""Hub datasets stored as parquet files: `datasets` streams the training split, and downloads the
other splits once, into its cache."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitcli.config import HUB
from vitcli.data.classes import NAME_THEM, Classes
from vitcli.data.parquet import class_names, columns, label_tables, library
from vitcli.data.remote import AT_OPENING
from vitcli.data.source import Dataset, Names, split_of
from vitcli.data.stream import Sample, Stream, Streaming
from vitcli.errors import DataError
from vitcli.retry import Failure, persist

_AT_ONCE = 16
"""Footers that are requested at the same time."""


@dataclass(frozen=True)
class HubShard:
    """A parquet file of a dataset."""

    name: str
    rows: Any
    """`datasets.IterableDataset` of all files."""
    index: int
    image: str
    label: str
    classes: Classes = ()
    """The classes that the labels index, if the run uses others."""

    def samples(self, start: int) -> Iterator[Sample]:
        """The rows from number `start` on; continues after temporary failures."""
        rows: Iterator[Any] | None = None
        number, name = start, self.name.rpartition("/")[2]

        def read(silence: float) -> Any:
            nonlocal rows
            try:
                if rows is None:
                    shard = self.rows.shard(self.rows.num_shards, self.index).skip(number)
                    # Not as an iterator, which gives each worker process of torch other rows.
                    rows = shard.iter(batch_size=1)
                return next(rows, None)
            except BaseException:
                rows = None
                raise

        while (row := persist(read, lambda error: explain(error, self.name))) is not None:
            value, label = row[self.image][0], row[self.label][0]
            if self.classes and label is not None and label >= 0:
                label = self.classes[label].id
            image = value.get("bytes") if isinstance(value, dict) else value
            yield Sample(f"{name} row {number}", image, None if label == -1 else label)
            number += 1


def explain(error: Exception, where: str) -> Failure:
    """What an exception of `datasets` and of the client below it means."""
    if type(error).__name__ == "DatasetNotFoundError":
        what = "no such file or directory here, and no such dataset on the Hub"
        hint = "check the name; for a private dataset, log in with `hf auth login`"
        return Failure(DataError(what, where=where, hint=hint), False)
    httpx: Any = importlib.import_module("huggingface_hub.utils").httpx
    status = getattr(getattr(error, "response", None), "status_code", 0)
    passes = status in (408, 429) or status >= 500
    if not status:
        passes = isinstance(error, httpx.TransportError | ConnectionError | TimeoutError)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    meaning = DataError(f"cannot be read: {reason}", where=where)
    if isinstance(error, ConnectionError):  # what `datasets` raises if the Hub is unreachable
        what = "no such file or directory here, and the Hub cannot be reached"
        meaning = DataError(
            what, where=where, hint="check the path, or the network and HF_ENDPOINT"
        )
    return Failure(meaning, passes and "Offline" not in reason)


def open_hub(
    path: str, known: Classes | None, streaming: Streaming, report: Callable[[str], None]
) -> Dataset:
    """The splits of hf://datasets/ORG/NAME[@REVISION][/CONFIGURATION].

    Raises:
        DataError: the dataset does not exist, is not stored as parquet, or has no labelled images.
    """
    datasets = library()
    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # `persist` retries
    owner, _, rest = path.removeprefix(HUB).partition("/")
    name, _, configuration = rest.partition("/")
    name, _, revision = name.partition("@")

    def build(silence: float) -> Any:
        return datasets.load_dataset_builder(
            f"{owner}/{name}", configuration or None, revision=revision or None
        )

    builder = persist(build, lambda error: explain(error, path), timeout=AT_OPENING)
    files = {s: [*map(str, group)] for s, group in (builder.config.data_files or {}).items()}
    if not files or not all(f.endswith(".parquet") for group in files.values() for f in group):
        hint = f"download it with `hf download --repo-type dataset {owner}/{name}`"
        raise DataError("the dataset is not stored as parquet files", where=path, hint=hint)
    by_split = {s: group for word, group in files.items() if (s := split_of(word))}
    train, features = by_split.pop("train", None), builder.info.features

    def load(group: list[str], **how: Any) -> Any:
        fields = {"data_files": group, "features": features, "split": "train", **how}
        return persist(
            lambda silence: datasets.load_dataset("parquet", **fields),
            lambda error: explain(error, path),
        )

    others = Dataset()
    if by_split:
        report(f"downloading {' and '.join(by_split)} of {owner}/{name}, if not cached")
        tables = {split: load(group) for split, group in by_split.items()}
        names = {s: Names.pack(f"{s} row {i}" for i in range(len(t))) for s, t in tables.items()}
        others = label_tables(tables, names, path, known)
    if train is None:
        return others
    footers = _footers(train)
    schema = footers[0].schema.to_arrow_schema()
    features = features or datasets.Features.from_arrow_schema(schema)
    image, label = columns(features, path)
    named = class_names(features[label])
    classes = known or named
    if not classes:
        raise DataError("the classes are not known", where=path, hint=NAME_THEM)
    rows = load(train, streaming=True).select_columns([image, label]).decode(False)
    theirs = named if known and named else ()
    shards = tuple(HubShard(file, rows, i, image, label, theirs) for i, file in enumerate(train))
    sizes = np.array([footer.num_rows for footer in footers], np.int64)
    stream = Stream(classes, shards, sizes, streaming.lanes_of(len(shards)), path)
    return Dataset(stream, others.val, others.test, others.warnings)


def _footers(files: Sequence[str]) -> list[Any]:
    """The metadata of each parquet file: `pyarrow.parquet.FileMetaData`."""
    parquet: Any = importlib.import_module("pyarrow.parquet")
    system: Any = importlib.import_module("huggingface_hub").HfFileSystem()

    def footer(file: str) -> Any:
        def read(silence: float) -> Any:
            with system.open(file, block_size=1 << 16) as content:
                return parquet.read_metadata(content)

        return persist(read, lambda error: explain(error, file))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [*pool.map(footer, files)]
