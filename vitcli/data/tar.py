"""Tar archives, compressed or not, on disk or at a URL: WebDataset's samples, or any files.

A sample is a run of members with one key: `0001.jpg` and `0001.cls`, or `0001.json`.

Headers are parsed one by one with `TarInfo.frombuf` and not by `TarFile`, which loops forever on
some damaged files (negative sizes, sparse maps that never end) and keeps every header in memory.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from vitcli.data.files import IMAGE_SUFFIXES, MAX_BYTES, is_url
from vitcli.errors import DataError, MissingExtraError

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""First bytes of a compressed file -> what opens it."""
DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""What reading a damaged compressed file raises."""

HINT = (
    "a sample is an image and its label with the same name, one after the other, such as 0001.jpg "
    "and 0001.cls; pack them with `tar --sort=name`"
)

_BLOCK = tarfile.BLOCKSIZE
_LONGEST = 1 << 20
"""Bytes of a name or label; more is damage."""
_EMPTY = {tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE}
_EMPTY |= {tarfile.CHRTYPE, tarfile.BLKTYPE}
"""Members without content, whatever size their header gives."""
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_LABELS = ("label", "cls", "class")
"""Keys of a label in a sample's JSON."""


class TarSample(NamedTuple):
    """A run of files with one key."""

    key: str
    image: Any
    """Its bytes, or (offset, size); None if it has none."""
    label: str | None


def is_tar(name: str) -> bool:
    """Whether a file is named like a tar archive; hidden files are not."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def webdataset() -> Any:
    """The library that defines the format. Raises MissingExtraError."""
    try:
        return importlib.import_module("webdataset")
    except ImportError as error:
        raise MissingExtraError("webdataset", "reading tar shards") from error


def opener_of(head: bytes) -> Callable[..., Any] | None:
    """What opens a compressed file that starts like this; None for any other file."""
    return next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)


def damaged(shard: object, empty: bool = False) -> DataError:
    """The error for a shard that is not whole; `empty`: not even its first header is."""
    hint = "download or copy this file again"
    what = "not a tar file, or an empty one" if empty else "the tar file is damaged or cut short"
    return DataError(what, where=shard, hint=hint)


@contextlib.contextmanager
def open_tar(place: str, timeout: float | None = None) -> Iterator[tuple[IO[bytes], bool]]:
    """A tar at a path or a URL, to be read and sought forwards, and whether it is a plain file on
    disk: its members can then be read again, in place.

    Args:
        timeout: seconds for which a server that fails is asked again; None: the default.

    Raises:
        DataError: it cannot be read; also where the block finds that it is damaged.
    """
    from vitcli.data.remote import RemoteFile

    try:
        remote = is_url(place)
        raw = RemoteFile(place, timeout) if remote else open(place, "rb", buffering=0)  # noqa: SIM115
        with raw, io.BufferedReader(raw, 1 << 18) as file:
            opener = opener_of(file.peek(6))
            with opener(file, "rb") if opener else contextlib.nullcontext(file) as tar:
                yield tar, opener is None and not remote
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # not what gzip and bz2 raise
            raise DataError(f"cannot be read: {error.strerror}", where=place) from error
        raise damaged(place) from error


def read_samples(
    tar: IO[bytes], shard: object, total: float = math.inf, start: int | None = None
) -> Iterator[TarSample]:
    """The samples of a tar, grouped as webdataset groups them; a file that is neither image nor
    label belongs to none.

    Args:
        tar: at its beginning; only read and sought forwards.
        total: its bytes, if they are known.
        start: the bytes of images are read from this sample on; None: only their places.

    Raises:
        DataError: the shard is damaged, or a sample has two files with one suffix.
    """
    number = 0

    def files() -> Iterator[dict[str, Any]]:
        for name, offset, size in members(tar, shard, total):
            suffix = name.rpartition(".")[2].lower()
            data: Any = offset, size
            if suffix in ("cls", "json"):
                data = tar.read(min(size, _LONGEST))
            # A sample is complete, and counted, once the first file of the next one is read.
            elif suffix in IMAGE_SUFFIXES and start is not None and number >= start - 1:
                data = tar.read(size) if size <= MAX_BYTES else b""
            yield {"fname": name, "data": data, "__url__": str(shard)}

    try:
        for found in webdataset().tariterators.group_by_keys(files()):
            image = next((found[suffix] for suffix in found if suffix in IMAGE_SUFFIXES), None)
            if image is not None or found.keys() & {"cls", "json"}:
                yield TarSample(found["__key__"], image, _label_of(found))
                number += 1
    except ValueError as error:  # webdataset's
        raise DataError("a sample has two images or two labels", where=shard, hint=HINT) from error


def _label_of(sample: Mapping[str, Any]) -> str | None:
    """Its .cls, or `label`, `cls` or `class` in its .json; None if it has none."""
    if "cls" in sample:
        return str(sample["cls"].decode("utf-8", "replace").strip()) or None
    try:
        fields = json.loads(sample.get("json", b""))
        found = (str(fields[key]) for key in _LABELS if key in fields and fields[key] is not None)
        return next(found, None)
    except (ValueError, TypeError, RecursionError):
        return None


def members(
    tar: IO[bytes], shard: object, total: float = math.inf
) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of each file of a tar, which may then be read from there.

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
            given["path"] = _text(tar.read(min(header.size, _LONGEST)).rstrip(b"\0"))
        elif header.type == tarfile.XHDTYPE:
            given |= _extended(tar.read(min(header.size, _LONGEST)))
        else:
            name = given.get("path", header.name)
            hidden = name.rpartition("/")[2].startswith(".")  # as macOS adds to those it packs
            if header.isreg() and not hidden and not re.match(r"__[^/]*__($|/)", name):
                yield name, start, header.size
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
