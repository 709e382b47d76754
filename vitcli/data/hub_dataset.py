"""Hub datasets stored as Parquet files: the training split is streamed; `datasets` downloads the
other splits once, into its cache."""

import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote

import numpy as np

from vitcli.config import HUB
from vitcli.data.classes import CLASSES_HINT, Classes, class_numbers, match_classes, quote_list
from vitcli.data.parquet import class_names, columns, import_datasets, label_tables
from vitcli.data.remote import FIRST_TIMEOUT
from vitcli.data.source import Dataset, Names, split_of
from vitcli.data.stream import Sample, Stream, StreamOptions, unopened
from vitcli.errors import DataError, HubError, warn
from vitcli.hub_requests import call_hub, not_found

_MAX_CONCURRENT = 16
"""Concurrent requests for Parquet footers."""
_BATCH_ROWS = 32
"""Rows per decoded batch."""


@dataclass(frozen=True)
class HubShard:
    """A Parquet file of a Hub dataset."""

    name: str
    image: str
    label: str

    def samples(self, start: int) -> Iterator[Sample]:
        """Yield the rows from index `start` on; resume after temporary failures."""
        index, rows = start, self._read_rows(start)

        def read(read_timeout: float) -> Any:
            nonlocal rows
            try:
                return next(rows, None)
            except Exception:
                rows = self._read_rows(index)
                raise

        while (row := call_hub(self.name, read, has_started=True)) is not None:
            value, label = row[self.image], row[self.label]
            key = f"{self.name.rpartition('/')[2]} row {index}"
            label = None if label in (None, -1) else str(label).strip()
            image = value.get("bytes") if isinstance(value, dict) else value
            image = image if isinstance(image, bytes) else None  # never a path on this machine
            yield Sample(key, image, label)
            index += 1

    def _read_rows(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield the rows from index `start` on, without reading earlier row groups."""
        with _open(self.name) as content:
            # With a buffer, columns are read in pieces rather than a whole row group at a time.
            file = _import_parquet().ParquetFile(content, buffer_size=1 << 20)
            groups = range(file.num_row_groups)
            ends = np.cumsum([file.metadata.row_group(i).num_rows for i in groups])
            first = int(np.searchsorted(ends, start, side="right"))
            skipped_rows = int(ends[first - 1]) if first else 0
            batches = file.iter_batches(_BATCH_ROWS, [*groups[first:]], [self.image, self.label])
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from itertools.islice(rows, start - skipped_rows, None)


def _import_parquet() -> Any:
    return importlib.import_module("pyarrow.parquet")


def _open(path: str, **options: Any) -> Any:
    return importlib.import_module("huggingface_hub").HfFileSystem().open(path, **options)


def open_hub(
    path: str,
    class_list: Classes | None,
    streaming: StreamOptions | None,
    report: Callable[[str], None],
) -> Dataset:
    """Open hf://datasets/ORG/NAME[@REVISION][/CONFIGURATION].

    Raises:
        HubError: the dataset does not exist, or the Hub cannot be reached.
        DataError: it is not stored as Parquet, or has no labeled images.
    """
    datasets = import_datasets()
    pattern = r"([^/@]*/?[^/@]*)(?:@((?:refs/(?:convert|pr)/)?[^/]*))?/?(.*)"
    repo, revision, configuration = re.findall(pattern, path.removeprefix(HUB))[0]
    builder = _load_builder(path, repo, unquote(revision) or None, configuration or None)
    data_files = builder.config.data_files or {}
    files = {str(split): [*map(str, group)] for split, group in data_files.items()}
    hint = f"download it with `hf download --repo-type dataset {repo}`"
    if not files or not all(f.endswith(".parquet") for group in files.values() for f in group):
        raise DataError("the dataset is not stored as Parquet files", where=path, hint=hint)
    by_split = {s: group for word, group in files.items() if (s := split_of(word))}
    if not by_split:
        what = f"no split is called train, validation or test, only {quote_list(files)}"
        raise DataError(what, where=path, hint=hint)
    train, features = by_split.pop("train", None), builder.info.features
    other_splits = Dataset()

    def download(files: list[str]) -> Any:
        options = {"data_files": files, "features": features, "split": "train"}
        return call_hub(
            path, lambda read_timeout: datasets.load_dataset("parquet", **options), has_started=True
        )

    if by_split:
        report(f"downloading {' and '.join(by_split)} of {repo}, if not cached")
        tables = {split: download(group) for split, group in by_split.items()}
        names = {s: Names.pack(f"{s} row {i}" for i in range(len(t))) for s, t in tables.items()}
        other_splits = label_tables(tables, names, path, class_list, path, follow_paths=False)
    if train is None:
        return other_splits
    if streaming is None:
        return replace(other_splits, train=unopened(path))
    with ThreadPoolExecutor(_MAX_CONCURRENT) as pool:
        footers = [*pool.map(_read_footer, train)]
    features = features or datasets.Features.from_arrow_schema(footers[0].schema.to_arrow_schema())
    image, label = columns(features, path)
    data_classes = class_names(features[label])
    classes = class_list or data_classes
    if not classes:
        raise DataError("the classes are not known", where=path, hint=CLASSES_HINT)
    numbers = class_numbers(classes)
    if data_classes:
        indices = match_classes(data_classes, classes, path, "the class list")
        numbers = dict(enumerate(indices.tolist()))
    shards = tuple(HubShard(file, image, label) for file in train)
    sizes = np.array([footer.num_rows for footer in footers], np.int64)
    stream = Stream(classes, shards, sizes, streaming.lanes_of(len(shards)), path, numbers)
    if not by_split and "split" in features:
        what = "all rows are training data: the column 'split' is not used in streams"
        warn(f"{what}; to use it, {hint}", path)
    return replace(other_splits, train=stream)


def _load_builder(path: str, repo: str, revision: str | None, configuration: str | None) -> Any:
    """Request a dataset's files and features: a `datasets.DatasetBuilder`."""
    hub: Any = importlib.import_module("huggingface_hub").HfApi()
    try:
        # First, a request that the client does not retry: `datasets` only gives up after a minute.
        info = call_hub(
            path,
            lambda timeout: hub.dataset_info(repo, revision=revision, timeout=timeout),
            revision=revision,
            timeout=FIRST_TIMEOUT,
        )
    except HubError as error:
        if error.is_temporary or error.reason == "OfflineModeIsEnabled":
            what = f"no such file or directory, and {error.what}"
            raise not_found(path, what, error.hint or "") from error
        raise

    def load(read_timeout: float) -> Any:
        try:
            return import_datasets().load_dataset_builder(repo, configuration, revision=info.sha)
        except ValueError as error:
            listed = re.search(r"(?:configs|Available): \[('.*?)\]", str(error))
            if listed is None:
                raise
            names = re.findall(r"'([^']+)'", listed[1])
            what = f"the dataset has several configurations: {quote_list(names, 20)}"
            if configuration:
                what = f"no configuration '{configuration}', only {quote_list(names, 20)}"
            dataset = path.removesuffix(f"/{configuration or ''}")
            hint = f"add one of them to the path, such as {dataset}/{names[0]}"
            raise DataError(what, where=path, hint=hint) from error

    return call_hub(path, load, has_started=True)


def _read_footer(file: str) -> Any:
    """Read the metadata of a parquet file: a `pyarrow.parquet.FileMetaData`."""

    def read(read_timeout: float) -> Any:
        with _open(file, block_size=1 << 16) as content:
            return _import_parquet().read_metadata(content)

    return call_hub(file, read, has_started=True)
