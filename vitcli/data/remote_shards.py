"""WebDataset tar shards by URL: the training split is streamed, the other splits are downloaded
once, into the cache directory.

The directory of the shards may also contain sizes.json, {"train-0000.tar": number of samples}, and
classes.txt.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from vitcli.data.classes import NAME_THEM, Classes, listed, read_classes
from vitcli.data.files import IMAGE_SUFFIXES, MAX_BYTES
from vitcli.data.remote import AT_OPENING, Missing, RemoteFile, download, is_url
from vitcli.data.shards import index_shards
from vitcli.data.source import Dataset, Ints, last_split
from vitcli.data.stream import Sample, Stream, Streaming
from vitcli.data.tar import (
    LONGEST,
    OPENERS,
    damaged,
    image_of,
    label_of,
    members,
    samples,
    webdataset,
)
from vitcli.errors import DataError

_KEPT = {*IMAGE_SUFFIXES, "cls", "json"}
"""Suffixes of the files whose content is kept."""


@dataclass(frozen=True)
class TarShard:
    """A tar shard, at a URL or a path, compressed or not."""

    name: str
    timeout: float | None = None

    def samples(self, start: int) -> Iterator[Sample]:
        """The samples from number `start` on; files that belong to none are skipped."""
        short, number = self.name.rpartition("/")[2], 0
        with self._open() as tar:
            # A sample is complete, and counted, once the first file of the next one is read.
            files = self._with_content(tar, lambda: number >= start - 1)
            for found in samples(files, self.name):
                if (image := image_of(found)) is None and not found.keys() & {"cls", "json"}:
                    continue
                if number >= start:
                    yield Sample(f"{short}/{found['__key__']}", image, label_of(found, bytes))
                number += 1

    @contextlib.contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with contextlib.ExitStack() as stack:
                if is_url(self.name):
                    raw: Any = RemoteFile(self.name, self.timeout)
                else:
                    raw = stack.enter_context(open(self.name, "rb", buffering=0))
                file = stack.enter_context(io.BufferedReader(raw, 1 << 18))
                head = file.peek(6)
                for magic, opener in OPENERS.items():
                    if head.startswith(magic):
                        yield stack.enter_context(opener(file, "rb"))
                        return
                yield file
        except (OSError, EOFError, ValueError) as error:
            raise damaged(self.name) from error

    def _with_content(self, tar: Any, wanted: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        for file in members(tar, self.name):
            size, suffix = file["data"][1], file["fname"].rpartition(".")[2].lower()
            limit = LONGEST if suffix in ("cls", "json") else MAX_BYTES
            content = b""
            if suffix in _KEPT and size <= limit and wanted():
                content = tar.read(size)
                if len(content) < size:
                    raise damaged(self.name)
            yield file | {"data": content}


def open_remote_shards(
    path: str, known: Classes | None, streaming: Streaming, report: Callable[[str], None]
) -> Dataset:
    """The splits of shards by URL (https://host/train-{0000..1023}.tar; :: separates several). The
    last split word in the name of a shard or of its directory decides its split.

    Raises:
        DataError: a server does not respond, the first shard is not a tar file, or the number of
            samples or the classes are not known.
    """
    groups = dict[str, list[str]]()
    for url in webdataset().shardlists.expand_urls(path):
        place = urlsplit(url).path if is_url(url) else url
        groups.setdefault(last_split("/".join(place.split("/")[-2:])), []).append(url)
    urls = groups.pop("train", [])
    known = known or _classes([*urls, *(url for group in groups.values() for url in group)])
    others = Dataset()
    if groups:
        count, words = sum(map(len, groups.values())), " and ".join(groups)
        report(f"{words}: {count:,} shard{'s' * (count != 1)}, downloaded if not in the cache")
        local = {split: [_local(url) for url in group] for split, group in groups.items()}
        others = index_shards(local, path, known, report)
    if not urls:
        return others
    if not known:
        raise DataError("the classes are not known", where=urls[0], hint=NAME_THEM)
    sizes, exact = _sizes(urls, path, streaming.images)
    shards = tuple(TarShard(url) for url in urls)
    stream = Stream(known, shards, sizes, streaming.lanes_of(len(shards)), path, exact)
    if not len(stream):
        raise DataError("there are no images to train on", where=path)
    first = next(TarShard(urls[0], timeout=AT_OPENING).samples(0), None)
    if first is None:
        raise DataError("the shard has no samples", where=urls[0])
    stream.label(first)
    warnings = others.warnings
    if not exact:
        what = "shard sizes are not known and assumed to be equal"
        warnings += (f"{path}: {what}; a sizes.json next to the shards makes epochs exact",)
    return Dataset(stream, others.val, others.test, warnings)


def _local(url: str) -> Path:
    return download(url) if is_url(url) else Path(url)


def _classes(urls: list[str]) -> Classes | None:
    """The classes.txt beside the first shard."""
    with contextlib.suppress(Missing):
        listing = _beside(urls[0], "classes.txt")
        return read_classes(listing) if listing.is_file() else None
    return None


def _sizes(urls: list[str], path: str, images: int | None) -> tuple[Ints, bool]:
    """int64 (S,): samples of each shard, and whether they are known; if not, the images are divided
    evenly among them."""
    tables = {parent: _table(url) for url in urls for parent, _, _ in [_parts(url)]}
    found = [tables[parent].get(name) for parent, name, _ in map(_parts, urls)]
    missing = [url for url, size in zip(urls, found, strict=True) if not isinstance(size, int)]
    if not missing:
        return np.array(found, np.int64).clip(0), True
    if any(tables.values()):
        names = listed(_parts(url)[1] for url in missing)
        raise DataError(f"the sizes.json next to the shards does not list {names}", where=path)
    if images:
        each, more = divmod(images, len(urls))
        return each + (np.arange(len(urls)) < more), False
    raise DataError(
        "the number of training images is not known",
        where=path,
        hint=f'put a sizes.json next to the shards, {{"{_parts(urls[0])[1]}": 1000, ...}}, or pass '
        "--train-images N",
    )


def _table(url: str) -> dict[str, Any]:
    """The sizes.json beside a shard; empty if there is none."""
    try:
        table = json.loads(_beside(url, "sizes.json").read_text("utf-8"))
    except (Missing, FileNotFoundError):
        return {}
    except (ValueError, OSError) as error:
        raise DataError("sizes.json is not valid JSON", where=_parts(url)[0]) from error
    return table if isinstance(table, dict) else {}


def _beside(url: str, name: str) -> Path:
    """A file in the directory of a shard. Raises Missing."""
    parent, _, query = _parts(url)
    if not is_url(url):
        return Path(parent, name)
    return download(f"{parent}/{name}{query}", misses=0)


def _parts(url: str) -> tuple[str, str, str]:
    """The directory of a shard, its name, and the query string of a signed URL."""
    address, mark, query = url.partition("?") if is_url(url) else (url, "", "")
    parent, _, name = address.rpartition("/")
    return parent, name, mark + query
