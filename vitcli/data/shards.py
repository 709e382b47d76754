"""WebDataset tar shards, with random access by an index of offsets that is built once.

Compressed shards have no random access; they are decompressed once into the cache directory and
read from it.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitcli.atomic import atomic_write
from vitcli.data.cache import cache_directory, copy_limited, read_arrays, save_arrays
from vitcli.data.classes import Classes, RawSplit, label_dataset, quote_list
from vitcli.data.files import find_files, max_unpacked_size, read_range
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

REPORTED_BYTES = 1 << 28
"""Size of shards without an index from which indexing, a pass over them, is reported."""


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

    keys: Names
    labels: list[str]
    ranges: Ints  # (N, 2) offset and size of each image


def open_shards(path: Path, class_list: Classes | None, report: Callable[[str], None]) -> Dataset:
    """Open a directory of shards, a pattern (train-{00000..00009}.tar), or one shard; for their
    splits, see `group_by_split`. `report` is called with a message before shards are unpacked."""
    root = path if path.is_dir() else path.parent if path.is_file() else None
    return index_shards(group_by_split(_find_shards(path), root), path, class_list, report)


def index_shards(
    groups: Mapping[str, Sequence[Path]],
    where: object,
    class_list: Classes | None,
    report: Callable[[str], None],
) -> Dataset:
    """Index the shards of each split, and open them as a dataset."""
    shards = {path: _Shard(path) for group in groups.values() for path in group}
    _remove_outdated(shards.values())
    if compressed := [shard for shard in shards.values() if not shard.tar.is_file()]:
        description = f"{pluralize(len(compressed), 'compressed shard')} ({_megabytes(compressed)})"
        report(f"unpacking {description} into {cache_directory('shards')}")
    new = [s for s in shards.values() if s.tar.is_file() and not s.index_file.is_file()]
    if sum(shard.size for shard in new) >= REPORTED_BYTES:
        report(f"indexing {pluralize(len(new), 'shard')} ({_megabytes(new)})")
    raw: dict[str, RawSplit] = {}
    for split, group in groups.items():
        indexes = [shards[path].index() for path in group]
        reader = ShardReader(
            tuple(shards[path].tar for path in group),
            np.repeat(np.arange(len(group), dtype=np.int32), [len(i.keys) for i in indexes]),
            *np.concatenate([index.ranges for index in indexes]).T.copy(),
        )
        root = group[0].parent
        if any(path.parent != root for path in group):
            root = Path(os.path.commonpath([path.absolute() for path in group]))
        places = [Path(os.path.relpath(path, root)).as_posix() for path in group]
        placed = zip(places, indexes, strict=True)
        names = Names.pack(f"{place}/{key}" for place, index in placed for key in index.keys)
        labels = [label for index in indexes for label in index.labels]
        raw[split] = RawSplit(labels, names, root, reader)
    return label_dataset(raw, class_list, where)


def _megabytes(shards: Iterable["_Shard"]) -> str:
    return f"{sum(shard.size for shard in shards) / 1e6:,.0f} MB"


def _remove_outdated(shards: Iterable["_Shard"]) -> None:
    """Remove from the cache directory, in one pass, what belongs to earlier states of shards."""
    stems = {shard.path_hash: shard.index_file.stem for shard in shards}
    with contextlib.suppress(OSError):
        for file in cache_directory("shards").iterdir():
            if stems.get(file.name.partition("-")[0], file.stem) != file.stem:
                file.unlink(missing_ok=True)


def _find_shards(path: Path) -> list[Path]:
    if path.is_dir():
        return [*find_files(path, is_tar)]
    if path.is_file():
        return [path]
    shards = [Path(file) for file in import_webdataset().shardlists.expand_urls(path.as_posix())]
    if missing := [shard.name for shard in shards if not os.path.isfile(shard)]:
        raise DataError(
            f"the pattern names shards that do not exist: {quote_list(missing)}", where=path
        )
    return shards


class _Shard:
    """A shard, with its unpacked copy and its index in the cache directory. Their names are hashes
    of the shard's path, size and modification time, so a changed shard is read again."""

    def __init__(self, path: Path) -> None:
        with wrap_os_errors(DataError, "cannot be read", path), path.open("rb") as file:
            status = path.stat()
            self.opener = find_opener(file.read(6))
        path_hash = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:20]
        state = hashlib.sha256(f"v5 {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
        self.path, self.path_hash, self.size = path, path_hash, status.st_size
        self.index_file = cache_directory("shards") / f"{path_hash}-{state[:12]}.npz"
        self.tar = self.index_file.with_suffix(".tar") if self.opener else path

    def index(self) -> ShardIndex:
        """Return the index from the cache directory, or build it in one pass over the shard."""
        if self.tar.is_file() and (arrays := read_arrays(self.index_file)):
            text, ends, labels, ranges = arrays
            return ShardIndex(Names(text, ends), labels.tolist(), ranges)
        if not self.tar.is_file():
            self._unpack()
        index = self._build_index()
        save_arrays(self.index_file, *index.keys.arrays(), index.labels, index.ranges)
        return index

    def _unpack(self) -> None:
        assert self.opener is not None
        try:
            limit = max_unpacked_size(self.size)
            self.tar.parent.mkdir(parents=True, exist_ok=True)
            with self.opener(self.path, "rb") as source, atomic_write(self.tar) as target:
                copy_limited(source, target, limit, self.path)
        except (*DAMAGE, OutputError) as error:
            cause = error.__cause__ if isinstance(error, OutputError) else error
            if not isinstance(cause, OSError) or cause.errno is None:  # raised by gzip or bz2
                raise damaged_error(self.path) from error
            raise OutputError(
                f"cannot unpack a compressed shard here: {cause.strerror}",
                where=self.tar.parent,
                hint="set VIT_CACHE to a directory with more space, or use plain .tar shards",
            ) from error

    def _build_index(self) -> ShardIndex:
        keys, labels, ranges = list[str](), list[str](), list[tuple[int, int]]()
        incomplete = 0
        with wrap_os_errors(DataError, "cannot be read", self.path), self.tar.open("rb") as tar:
            for key, image, label in read_samples(tar, self.path, self.tar.stat().st_size):
                if image is not None and label is not None:
                    keys.append(key)
                    labels.append(label)
                    ranges.append(image)
                else:
                    incomplete += 1
        if incomplete:
            what = f"{incomplete:,} of its samples have no image or no label"
            raise DataError(what, where=self.path, hint=HINT)
        if not keys:
            raise DataError("no labeled images", where=self.path, hint=HINT)
        return ShardIndex(Names.pack(keys), labels, np.array(ranges, np.int64))
