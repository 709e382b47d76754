"""The images that a command line names: files, folders, patterns, URLs, lists, standard input.

Found lazily and read one at a time, so that a million take no more memory than a hundred.
Standard library alone.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from vitcli.errors import ImageError

URL_TIMEOUT = 10.0
"""Seconds that a server may stay silent."""
URL_DEADLINE = 60.0
"""Seconds that one image may take to arrive."""
MAX_BYTES = 128 << 20
"""Of an image that comes through a pipe or the network, where no file system says how long."""


@dataclass(frozen=True)
class ImageInput:
    """One image to be read: its name for messages, and how to get its encoded bytes (or an open
    Pillow image). What stands in the way is raised when it is read, as a ImageError."""

    name: str
    read: Callable[[], Any]
    shared: bool = False
    """Whether it is the caller's, who may change it for the next: it is to be read at once."""


def find_images(arguments: Iterable[str], offline: bool = False) -> Iterator[ImageInput]:
    """The images that each argument stands for, in order.

    A file, whatever its ending; a folder and all below it (files with an image's ending, sorted
    by name; nothing hidden); a pattern with `*`, `?`, `[...]` or `**`; an http(s) URL; `-`: one
    image on standard input; `@list.txt` (`@-`): one of these a line.
    """
    for argument in arguments:
        if argument.startswith("@"):
            yield from _or_complaint(_listed(argument[1:], offline), argument, "names no images")
        else:
            yield from _found(argument, offline)


def _found(argument: str, offline: bool) -> Iterator[ImageInput]:
    if argument == "-":
        yield ImageInput("-", _read_stdin)
    elif argument.lower().startswith(("http://", "https://")):
        yield ImageInput(
            argument, partial(_refuse, argument) if offline else partial(fetch, argument)
        )
    elif os.path.isdir(argument):
        yield from _or_complaint(_walk(argument, set()), argument, "holds no images")
    elif not os.path.lexists(argument) and glob.has_magic(argument):
        matches = (f for f in sorted(glob.iglob(argument, recursive=True)) if _is_image(f))
        yield from _or_complaint(map(_file, matches), argument, "matches no images")
    else:
        yield _file(argument)


def _file(path: str) -> ImageInput:
    return ImageInput(path, partial(read_file, path))


def _or_complaint(found: Iterator[ImageInput], name: str, complaint: str) -> Iterator[ImageInput]:
    """What was found; where that is nothing, an image that cannot be read, for the report."""
    nothing = True
    for image in found:
        nothing = False
        yield image
    if nothing:
        yield _unreadable(name, complaint)


def _unreadable(name: str, what: str) -> ImageInput:
    def read() -> bytes:
        raise ImageError(what, where=name)

    return ImageInput(name, read)


def _walk(folder: str, seen: set[tuple[int, int]]) -> Iterator[ImageInput]:
    """All images below a folder, sorted; links are followed, each folder is entered once."""
    try:
        status = os.stat(folder)
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield _unreadable(folder, f"cannot be listed: {error.strerror}")
        return
    if (status.st_dev, status.st_ino) in seen and status.st_ino:
        return
    seen.add((status.st_dev, status.st_ino))
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if _is_image(name):
            yield _file(path)
        elif os.path.isdir(path):
            yield from _walk(path, seen)


def _is_image(name: str) -> bool:
    from vitcli.data.source import IMAGE_SUFFIXES

    return name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


def _listed(path: str, offline: bool) -> Iterator[ImageInput]:
    """The images of a list, one a line; `-` is standard input."""
    try:
        if path == "-":
            lines: BinaryIO = sys.stdin.buffer
            yield from _lines(lines, offline)
            return
        with open(path, "rb") as lines:
            yield from _lines(lines, offline)
    except OSError as error:
        yield _unreadable(f"@{path}", f"the list cannot be read: {error.strerror}")


def _lines(lines: BinaryIO, offline: bool) -> Iterator[ImageInput]:
    for line in lines:
        name = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
        if name.strip():
            yield from _found(name, offline)


# ---------------------------------------------------------------------------------------------
# Reading


def read_file(path: str) -> bytes:
    """The bytes of a file, or of a pipe that stands where a file would.

    Raises:
        ImageError: there is no such file, or it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
            return _read_stream(file, path)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "there is no such file" if missing else f"cannot be read: {error.strerror}"
        raise ImageError(reason, where=path) from error


def _read_stdin() -> bytes:
    return _read_stream(sys.stdin.buffer, "-")


def _refuse(url: str) -> bytes:
    raise ImageError("is on the network, which --offline forbids", where=url)


def fetch(url: str) -> bytes:
    """The bytes behind an http(s) URL.

    Raises:
        ImageError: no answer within `URL_TIMEOUT` seconds, an error, or more than `MAX_BYTES`.
    """
    import http.client
    import urllib.error
    import urllib.parse
    import urllib.request

    escaped = urllib.parse.quote(url, safe="%/:=&?~#+!$,;'@()*[]")
    try:
        request = urllib.request.Request(escaped, headers={"User-Agent": "vitcli"})
        with urllib.request.urlopen(request, timeout=URL_TIMEOUT) as answer:
            return _read_stream(answer, url, time.monotonic() + URL_DEADLINE)
    except urllib.error.HTTPError as error:
        what = f"the server answered {error.code} ({error.reason})"
        raise ImageError(what, where=url) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # URLError wraps what happened
        if isinstance(reason, TimeoutError):
            reason = f"the server was silent for {URL_TIMEOUT:g} seconds"
        raise ImageError(f"cannot be fetched: {reason}", where=url) from error


def _read_stream(stream: Any, name: str, deadline: float | None = None) -> bytes:
    """All that a stream gives, up to `MAX_BYTES` and the deadline (of time.monotonic)."""
    parts, size = [], 0
    while part := stream.read1(1 << 16):  # what is there, without waiting for more
        parts.append(part)
        size += len(part)
        if size > MAX_BYTES:
            raise ImageError(f"has more than {MAX_BYTES >> 20} MB", where=name)
        if deadline is not None and time.monotonic() > deadline:
            what = f"did not arrive whole in {URL_DEADLINE:g} seconds"
            raise ImageError(what, where=name)
    return b"".join(parts)
