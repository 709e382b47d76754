"""Hub datasets stored as parquet files: the training split is streamed; `datasets` downloads the
other splits once, into its cache."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from vitcli.config import HUB
from vitcli.data.classes import CLASSES_HINT, Classes, match_classes, quote_list
from vitcli.data.parquet import class_names, columns, import_datasets, label_tables
from vitcli.data.remote import FIRST_TIMEOUT
from vitcli.data.source import Dataset, Names, split_of
from vitcli.data.stream import Sample, Stream, StreamOptions
from vitcli.errors import DataError
from vitcli.retry import Failure, is_temporary, retry, retry_after

_MAX_CONCURRENT = 16
"""Concurrent requests for parquet footers."""
_BATCH_ROWS = 32
"""Rows per decoded batch."""


@dataclass(frozen=True)
class HubShard:
    """A parquet file of a Hub dataset."""

    name: str
    image: str
    label: str
    table: tuple[int, ...] = ()
    """The index of each dataset class in the given list of classes; empty if none was given."""

    def samples(self, start: int) -> Iterator[Sample]:
        """Yield the rows from index `start` on; resume after temporary failures."""
        number, rows = start, self._rows(start)

        def read(silence: float) -> Any:
            nonlocal rows
            try:
                return next(rows, None)
            except Exception:
                rows = self._rows(number)
                raise

        while (row := retry(read, lambda error: classify_error(error, self.name))) is not None:
            value, label = row[self.image], row[self.label]
            key = f"{self.name.rpartition('/')[2]} row {number}"
            if self.table and isinstance(label, int) and label >= 0:
                if label >= len(self.table):
                    what = f"label {label} is out of range: the classes are 0 to"
                    raise DataError(f"{what} {len(self.table) - 1}", where=key)
                label = self.table[label]
            image = value.get("bytes") if isinstance(value, dict) else value
            image = image if isinstance(image, bytes) else None  # never a path on this machine
            yield Sample(key, image, None if label == -1 else label)
            number += 1

    def _rows(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield the rows from index `start` on, without reading earlier row groups."""
        with _open(self.name) as content:
            # With a buffer, columns are read in pieces rather than a whole row group at a time.
            file = _parquet().ParquetFile(content, buffer_size=1 << 20)
            groups = range(file.num_row_groups)
            ends = np.cumsum([file.metadata.row_group(i).num_rows for i in groups])
            first = int(np.searchsorted(ends, start, side="right"))
            before = int(ends[first - 1]) if first else 0
            batches = file.iter_batches(_BATCH_ROWS, [*groups[first:]], [self.image, self.label])
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from itertools.islice(rows, start - before, None)


def _parquet() -> Any:
    return importlib.import_module("pyarrow.parquet")


def _open(file: str, **options: Any) -> Any:
    return importlib.import_module("huggingface_hub").HfFileSystem().open(file, **options)


def classify_error(error: Exception, where: str) -> Failure:
    """The Failure for an exception of `datasets` or of its HTTP client."""
    cause = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(cause, Exception):
        error = cause  # wrapped by a client that `hub/retry.py` created
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        what = "no such file or directory here, and no such dataset on the Hub"
        hint = "check the name; for a private dataset, log in with `hf auth login`"
        return Failure(DataError(what, where=where, hint=hint), False)
    if "RevisionNotFoundError" in kinds:
        return Failure(DataError("the dataset has no such revision", where=where), False)
    names = re.findall(r"'([^']+)'", str(error).partition("]")[0])
    if names and str(error).startswith("Config name is missing"):
        what = f"the dataset has several configurations: {quote_list(names, 20)}"
        hint = f"add one of them to the path, for instance {where}/{names[0]}"
        return Failure(DataError(what, where=where, hint=hint), False)
    response = getattr(error, "response", None)
    if response is not None:
        passes, wait = is_temporary(response.status_code), retry_after(response.headers)
    else:
        passes, wait = bool(kinds & {"ConnectionError", "TransportError", "TimeoutError"}), 0.0
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    meaning = DataError(f"cannot be read: {reason}", where=where)
    if kinds & {"ConnectionError", "ConnectError"}:  # the Hub is unreachable, or offline mode is on
        what = "no such file or directory here, and the Hub cannot be reached"
        hint = "check the path, or the network and HF_ENDPOINT"
        meaning = DataError(what, where=where, hint=hint)
    return Failure(meaning, passes and "OfflineModeIsEnabled" not in kinds, wait)


def open_hub(
    path: str, known: Classes | None, streaming: StreamOptions, report: Callable[[str], None]
) -> Dataset:
    """Open hf://datasets/ORG/NAME[@REVISION][/CONFIGURATION].

    Raises:
        DataError: the dataset does not exist, is not stored as parquet, or has no labeled images.
    """
    datasets = import_datasets()
    owner, _, rest = path.removeprefix(HUB).partition("/")
    name, _, configuration = rest.partition("/")
    name, _, revision = name.partition("@")
    repo = f"{owner}/{name}"

    def request(call: Callable[[float], Any], timeout: float | None = None) -> Any:
        return retry(call, lambda error: classify_error(error, path), timeout=timeout)

    # First, a request that the client does not retry: `datasets` only gives up after a minute.
    hub: Any = importlib.import_module("huggingface_hub").HfApi()
    found = request(
        lambda silence: hub.dataset_info(repo, revision=revision or None, timeout=silence),
        timeout=FIRST_TIMEOUT,
    )
    builder = request(
        lambda silence: datasets.load_dataset_builder(
            repo, configuration or None, revision=found.sha
        )
    )
    groups = builder.config.data_files or {}
    files = {str(split): [*map(str, group)] for split, group in groups.items()}
    hint = f"download it with `hf download --repo-type dataset {repo}`"
    if not files or not all(f.endswith(".parquet") for group in files.values() for f in group):
        raise DataError("the dataset is not stored as parquet files", where=path, hint=hint)
    by_split = {s: group for word, group in files.items() if (s := split_of(word))}
    if not by_split:
        what = f"no split is called train, validation or test, only {quote_list(files)}"
        raise DataError(what, where=path, hint=hint)
    train, features = by_split.pop("train", None), builder.info.features
    others = Dataset()
    if by_split:
        report(f"downloading {' and '.join(by_split)} of {repo}, if not cached")
        tables = {
            split: request(partial(_download, group, features)) for split, group in by_split.items()
        }
        names = {s: Names.pack(f"{s} row {i}" for i in range(len(t))) for s, t in tables.items()}
        others = label_tables(tables, names, path, known, path)
    if train is None:
        return others
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        footers = [*pool.map(_footer, train)]
    features = features or datasets.Features.from_arrow_schema(footers[0].schema.to_arrow_schema())
    image, label = columns(features, path)
    named = class_names(features[label])
    classes = known or named
    if not classes:
        raise DataError("the classes are not known", where=path, hint=CLASSES_HINT)
    table = ()
    if named and known:
        table = tuple(match_classes(named, known, path, "the list of classes").tolist())
    shards = tuple(HubShard(file, image, label, table) for file in train)
    sizes = np.array([footer.num_rows for footer in footers], np.int64)
    stream = Stream(classes, shards, sizes, streaming.lanes_of(len(shards)), path)
    return Dataset(stream, others.val, others.test, others.warnings)


def _download(files: list[str], features: Any, silence: float) -> Any:
    """Load files with `datasets`, which caches them."""
    options = {"data_files": files, "features": features, "split": "train"}
    return import_datasets().load_dataset("parquet", **options)


def _footer(file: str) -> Any:
    """Read the metadata of a parquet file: a `pyarrow.parquet.FileMetaData`."""

    def read(silence: float) -> Any:
        with _open(file, block_size=1 << 16) as content:
            return _parquet().read_metadata(content)

    return retry(read, lambda error: classify_error(error, file))
