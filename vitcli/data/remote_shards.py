"""WebDataset tar shards at URLs: the training split is streamed; the other splits are downloaded
once, into the cache directory.

Next to the shards, there may be a sizes.json, {"train-0000.tar": number of samples}, and a
classes.txt.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitcli.data.classes import CLASSES_HINT, Classes, class_numbers, quote_list, read_classes
from vitcli.data.files import is_url, url_path
from vitcli.data.remote import FIRST_TIMEOUT, NotFoundError, download
from vitcli.data.shards import index_shards
from vitcli.data.source import Dataset, Ints, last_split
from vitcli.data.stream import Sample, Stream, StreamOptions, unopened
from vitcli.data.tar import import_webdataset, open_tar, read_samples
from vitcli.errors import DataError, warn
from vitcli.typed_json import parse
from vitcli.words import pluralize, public_url

_MAX_TEXT_BYTES = 1 << 26
"""Maximum size of a sizes.json or a classes.txt."""


@dataclass(frozen=True)
class TarShard:
    """A tar shard at a URL, compressed or not."""

    name: str
    timeout: float | None = None

    def samples(self, start: int) -> Iterator[Sample]:
        """Yield the samples from index `start` on; files that belong to no sample are skipped."""
        shard_name = _split_url(self.name)[1]
        with open_tar(self.name, self.timeout) as (tar, _):
            samples = read_samples(tar, self.name, start=start)
            for key, image, label in itertools.islice(samples, start, None):
                yield Sample(f"{shard_name}/{key}", image, label)


def open_remote_shards(
    path: str,
    class_list: Classes | None,
    streaming: StreamOptions | None,
    report: Callable[[str], None],
) -> Dataset:
    """Open shards at URLs (https://host/train-{0000..1023}.tar; :: separates several). The last
    split word in the name of a shard or of its directory determines its split.

    Raises:
        DataError: a server does not respond, the first shard is not a tar file, or the number of
            samples or the classes are unknown.
    """
    groups = dict[str, list[str]]()
    for url in import_webdataset().shardlists.expand_urls(path):
        if not is_url(url):
            hint = "download the shards, or pass only http(s) URLs, which may be signed"
            what = f"'{public_url(url)}' is not an http(s) URL"
            raise DataError(what, where=path, hint=hint)
        path_parts = url_path(url).split("/")
        groups.setdefault(last_split("/".join(path_parts[-2:])), []).append(url)
    urls = groups.pop("train", [])
    first = (urls or next(iter(groups.values())))[0]
    if class_list is None and (class_file := _sibling_file(first, "classes.txt")):
        class_list = read_classes(class_file)
    other_splits = Dataset()
    if groups:
        count, split_names = sum(map(len, groups.values())), " and ".join(groups)
        report(f"{split_names}: {pluralize(count, 'shard')}, downloaded if not in the cache")
        local = {split: [*map(download, group)] for split, group in groups.items()}
        other_splits = index_shards(local, path, class_list, report)
    if not urls:
        return other_splits
    if streaming is None:
        return replace(other_splits, train=unopened(path))
    # Before checking classes: a server that denies all access also has no readable classes.txt.
    sample = next(TarShard(urls[0], timeout=FIRST_TIMEOUT).samples(0), None)
    if sample is None:
        raise DataError("the shard has no samples", where=urls[0])
    if not class_list:
        raise DataError("the classes are not known", where=urls[0], hint=CLASSES_HINT)
    sizes, exact = _shard_sizes(urls, path, streaming.images)
    shards = tuple(TarShard(url) for url in urls)
    lanes, numbers = streaming.lanes_of(len(shards)), class_numbers(class_list)
    stream = Stream(class_list, shards, sizes, lanes, path, numbers, exact)
    if not len(stream):
        raise DataError("there are no images to train on", where=path)
    stream.label(sample)
    if not exact:
        what = "shard sizes are not known and assumed to be equal"
        warn(f"{what}; a sizes.json next to the shards makes epochs exact", path)
    return replace(other_splits, train=stream)


def _shard_sizes(urls: list[str], path: str, images: int | None) -> tuple[Ints, bool]:
    """int64 (S,): number of samples of each shard, and whether they are known; if not, `images` are
    divided evenly among the shards."""
    url_parts = [_split_url(url) for url in urls]
    any_shard = {parent: url for url, (parent, _, _) in zip(urls, url_parts, strict=True)}
    size_tables = {parent: _read_sizes(url) for parent, url in any_shard.items()}
    sizes = [size_tables[parent].get(name) for parent, name, _ in url_parts]
    missing = [url for url, size in zip(urls, sizes, strict=True) if not isinstance(size, int)]
    if not missing:
        return np.array(sizes, np.int64).clip(0), True
    if any(size_tables.values()):
        names = quote_list(_split_url(url)[1] for url in missing)
        raise DataError(f"the sizes.json next to the shards does not list {names}", where=path)
    if images:
        each, remainder = divmod(images, len(urls))
        return each + (np.arange(len(urls)) < remainder), False
    raise DataError(
        "the number of training images is not known",
        where=path,
        hint=f'put a sizes.json next to the shards, {{"{url_parts[0][1]}": 1000, ...}}, or pass '
        "--train-images N",
    )


def _read_sizes(url: str) -> dict[str, Any]:
    """Read the sizes.json next to a shard; empty if there is none."""
    if (file := _sibling_file(url, "sizes.json")) is None:
        return {}
    try:
        table = parse(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise DataError("sizes.json is not valid JSON", where=_split_url(url)[0]) from error
    return table if isinstance(table, dict) else {}


def _sibling_file(url: str, name: str) -> Path | None:
    """Download a file next to a shard; None if it does not exist."""
    parent, _, query = _split_url(url)
    try:
        return download(f"{parent}/{name}{query}", limit=_MAX_TEXT_BYTES)
    except NotFoundError:
        return None


def _split_url(url: str) -> tuple[str, str, str]:
    """Split a shard's URL into directory, name, and the query string of a signed URL."""
    address, mark, query = url.partition("?")
    parent, _, name = address.rpartition("/")
    return parent, name, mark + query
