"""Image files: recognizing them by name, finding them in directories, reading them. Standard
library only."""

import importlib.util
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vitcli.errors import ImageError, wrap_os_errors
from vitcli.words import pluralize

HEIF_SUFFIXES = frozenset({"heic", "heif", "hif"})
HAS_HEIF = importlib.util.find_spec("pillow_heif") is not None

IMAGE_SUFFIXES = frozenset(
    {"apng", "avif", "avifs", "bmp", "dib", "gif", "ico", "j2c", "j2k", "jfif", "jp2", "jpc"}
    | {"jpe", "jpeg", "jpf", "jpg", "jpx", "mpo", "pbm", "pgm", "png", "pnm", "ppm", "tif"}
    | {"tiff", "webp"}
    | (HEIF_SUFFIXES if HAS_HEIF else frozenset())
)
"""Suffixes of images (lowercase, without dot): Pillow's for the supported formats, except .pfm,
whose values are floats."""

_UNSUPPORTED = HEIF_SUFFIXES | {
    "arw", "cr2", "cr3", "cur", "czi", "dcm", "dds", "dng", "emf", "eps", "exr", "hdr", "icns",
    "jxl", "jxr", "lif", "lsm", "mrxs", "nd2", "ndpi", "nef", "oib", "oif", "orf", "pcx", "pef",
    "pfm", "psd", "qoi", "raf", "ras", "rw2", "scn", "sgi", "srw", "stk", "svg", "svs", "tga",
    "vsi", "wmf", "xbm", "xcf", "xpm",
}  # fmt: skip
"""Suffixes of unsupported image formats; skipped files are counted, so they can be reported."""

MAX_BYTES = 128 << 20
"""Size limit for an image from a pipe or the network, whose length is not known in advance."""
_MAX_FILE_BYTES = 512 << 20
"""Size limit for an image on disk: as many pixels as are decoded, uncompressed."""


def max_unpacked_size(size: int) -> int:
    """The size above which the content of a compressed file of `size` bytes is suspicious: weights
    and images hardly compress, except for zero-initialized heads."""
    return 60 * size + (1 << 26)


def is_url(path: str) -> bool:
    """Whether a path is an http(s) URL."""
    return path.lower().startswith(("http://", "https://"))


def url_path(url: str) -> str:
    """The path of a URL; "" if the URL is malformed, which reading it reports."""
    try:
        return urlsplit(url).path
    except ValueError:
        return ""


def is_image(name: str) -> bool:
    """Whether a file name is that of a supported image; hidden files are excluded."""
    return not name.startswith(".") and _suffix(name) in IMAGE_SUFFIXES


def _suffix(name: str) -> str:
    return name.rpartition(".")[2].lower() if "." in name else ""


def is_hidden(name: str) -> bool:
    """Whether a file or directory is hidden, or made by macOS, a Synology NAS or a file system."""
    return name.startswith(".") or name in ("__MACOSX", "@eaDir", "lost+found")


def is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a directory or a symlink to one. Only symlinks need a stat call. A
    symlink loop is no directory, where `DirEntry.is_dir` would raise."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a file or a symlink to one, as `is_directory`."""
    return os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file()


def walk(
    directory: str, skipped: Counter[str], matches: Callable[[str], bool] = is_image
) -> Iterator[str]:
    """Yield the images in a directory tree, sorted by name, without hidden files. Symlinks are
    followed, but never to a parent directory, and each directory is visited once.

    A directory that cannot be listed is yielded itself: reading it raises the error.

    Args:
        skipped: counts unsupported files, by kind.
        matches: whether a file name is that of a file to yield.
    """
    visited = set(map(str, Path(os.path.realpath(directory)).parents))

    def visit(directory: str) -> Iterator[str]:
        real = os.path.realpath(directory)
        if real in visited:
            return
        visited.add(real)
        try:
            with os.scandir(directory) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError:
            yield directory
            return
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if is_directory(entry):
                yield from visit(entry.path)
            elif matches(entry.name):
                if is_file(entry) or not os.path.exists(entry.path):  # report broken links
                    yield entry.path
                else:
                    skipped["pipe or device"] += 1
            elif "." not in entry.name:
                skipped["without a suffix"] += 1
            elif _suffix(entry.name) in _UNSUPPORTED:
                skipped[f".{_suffix(entry.name)}"] += 1

    return visit(directory)


def find_files(directory: Path, matches: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files in a directory tree whose names match, as `walk` does, but without
    directories that cannot be listed."""
    paths = walk(str(directory), Counter(), matches)
    return (Path(path) for path in paths if matches(os.path.basename(path)))


def describe_skipped(skipped: Counter[str]) -> str:
    """Format the skipped files: "skipped 3 files of unsupported kinds: .heic (2), .svg (1)"."""
    kinds = ", ".join(f"{kind} ({count:,})" for kind, count in sorted(skipped.items()))
    count = skipped.total()
    message = f"skipped {pluralize(count, 'file')} of unsupported kinds: {kinds}"
    if any(kind[1:] in HEIF_SUFFIXES for kind in skipped):
        message += "; to read HEIC, install pillow-heif"
    return message


def read_file(path: str | Path) -> bytes:
    """Read all bytes of a file or pipe.

    Raises:
        ImageError: it does not exist or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                _check_size(status.st_size, _MAX_FILE_BYTES, path)
                return file.read()
            return b"".join(read_limited(file, path))
    except FileNotFoundError as error:
        raise ImageError("no such file or directory", where=path) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or error
        raise ImageError(f"cannot be read: {reason}", where=path) from error


def read_range(path: str | Path, offset: int, size: int) -> bytes:
    """Read part of a file, such as an image in a tar archive.

    Raises:
        ImageError: the file cannot be read or was truncated.
    """
    _check_size(size, _MAX_FILE_BYTES, path)
    # Opened for each read (10 us): no state is shared between threads or inherited by worker
    # processes, and thousands of files do not exhaust the file descriptors.
    cannot_read = wrap_os_errors(ImageError, "cannot be read", path)
    with cannot_read, open(path, "rb", buffering=0) as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise ImageError("the file became shorter after it was opened", where=path)
    return data


def read_limited(stream: Any, where: object) -> Iterator[bytes]:
    """Yield blocks of a stream of unknown length. Raises ImageError after `MAX_BYTES`."""
    size = 0
    while block := stream.read1(1 << 16):  # available data, without waiting
        size += len(block)
        _check_size(size, MAX_BYTES, where)
        yield block


def _check_size(size: int, limit: int, where: object) -> None:
    if size > limit:
        raise ImageError(f"larger than {limit >> 20} MB", where=where)
