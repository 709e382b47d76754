"""WebDataset tar shards: an index of offsets once, then any image by one read in place.

A sample is a run of members with one key: `0001.jpg` and `0001.cls`. Compressed shards cannot be
entered in the middle; they are unpacked once into the cache folder and read there.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import importlib
import lzma
import os
import re
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vitcli.atomic import whole_file
from vitcli.config import ClassLabel
from vitcli.data.classes import listed, name_labels, read_classes
from vitcli.data.source import (
    IMAGE_SUFFIXES,
    Dataset,
    Ints,
    Names,
    Source,
    group_by_split,
)
from vitcli.errors import DataError, ImageError, MissingExtraError, OutputError

SHARD_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""First bytes of a compressed file -> what opens it."""

_SAMPLE = "a sample is an image and its label under one name: 0001.jpg and 0001.cls"


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
            raise ImageError("the shard has become shorter since it was opened", where=path)
        return data


@dataclass(frozen=True)
class ShardIndex:
    """The samples of one shard."""

    file: Path  # the tar itself, or the unpacked copy of it
    keys: Names
    labels: npt.NDArray[Any]  # int64 or str (N,)
    offset: Ints
    size: Ints


def open_shards(
    path: Path, classes_file: Path | None, report: Callable[[str], None] = lambda text: None
) -> Dataset:
    """The parts of a shard folder, of a pattern such as train-{00000..00009}.tar, or of one shard.

    Dataset are told by words in the names: train-*, val-*, test-*, or folders of these names.
    Names that say nothing are the training part. `report` is called with a line before shards
    are unpacked, which takes its time, but once only.
    """
    shards = find_shards(path)
    packed = [shard for shard in shards if not _kept(shard).whole and _kept(shard).opener]
    if packed:
        size = sum(shard.stat().st_size for shard in packed) / 1e6
        report(
            f"unpacking {len(packed):,} compressed shards ({size:,.0f} MB) into "
            f"{cache_directory()}, once"
        )
    grouped = group_by_split(shards, path)
    folder = path if path.is_dir() else shards[0].parent
    if classes_file is None and (folder / "classes.txt").is_file():
        classes_file = folder / "classes.txt"
    known = read_classes(classes_file) if classes_file else None
    indexes = {part: [index_shard(shard) for shard in group] for part, group in grouped.items()}
    raw = {part: _join_labels([i.labels for i in group]) for part, group in indexes.items()}
    classes, labels, warnings = name_labels(raw, known, path)
    parts = {
        part: _source(classes, labels[part], grouped[part], group)
        for part, group in indexes.items()
    }
    return Dataset(parts.get("train"), parts.get("val"), parts.get("test"), tuple(warnings))


def find_shards(path: Path) -> list[Path]:
    """The shards of a folder, a brace pattern or a single file, in order of their names."""
    if path.is_dir():
        return sorted(p for p in path.rglob("*.t*") if is_shard(p) and not p.name.startswith("."))
    if "{" in str(path):
        shards = [Path(p) for p in _webdataset().shardlists.expand_urls(str(path))]
        absent = [shard.name for shard in shards if not shard.is_file()]
        if absent:
            raise DataError(
                f"the pattern asks for shards that are not there: {listed(absent)}", where=path
            )
        return shards
    return [path]


def is_shard(path: Path) -> bool:
    """Whether a path is named like a tar shard."""
    return path.name.lower().endswith(SHARD_SUFFIXES)


def _join_labels(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if len({array.dtype.kind for array in arrays}) > 1:
        arrays = [array.astype(np.str_) for array in arrays]
    return np.concatenate(arrays)


def _source(
    classes: tuple[ClassLabel, ...], labels: Ints, shards: list[Path], indexes: list[ShardIndex]
) -> Source:
    reader = ShardReader(
        tuple(index.file for index in indexes),
        np.repeat(np.arange(len(indexes), dtype=np.int32), [len(i.keys) for i in indexes]),
        np.concatenate([index.offset for index in indexes]),
        np.concatenate([index.size for index in indexes]),
    )
    names = Names.pack(
        f"{shard.name}/{key}"
        for shard, index in zip(shards, indexes, strict=True)
        for key in index.keys
    )
    return Source(classes, labels, names, reader, shards[0].parent)


# ---------------------------------------------------------------------------------------------
# The index of one shard, remembered in the cache folder


def cache_directory() -> Path:
    """Where indices and unpacked shards are kept: $VIT_CACHE, else the user's cache folder."""
    if os.environ.get("VIT_CACHE"):
        return Path(os.environ["VIT_CACHE"]) / "shards"
    if os.name == "nt" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "vit" / "shards"
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "vit" / "shards"


@dataclass(frozen=True)
class Kept:
    """Where a shard's index and its unpacked copy are kept. The names hold the shard's path, size
    and time of change: a changed shard is read anew."""

    place: str
    state: str
    file: Path  # the tar to read: the shard itself, or the copy
    index: Path
    opener: Callable[..., Any] | None  # of a compressed shard

    @property
    def whole(self) -> bool:
        """Whether nothing is left to be done."""
        return self.index.is_file() and self.file.is_file()


def _kept(shard: Path) -> Kept:
    try:
        status = shard.stat()
        with shard.open("rb") as content:
            head = content.read(6)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=shard) from error
    place = hashlib.sha256(os.fsencode(shard.resolve())).hexdigest()[:20]
    state = hashlib.sha256(f"v1 {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:12]
    stem = cache_directory() / f"{place}-{state}"
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    file = stem.with_suffix(".tar") if opener else shard
    return Kept(place, state, file, stem.with_suffix(".npz"), opener)


def index_shard(shard: Path) -> ShardIndex:
    """The samples of a shard, from the cache folder or by one pass over it."""
    kept = _kept(shard)
    cache = kept.index.parent
    if kept.whole:
        with np.load(kept.index, allow_pickle=False) as arrays:
            names = Names(arrays["text"], arrays["ends"])
            labels, offset, size = arrays["labels"], arrays["offset"], arrays["size"]
            return ShardIndex(kept.file, names, labels, offset, size)
    if kept.opener and not kept.file.is_file():
        try:
            _clean(cache, kept)
            with whole_file(kept.file) as target:
                _unpack(shard, kept.opener, target)
        except (OSError, OutputError) as error:
            reason = error.what if isinstance(error, OutputError) else error.strerror
            raise OutputError(
                f"a compressed shard cannot be unpacked here: {reason}",
                where=cache,
                hint="set VIT_CACHE to a folder with more room, or give uncompressed .tar shards",
            ) from error
    index = _read_index(shard, kept.file)
    text, ends = index.keys.arrays()
    # Without a cache, the next run reads the headers again.
    with contextlib.suppress(OSError, OutputError):
        _clean(cache, kept)
        with whole_file(kept.index) as target:
            np.savez(
                target,
                text=text,
                ends=ends,
                labels=index.labels,
                offset=index.offset,
                size=index.size,
            )
    return index


def _clean(cache: Path, kept: Kept) -> None:
    """Makes the cache folder and removes what it keeps of an older state of the shard, and what
    was left by a process that was killed while it wrote."""
    cache.mkdir(parents=True, exist_ok=True)
    for file in cache.glob(f"*{kept.place}-*"):
        abandoned = file.suffix == ".tmp" and time.time() - file.stat().st_mtime > 24 * 3600
        if kept.state not in file.name or abandoned:
            file.unlink(missing_ok=True)


def _unpack(shard: Path, opener: Callable[..., Any], target: IO[bytes]) -> None:
    with opener(shard, "rb") as packed:
        while True:
            try:
                block = packed.read(1 << 20)
            except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
                raise _cut_short(shard) from error
            if not block:
                return
            target.write(block)


def _cut_short(shard: Path) -> DataError:
    return DataError(
        "the shard is damaged or cut short", where=shard, hint="fetch or copy this file again"
    )


def _read_index(shard: Path, file: Path) -> ShardIndex:
    """One pass over the headers of a tar; the grouping of members to samples is webdataset's."""
    group_by_keys = _webdataset().tariterators.group_by_keys
    keys: list[str] = []
    labels: list[str] = []
    places: list[tuple[int, int]] = []
    halves = 0  # images without a label, labels without an image
    try:
        with file.open("rb") as content:
            for sample in group_by_keys(_members(shard, file)):
                image = next((sample[s] for s in sample if s in IMAGE_SUFFIXES), None)
                if image is None or "cls" not in sample:
                    halves += image is not None or "cls" in sample
                    continue
                offset, size = sample["cls"]
                content.seek(offset)
                labels.append(content.read(size).decode("utf-8", "replace").strip())
                places.append(image)
                keys.append(sample["__key__"])
    except ValueError as error:  # webdataset's
        what = "a sample has two files of one kind"
        raise DataError(what, where=shard, hint=_SAMPLE) from error
    if halves:
        what = f"{halves:,} of its samples lack the image or the label"
        raise DataError(what, where=shard, hint=_SAMPLE)
    if not keys:
        raise DataError("the shard holds no labelled image", where=shard, hint=_SAMPLE)
    try:
        encoded: npt.NDArray[Any] = np.array([int(label) for label in labels], np.int64)
    except ValueError:
        encoded = np.array(labels, np.str_)
    table = np.array(places, np.int64)
    return ShardIndex(file, Names.pack(keys), encoded, table[:, 0].copy(), table[:, 1].copy())


def _members(shard: Path, file: Path) -> Iterator[dict[str, Any]]:
    """Each file of a tar as {fname, data: (offset, size)}, in webdataset's form.

    Raises:
        DataError: not a tar, or without its end: a shard that was cut off between two members
            looks whole but for the two blocks of zeros that end every tar.
    """
    total = file.stat().st_size
    try:
        with tarfile.open(file, "r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else every header stays in memory
                if member.offset_data + member.size > total:
                    raise _cut_short(shard)
                if member.isreg() and not re.match(r"__[^/]*__($|/)", member.name):
                    place = (member.offset_data, member.size)
                    yield {"fname": member.name, "data": place, "__url__": str(shard)}
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as error:
        raise _cut_short(shard) from error
    with file.open("rb") as content:
        content.seek(end)
        if content.read(512) != bytes(512):
            raise _cut_short(shard)


def _webdataset() -> Any:
    try:
        importlib.import_module("webdataset.shardlists")
        importlib.import_module("webdataset.tariterators")
        return importlib.import_module("webdataset")
    except ImportError as error:
        raise MissingExtraError("webdataset", "data", "reading tar shards") from error
