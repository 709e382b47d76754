"""WebDataset shards: the samples of a tar, in order.

A sample is a run of members with one key: `0001.jpg` and `0001.cls`, or `0001.json`.

Headers are parsed one by one with `TarInfo.frombuf` and not by `TarFile`, which loops forever on
some damaged files (negative sizes, sparse maps that never end) and keeps every header in memory.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import json
import lzma
import math
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from vitcli.data.files import IMAGE_SUFFIXES
from vitcli.errors import DataError, MissingExtraError

OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""First bytes of a compressed file -> what opens it."""

HINT = "a sample is an image and its label with the same name: 0001.jpg and 0001.cls"

_BLOCK = tarfile.BLOCKSIZE
LONGEST = 1 << 20
"""Bytes of a name or label; more is damage."""
_EMPTY = {tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE}
_EMPTY |= {tarfile.CHRTYPE, tarfile.BLKTYPE}
"""Members without content, whatever size their header gives."""
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_LABELS = ("label", "cls", "class")
"""Keys of a label in a sample's JSON."""

_Sample = dict[str, Any]
"""Contents, or their places, by suffix; the key as "__key__"."""


def webdataset() -> Any:
    """The library that defines the format. Raises MissingExtraError."""
    try:
        importlib.import_module("webdataset.shardlists")
        importlib.import_module("webdataset.tariterators")
        return importlib.import_module("webdataset")
    except ImportError as error:
        raise MissingExtraError("webdataset", "data", "reading tar shards") from error


def damaged(shard: object, empty: bool = False) -> DataError:
    """The error for a shard that is not whole; `empty`: not even its first header is."""
    hint = "download or copy this file again"
    what = "not a tar, or an empty one" if empty else "the shard is damaged or cut short"
    return DataError(what, where=shard, hint=hint)


def samples(files: Iterator[_Sample], shard: object) -> Iterator[_Sample]:
    """Files grouped by their keys, as webdataset groups them.

    Raises:
        DataError: a sample has two files with one suffix.
    """
    try:
        yield from webdataset().tariterators.group_by_keys(files)
    except ValueError as error:  # webdataset's
        raise DataError("a sample has two images or two labels", where=shard, hint=HINT) from error


def image_of(sample: _Sample) -> Any:
    """The content, or place, of a sample's image; None if it has none."""
    return next((sample[suffix] for suffix in sample if suffix in IMAGE_SUFFIXES), None)


def label_of(sample: Mapping[str, Any], read: Callable[[Any], bytes]) -> str | None:
    """A sample's label: its .cls, or `label`, `cls` or `class` in its .json; None if it has none.
    `read` gives the bytes of a content or place."""
    if "cls" in sample:
        return read(sample["cls"]).decode("utf-8", "replace").strip()
    if "json" not in sample:
        return None
    try:
        fields = json.loads(read(sample["json"]))
        return next((str(fields[key]) for key in _LABELS if key in fields), None)
    except (ValueError, TypeError, RecursionError):
        return None


def members(tar: IO[bytes], shard: object, total: float = math.inf) -> Iterator[_Sample]:
    """Each file of a tar as webdataset has it: {fname, data}, here with (offset, size) as data. The
    tar is then at the offset, and may be read from there.

    Args:
        tar: at its beginning; it only read and sought forwards.
        total: its bytes, if they are known.

    Raises:
        DataError: not a tar, or without its end: a shard that was cut off between two members looks
            whole but for the blocks of zeros that end every tar.
    """
    position = 0
    given: dict[str, str] = {}  # name and size of the next file, from the header before it
    while True:
        try:
            header = tarfile.TarInfo.frombuf(tar.read(_BLOCK), "utf-8", "surrogateescape")
            if header.isreg() and "size" in given:
                header.size = int(given["size"])
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
            return
        except (tarfile.TarError, ValueError) as error:
            raise damaged(shard, empty=not position) from error
        start = position + _BLOCK
        sparse = header.type == tarfile.GNUTYPE_SPARSE
        if header.size < 0 or start + header.size > total or sparse:
            raise damaged(shard)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            given["path"] = _text(tar.read(min(header.size, LONGEST)).rstrip(b"\0"))
        elif header.type == tarfile.XHDTYPE:
            given |= _extended(tar.read(min(header.size, LONGEST)))
        else:
            name = given.get("path", header.name)
            if header.isreg() and not re.match(r"__[^/]*__($|/)", name):
                yield {"fname": name, "data": (start, header.size), "__url__": str(shard)}
            given = {}
        blocks = -(-header.size // _BLOCK) if header.type not in _EMPTY else 0
        position = tar.seek(start + blocks * _BLOCK)


def _extended(content: bytes) -> dict[str, str]:
    """The records of a pax header: "LENGTH KEY=VALUE\\n" each."""
    records, position = {}, 0
    while match := _RECORD.match(content, position):
        end = position + int(match[1])
        records[_text(match[2])] = _text(content[match.end() : end - 1])
        position = max(end, match.end())
    return records


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")
