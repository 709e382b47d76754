"""WebDataset tar shards, with random access by an index of offsets that is built once.

Compressed shards have no random access; they are decompressed once into the cache directory and
read there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitcli.atomic import atomic_write
from vitcli.data.cache import cache_directory, read_arrays, save_arrays
from vitcli.data.classes import Classes, RawSplit, label_dataset, parse_labels, quote_list
from vitcli.data.files import read_range
from vitcli.data.source import Dataset, Ints, Names, group_by_split
from vitcli.data.tar import (
    DAMAGE,
    HINT,
    damaged_error,
    find_opener,
    import_webdataset,
    is_tar,
    read_samples,
)
from vitcli.errors import DataError, OutputError, wrap_os_errors
from vitcli.words import pluralize


@dataclass(frozen=True)
class ShardReader:
    """Read images in place inside tar files."""

    files: tuple[Path, ...]
    shard: npt.NDArray[np.int32]  # (N,) index into files
    offset: Ints  # (N,) byte offset of the image
    size: Ints  # (N,) size in bytes

    def read(self, row: int) -> bytes:
        file, offset, size = self.files[self.shard[row]], self.offset[row], self.size[row]
        return read_range(file, int(offset), int(size))


class ShardIndex(NamedTuple):
    """The index of the samples in one shard."""

    tar: Path  # the shard itself, or its unpacked copy
    keys: Names
    labels: list[str]
    places: Ints  # (N, 2) offset and size of each image


def open_shards(
    path: Path, known: Classes | None, report: Callable[[str], None] = lambda text: None
) -> Dataset:
    """Open a directory of shards, a pattern (train-{00000..00009}.tar), or one shard; for their
    splits, see `group_by_split`. `report` is called with a message before shards are unpacked."""
    root = path if path.is_dir() else path.parent if path.is_file() else None
    return index_shards(group_by_split(_find_shards(path), root), path, known, report)


def index_shards(
    groups: Mapping[str, Sequence[Path]],
    where: object,
    known: Classes | None,
    report: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """Index the shards of each split, and open them as a dataset."""
    shards = [_Shard(path) for group in groups.values() for path in group]
    if packed := [shard for shard in shards if not shard.tar.is_file()]:
        size = sum(shard.path.stat().st_size for shard in packed) / 1e6
        words = pluralize(len(packed), "compressed shard")
        report(f"unpacking {words} ({size:,.0f} MB) into {cache_directory('shards')}")
    indexes = {shard.path: shard.index() for shard in shards}
    labels = parse_labels(
        {
            split: [label for path in group for label in indexes[path].labels]
            for split, group in groups.items()
        }
    )
    raw: dict[str, RawSplit] = {}
    for split, group in groups.items():
        mine = [indexes[path] for path in group]
        reader = ShardReader(
            tuple(index.tar for index in mine),
            np.repeat(np.arange(len(group), dtype=np.int32), [len(index.keys) for index in mine]),
            *np.concatenate([index.places for index in mine]).T.copy(),
        )
        names = Names.pack(f"{path.name}/{key}" for path in group for key in indexes[path].keys)
        raw[split] = RawSplit(labels[split], names, reader, group[0].parent)
    return label_dataset(raw, known, where)


def _find_shards(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if is_tar(file.name))
    if path.is_file():
        return [path]
    shards = [Path(file) for file in import_webdataset().shardlists.expand_urls(str(path))]
    if missing := [shard.name for shard in shards if not os.path.isfile(shard)]:
        raise DataError(
            f"the pattern names shards that do not exist: {quote_list(missing)}", where=path
        )
    return shards


class _Shard:
    """A shard, with its unpacked copy and its index in the cache directory. Their names are hashes
    of the shard's path, size and modification time, so a changed shard is read again."""

    def __init__(self, path: Path) -> None:
        with wrap_os_errors(DataError, "cannot be read", path), path.open("rb") as content:
            status = path.stat()
            self.opener = find_opener(content.read(6))
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:20]
        state = hashlib.sha256(f"v4 {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
        self.path, self.place = path, place
        self.kept = cache_directory("shards") / f"{place}-{state[:12]}.npz"
        self.tar = self.kept.with_suffix(".tar") if self.opener else path

    def index(self) -> ShardIndex:
        """Return the index from the cache directory, or build it in one pass over the shard."""
        if self.tar.is_file() and (kept := read_arrays(self.kept, 4)):
            text, ends, labels, places = kept
            return ShardIndex(self.tar, Names(text, ends), labels.tolist(), places)
        with contextlib.suppress(OSError):
            for old in self.kept.parent.glob(f"{self.place}-*"):
                if old.stem != self.kept.stem:
                    old.unlink(missing_ok=True)
        if not self.tar.is_file():
            self._unpack()
        index = self._read()
        save_arrays(self.kept, *index.keys.arrays(), index.labels, index.places)
        return index

    def _unpack(self) -> None:
        assert self.opener is not None
        try:
            self.tar.parent.mkdir(parents=True, exist_ok=True)
            with self.opener(self.path, "rb") as packed, atomic_write(self.tar) as target:
                shutil.copyfileobj(packed, target, 1 << 20)
        except (*DAMAGE, OutputError) as error:
            cause = error.__cause__ if isinstance(error, OutputError) else error
            if not isinstance(cause, OSError) or cause.errno is None:  # raised by gzip or bz2
                raise damaged_error(self.path) from error
            raise OutputError(
                f"cannot unpack a compressed shard here: {cause.strerror}",
                where=self.tar.parent,
                hint="set VIT_CACHE to a directory with more space, or use plain .tar shards",
            ) from error

    def _read(self) -> ShardIndex:
        keys, labels, places = list[str](), list[str](), list[tuple[int, int]]()
        halves = 0  # images without a label, labels without an image
        with wrap_os_errors(DataError, "cannot be read", self.path), self.tar.open("rb") as tar:
            for key, image, label in read_samples(tar, self.path, self.tar.stat().st_size):
                if image is not None and label is not None:
                    keys.append(key)
                    labels.append(label)
                    places.append(image)
                elif image is not None or label is not None:
                    halves += 1
        if halves:
            what = f"{halves:,} of its samples have no image or no label"
            raise DataError(what, where=self.path, hint=HINT)
        if not keys:
            raise DataError("no labeled images", where=self.path, hint=HINT)
        return ShardIndex(self.tar, Names.pack(keys), labels, np.array(places, np.int64))
