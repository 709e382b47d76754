"""Image files: which names are images, what lies in a directory, how a file is read. Standard
library only."""

from __future__ import annotations

import importlib.util
import os
import select
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from vitcli.errors import ImageError
from vitcli.words import counted

HEIF_SUFFIXES = frozenset({"heic", "heif", "hif"})
HAS_HEIF = importlib.util.find_spec("pillow_heif") is not None

IMAGE_SUFFIXES = frozenset(
    {"apng", "avif", "avifs", "bmp", "dib", "gif", "ico", "j2c", "j2k", "jfif", "jp2", "jpc"}
    | {"jpe", "jpeg", "jpf", "jpg", "jpx", "mpo", "pbm", "pgm", "png", "pnm", "ppm", "tif"}
    | {"tiff", "webp"}
    | (HEIF_SUFFIXES if HAS_HEIF else frozenset())
)
"""File name endings (lower case, no dot) of images: Pillow's for the formats that are read, but for
.pfm, whose values are floats."""

_UNSUPPORTED = HEIF_SUFFIXES | {
    "arw", "cr2", "cr3", "cur", "dcm", "dds", "dng", "emf", "eps", "exr", "hdr", "icns", "jxl",
    "jxr", "nef", "orf", "pcx", "pef", "pfm", "psd", "qoi", "raf", "ras", "rw2", "sgi", "srw",
    "svg", "tga", "wmf", "xbm", "xcf", "xpm",
}  # fmt: skip
"""Of images that cannot be read: they are counted, so that none vanishes unseen."""

MAX_BYTES = 128 << 20
"""Of an image that comes through a pipe or the network, whose length is not known in advance."""
PIPE_TIMEOUT = 10.0
"""Seconds in which something must be written to a named pipe."""


def is_url(path: str) -> bool:
    """Whether a path is an http(s) URL."""
    return path.lower().startswith(("http://", "https://"))


def is_image(name: str) -> bool:
    """Whether a file is named like an image that can be read; hidden files are not."""
    return not name.startswith(".") and _suffix(name) in IMAGE_SUFFIXES


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower() if "." in name else ""


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is one or a link to one. Only a link is looked up; one that cannot be, because it
    leads to itself, is none, where `DirEntry.is_dir` would raise."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is one or a link to one, likewise."""
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()


def walk(directory: str, skipped: Counter[str]) -> Iterator[str]:
    """The images in a directory and below it, sorted by name, without what is hidden. Links are
    followed, but never back up, and each directory is entered once.

    A directory that cannot be listed is among the results: reading it gives the reason.

    Args:
        skipped: counts the files that cannot be read, by kind.
    """
    real = Path(os.path.realpath(directory))
    yield from _walk(directory, skipped, {str(above) for above in real.parents})


def _walk(directory: str, skipped: Counter[str], entered: set[str]) -> Iterator[str]:
    real = os.path.realpath(directory)
    if real in entered:
        return
    entered.add(real)
    try:
        with os.scandir(directory) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError:
        yield directory
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if is_directory(entry):
            yield from _walk(entry.path, skipped, entered)
        elif is_image(entry.name):
            if is_file(entry) or not os.path.exists(entry.path):  # a broken link is reported
                yield entry.path
            else:
                skipped["pipe or device"] += 1
        elif _suffix(entry.name) in _UNSUPPORTED:
            skipped[f".{_suffix(entry.name)}"] += 1


def skipped_words(skipped: Counter[str]) -> str:
    """What `walk` left out: "skipped 3 files of unsupported kinds: .heic (2), .svg (1)"."""
    kinds = ", ".join(f"{kind} ({count:,})" for kind, count in sorted(skipped.items()))
    count = skipped.total()
    words = f"skipped {counted(count, 'file')} of unsupported kinds: {kinds}"
    if any(kind[1:] in HEIF_SUFFIXES for kind in skipped):
        words += "; to read HEIC, install pillow-heif"
    return words


def open_file(path: str | Path) -> BinaryIO:
    """Opens a file, or a pipe given in place of one. Opening a named pipe by itself would wait for
    ever where nobody writes to it; other pipes, as of `<(command)`, have a writer.

    Raises:
        OSError: it cannot be opened, or is a named pipe and nothing comes for `PIPE_TIMEOUT`.
    """
    if not stat.S_ISFIFO(os.stat(path).st_mode) or not os.path.exists(os.path.realpath(path)):
        return open(path, "rb")
    pipe = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if not select.select([pipe], [], [], PIPE_TIMEOUT)[0]:
        pipe.close()
        raise TimeoutError(f"a pipe to which nothing was written for {PIPE_TIMEOUT:g} seconds")
    os.set_blocking(pipe.fileno(), True)
    return pipe


def read_file(path: str | Path) -> bytes:
    """The bytes of a file, or of a pipe given in place of a file.

    Raises:
        ImageError: it does not exist, or cannot be read.
    """
    try:
        with open_file(path) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
            return b"".join(limited(file, path))
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else f"cannot be read: {_reason(error)}"
        raise ImageError(reason, where=path) from error


def read_part(path: str | Path, offset: int, size: int) -> bytes:
    """An image that lies within a file, such as a tar.

    Raises:
        ImageError: the file cannot be read, or has become shorter.
    """
    # Opened for each read (10 us): nothing to share between threads or to inherit by processes,
    # and thousands of files do not use up the descriptors.
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise ImageError(f"cannot be read: {_reason(error)}", where=path) from error
    if len(data) != size:
        raise ImageError("the file became shorter after it was opened", where=path)
    return data


def limited(stream: Any, where: object) -> Iterator[bytes]:
    """The blocks of a stream of unknown length. Raises ImageError after `MAX_BYTES`."""
    size = 0
    while block := stream.read1(1 << 16):  # what has arrived, without waiting for more
        size += len(block)
        if size > MAX_BYTES:
            raise ImageError(f"larger than {MAX_BYTES >> 20} MB", where=where)
        yield block


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
