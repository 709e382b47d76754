"""WebDataset tar shards: an index of offsets once, then any image by one read in place.

Compressed shards allow no access in the middle; they are unpacked once into the cache directory and
read there.
"""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitcli.atomic import whole_file
from vitcli.data.classes import Classes, RawSplit, as_numbers, label_dataset, listed
from vitcli.data.listing import cache_directory
from vitcli.data.source import Dataset, Ints, Names, group_by_split
from vitcli.data.tar import (
    HINT,
    LONGEST,
    OPENERS,
    damaged,
    image_of,
    label_of,
    members,
    samples,
    webdataset,
)
from vitcli.errors import DataError, ImageError, OutputError

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class ShardReader:
    """Images inside tar files, each read in place."""

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int32]  # (N,) index into files
    offset: Ints  # (N,) where the image starts
    size: Ints  # (N,) its bytes

    def read(self, row: int) -> bytes:
        # Opened for each read (10 us): nothing to share between threads or to inherit by
        # processes, and thousands of shards do not use up the file descriptors.
        path = self.files[self.shard[row]]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(int(self.offset[row]))
                data: bytes = file.read(int(self.size[row]))
        except OSError as error:
            raise ImageError(f"cannot be read: {error.strerror}", where=path) from error
        if len(data) != self.size[row]:
            raise ImageError("the shard became shorter after it was opened", where=path)
        return data


class ShardIndex(NamedTuple):
    """The samples of one shard."""

    tar: Path  # the shard itself, or its unpacked copy
    keys: Names
    labels: list[str]
    places: Ints  # (N, 2) offset and size of each image


def is_shard(name: str) -> bool:
    """Whether a file is named like a tar shard."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def open_shards(
    path: Path, known: Classes | None, report: Callable[[str], None] = lambda text: None
) -> Dataset:
    """The splits of a directory of shards, of a pattern (train-{00000..00009}.tar), or of a shard;
    see `group_by_split`. `report` is called with a line before shards are unpacked."""
    return index_shards(group_by_split(_find_shards(path), path), path, known, report)


def index_shards(
    groups: Mapping[str, Sequence[Path]],
    where: object,
    known: Classes | None,
    report: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """The splits whose shards are given."""
    shards = [shard for group in groups.values() for shard in group]
    if packed := [shard for shard in shards if not _tar(shard)[0].is_file()]:
        size = sum(shard.stat().st_size for shard in packed) / 1e6
        place = cache_directory("shards")
        words = f"{len(packed):,} compressed shard{'s' * (len(packed) != 1)}"
        report(f"unpacking {words} ({size:,.0f} MB) into {place}")
    raw: dict[str, RawSplit] = {}
    for split, group in groups.items():
        indexes = [index_shard(shard) for shard in group]
        reader = ShardReader(
            tuple(index.tar for index in indexes),
            np.repeat(np.arange(len(group), dtype=np.int32), [len(i.keys) for i in indexes]),
            *np.concatenate([index.places for index in indexes]).T.copy(),
        )
        names = Names.pack(
            f"{shard.name}/{key}"
            for shard, index in zip(group, indexes, strict=True)
            for key in index.keys
        )
        labels = as_numbers([label for index in indexes for label in index.labels])
        raw[split] = RawSplit(labels, names, reader, group[0].parent)
    return label_dataset(raw, known, where)


def _find_shards(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*.t*") if is_shard(file.name))
    if path.is_file():
        return [path]
    shards = [Path(file) for file in webdataset().shardlists.expand_urls(str(path))]
    if missing := [shard.name for shard in shards if not os.path.isfile(shard)]:
        raise DataError(
            f"the pattern names shards that do not exist: {listed(missing)}", where=path
        )
    return shards


# ---------------------------------------------------------------------------------------------
# The index of a shard, kept in the cache directory


def _tar(shard: Path) -> tuple[Path, Path, Callable[..., Any] | None]:
    """(the tar to read: the shard or its unpacked copy, its index, what unpacks it). The names of
    copy and index hold the shard's path, size and time of change: a changed one is read again."""
    try:
        status = shard.stat()
        with shard.open("rb") as content:
            head = content.read(6)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=shard) from error
    place = hashlib.sha256(os.fsencode(shard.resolve())).hexdigest()[:20]
    state = hashlib.sha256(f"v2 {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    stem = cache_directory("shards") / f"{place}-{state}"
    opener = next((opener for magic, opener in OPENERS.items() if head.startswith(magic)), None)
    return stem.with_suffix(".tar") if opener else shard, stem.with_suffix(".npz"), opener


def index_shard(shard: Path) -> ShardIndex:
    """The samples of a shard, from the cache directory or by one pass over it."""
    tar, kept, opener = _tar(shard)
    # A missing or damaged index is made again.
    with contextlib.suppress(Exception), np.load(kept, allow_pickle=False) as arrays:
        if tar.is_file():
            keys = Names(arrays["text"], arrays["ends"])
            return ShardIndex(tar, keys, arrays["labels"].tolist(), arrays["places"])
    if opener and not tar.is_file():
        _unpack(shard, opener, tar)
    index = _read_index(shard, tar)
    text, ends = index.keys.arrays()
    # Without a cache, the next run reads the headers again.
    with contextlib.suppress(OSError, OutputError):
        _clean(kept)
        with whole_file(kept) as target:
            np.savez(target, text=text, ends=ends, labels=index.labels, places=index.places)
    return index


def _clean(kept: Path) -> None:
    """Makes the cache directory, and removes what it keeps of an older state of the shard."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    for file in kept.parent.glob(f"{kept.stem.partition('-')[0]}-*"):
        if file.stem != kept.stem:
            file.unlink(missing_ok=True)


def _unpack(shard: Path, opener: Callable[..., Any], tar: Path) -> None:
    try:
        _clean(tar)
        with opener(shard, "rb") as packed, whole_file(tar) as target:
            shutil.copyfileobj(packed, target, 1 << 20)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, OutputError) as error:
        cause = error.__cause__ if isinstance(error, OutputError) else error
        if not isinstance(cause, OSError) or cause.errno is None:  # what gzip and bz2 raise
            raise damaged(shard) from error
        raise OutputError(
            f"cannot unpack a compressed shard here: {cause.strerror}",
            where=tar.parent,
            hint="set VIT_CACHE to a directory with more space, or use plain .tar shards",
        ) from error


def _read_index(shard: Path, file: Path) -> ShardIndex:
    """One pass over the headers of a tar; members are grouped into samples by webdataset."""
    keys: list[str] = []
    labels: list[str] = []
    places: list[tuple[int, int]] = []
    halves = 0  # images without a label, labels without an image
    try:
        with file.open("rb") as headers, file.open("rb") as content:

            def read(place: tuple[int, int]) -> bytes:
                content.seek(place[0])
                return content.read(min(place[1], LONGEST))

            files = members(headers, shard, os.path.getsize(file))
            for sample in samples(files, shard):
                image, label = image_of(sample), label_of(sample, read)
                if image is None or label is None:
                    halves += image is not None or label is not None
                    continue
                labels.append(label)
                places.append(image)
                keys.append(sample["__key__"])
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=shard) from error
    if halves:
        what = f"{halves:,} of its samples have no image or no label"
        raise DataError(what, where=shard, hint=HINT)
    if not keys:
        raise DataError("no labelled images", where=shard, hint=HINT)
    return ShardIndex(file, Names.pack(keys), labels, np.array(places, np.int64))
