"""Read tar archives, compressed or not, on disk or at a URL, as WebDataset samples or plain files.

A sample is a group of consecutive members with one key: `0001.jpg` and `0001.cls`, or `0001.json`.

Headers are parsed one by one with `TarInfo.frombuf` and not by `TarFile`, which loops forever on
some damaged files (negative sizes, endless sparse maps) and keeps every header in memory.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import math
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple

from vitcli.data.files import IMAGE_SUFFIXES, MAX_BYTES, is_image, is_url
from vitcli.errors import DataError, require

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

_OPENERS: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""Magic bytes of a compressed file -> the function that opens it."""
DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Exceptions raised when reading a damaged compressed file."""

HINT = (
    "a sample is an image and its label with the same name, one after the other, such as 0001.jpg "
    "and 0001.cls, without other dots; pack them with `tar --sort=name`; "
    "if the tar file contains class directories, extract it, and pass the directory"
)

_BLOCK = tarfile.BLOCKSIZE
_MAX_TEXT_BYTES = 1 << 20
"""Maximum bytes of a name or label."""
_EMPTY_TYPES = {tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE}
_EMPTY_TYPES |= {tarfile.CHRTYPE, tarfile.BLKTYPE}
"""Types of members without content, whatever the size in their header."""
_RECORD = re.compile(rb"(\d{1,9}) ([^=]+)=")
_SAMPLE_SUFFIXES = IMAGE_SUFFIXES | {"cls", "json"}
_LABELS = ("label", "cls", "class")
"""Keys of the label in a sample's JSON."""


class TarSample(NamedTuple):
    """A group of consecutive files with one key."""

    key: str
    image: Any
    """Its bytes or (offset, size); None if the sample has no image."""
    label: str | None


def is_tar(name: str) -> bool:
    """Whether a file name is that of a tar archive; hidden files are excluded."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def import_webdataset() -> Any:
    """Import `webdataset`, which defines the format."""
    return require("webdataset", "reading tar shards")


def find_opener(head: bytes) -> Callable[..., Any] | None:
    """The function that opens a compressed file with these first bytes, or None."""
    return next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)


def damaged_error(shard: object, empty: bool = False) -> DataError:
    """The error for a damaged or truncated shard; `empty`: it has no valid first header."""
    hint = "download or copy this file again"
    what = "not a tar file, or an empty one" if empty else "the tar file is damaged or truncated"
    return DataError(what, where=shard, hint=hint)


@contextlib.contextmanager
def open_tar(location: str, timeout: float | None = None) -> Iterator[tuple[IO[bytes], bool]]:
    """Open a tar at a path or URL for reading and forward seeking. Also yields whether it is an
    uncompressed local file, whose members can be read in place later.

    Args:
        timeout: seconds for which failed requests are retried; None: the default.

    Raises:
        DataError: it cannot be read, or is found to be damaged in the `with` block.
    """
    from vitcli.data.remote import RemoteFile

    try:
        remote = is_url(location)
        raw = RemoteFile(location, timeout) if remote else open(location, "rb", buffering=0)  # noqa: SIM115
        with raw, io.BufferedReader(raw, 1 << 18) as file:
            opener = find_opener(file.peek(6))
            with opener(file, "rb") if opener else contextlib.nullcontext(file) as tar:
                yield tar, opener is None and not remote
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # not raised by gzip or bz2
            raise DataError(f"cannot be read: {error.strerror}", where=location) from error
        raise damaged_error(location) from error


def read_samples(
    tar: IO[bytes], shard: object, total: float = math.inf, start: int | None = None
) -> Iterator[TarSample]:
    """Yield the samples of a tar, as grouped by webdataset; files that are neither image nor label
    are ignored. A sample whose names have another dot has neither.

    Args:
        tar: the archive, at its start; only forward seeks are used.
        total: its size in bytes, if known.
        start: read image bytes from this sample on; None: return only their offsets and sizes.

    Raises:
        DataError: the shard is damaged, or a sample has two files with the same suffix.
    """
    index = 0

    def files() -> Iterator[dict[str, Any]]:
        for name, offset, size in members(tar, shard, total):
            suffix = name.rpartition(".")[2].lower()
            data: Any = offset, size
            if suffix in ("cls", "json"):
                data = tar.read(min(size, _MAX_TEXT_BYTES))
            # A sample is complete, and counted, when the first file of the next one is read.
            elif suffix in IMAGE_SUFFIXES and start is not None and index >= start - 1:
                data = tar.read(size) if size <= MAX_BYTES else b""
            yield {"fname": name, "data": data, "__url__": str(shard)}

    try:
        for sample in import_webdataset().tariterators.group_by_keys(files()):
            image = next((sample[suffix] for suffix in sample if suffix in IMAGE_SUFFIXES), None)
            if any(suffix.rpartition(".")[2] in _SAMPLE_SUFFIXES for suffix in sample):
                yield TarSample(sample["__key__"], image, _parse_label(sample))
                index += 1
    except ValueError as error:  # raised by webdataset
        raise DataError("a sample has two images or two labels", where=shard, hint=HINT) from error


def _parse_label(sample: Mapping[str, Any]) -> str | None:
    """The content of .cls, or `label`, `cls` or `class` in .json; None if there is none."""
    if "cls" in sample:
        return str(sample["cls"].decode("utf-8", "replace").strip()) or None
    try:
        fields = json.loads(sample.get("json", b""))
        labels = (fields[key] for key in _LABELS if key in fields and fields[key] is not None)
        label = next(labels, None)
        return str(label) if isinstance(label, str | int) else None
    except (ValueError, TypeError, RecursionError):
        return None


def members(
    tar: IO[bytes], shard: object, total: float = math.inf
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, size) of each file in a tar, with `tar` positioned at its content.

    Raises:
        DataError: not a tar, or truncated. A tar cut off between two members can only be recognized
            by the missing zero blocks at its end.
    """
    position = 0
    overrides: dict[str, str] = {}  # for the next file, from the extended header before it
    while True:
        try:
            header = tarfile.TarInfo.frombuf(tar.read(_BLOCK), "utf-8", "surrogateescape")
            if header.isreg() and "size" in overrides:
                header.size = int(overrides["size"])
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # a block of zeros
            return
        except (tarfile.TarError, ValueError) as error:
            raise damaged_error(shard, empty=not position) from error
        start = position + _BLOCK
        sparse = header.type == tarfile.GNUTYPE_SPARSE
        if header.size < 0 or start + header.size > total or sparse:
            raise damaged_error(shard)
        if header.type == tarfile.GNUTYPE_LONGNAME:
            overrides["path"] = _decode(tar.read(min(header.size, _MAX_TEXT_BYTES)).rstrip(b"\0"))
        elif header.type == tarfile.XHDTYPE:
            overrides |= _parse_pax_header(tar.read(min(header.size, _MAX_TEXT_BYTES)))
        else:
            name = overrides.get("path", header.name)
            hidden = name.rpartition("/")[2].startswith(".")  # such as those macOS adds
            if (header.islnk() or header.issym()) and is_image(name) and not hidden:
                raise DataError(
                    f"'{name}' is a link to another file",
                    where=shard,
                    hint="pack the files themselves with `tar --dereference --hard-dereference`",
                )
            if header.isreg() and not hidden and not re.match(r"__[^/]*__($|/)", name):
                yield name, start, header.size
            overrides = {}
        blocks = -(-header.size // _BLOCK) if header.type not in _EMPTY_TYPES else 0
        position = tar.seek(start + blocks * _BLOCK)


def _parse_pax_header(content: bytes) -> dict[str, str]:
    """Parse the records of a pax header, each "LENGTH KEY=VALUE\\n"."""
    records, position = {}, 0
    while match := _RECORD.match(content, position):
        end = position + int(match[1])
        records[_decode(match[2])] = _decode(content[match.end() : end - 1])
        position = max(end, match.end())
    return records


def _decode(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")
