"""The images that a command line names: files, directories, tars, patterns, URLs, lists, stdin.

Found lazily and read one at a time, so that a million take no more memory than a hundred. Standard
library only.
"""

from __future__ import annotations

import contextlib
import glob
import io
import itertools
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from vitcli.data.files import (
    MAX_BYTES,
    is_image,
    is_url,
    limited,
    open_file,
    read_file,
    read_part,
    skipped_words,
    walk,
)
from vitcli.data.tar import damaged, is_tar, members, open_tar
from vitcli.errors import DataError, ImageError, VitWarning

URL_TIMEOUT = 10.0
"""Seconds that a server may stay silent."""
URL_DEADLINE = 60.0
"""Seconds that one image may take to arrive."""


@dataclass(frozen=True)
class ImageInput:
    """One image to read: its name for messages, and a function that returns its encoded bytes (or
    an open Pillow image) or raises ImageError."""

    name: str
    read: Callable[[], Any]
    shared: bool = False
    """Whether the caller may change it for the next one: it must be read at once."""


def find_images(arguments: Iterable[str], offline: bool = False) -> Iterator[ImageInput]:
    """The images that each argument names, in order.

    A file, whatever its ending; a directory, with everything below it (see `files.walk`); a tar
    file, compressed or not, with all images in it; a pattern with `*`, `?`, `[...]` or `**`; an
    http(s) URL of an image or a tar file; `-`: one image on standard input; `@list.txt` (`@-`): one
    of these a line. An argument that names no image, or cannot be read to its end, yields one that
    cannot be read, under the name of the argument.
    """
    for argument in arguments:
        if argument.startswith("@"):
            found = (_listed(name[1:], offline) for name in expand(argument))
            listed = itertools.chain.from_iterable(found)
            yield from _or_error(listed, argument, "no images listed")
        else:
            yield from _found(argument, offline)


def _found(argument: str, offline: bool) -> Iterator[ImageInput]:
    if argument == "-":
        yield ImageInput("-", lambda: b"".join(limited(sys.stdin.buffer, "-")))
    elif is_url(argument):
        if offline:
            yield _unreadable(argument, "not downloaded, and --offline is set")
        elif is_tar(urlsplit(argument).path):
            yield from _tar(argument)
        else:
            yield ImageInput(argument, partial(fetch, argument))
    elif os.path.isdir(argument):
        yield from _or_error(_directory(argument), argument, "no images in this directory")
    else:
        found = itertools.chain.from_iterable(map(_named, expand(argument)))
        yield from _or_error(found, argument, "no images match")


def expand(argument: str) -> list[str]:
    """What matches a pattern: images and tar files, or after an @ lists. Any other argument stands
    for itself."""
    pattern = argument.removeprefix("@")
    exists = is_url(pattern) or "\0" in pattern or os.path.lexists(pattern)
    if exists or not glob.has_magic(pattern):
        return [argument]
    found = sorted(glob.iglob(pattern, recursive=True))
    if pattern != argument:
        return [f"@{path}" for path in found if os.path.isfile(path)]
    return list(filter(_is_candidate, found))


def is_countable(argument: str) -> bool:
    """Whether its images can be counted without reading all of it."""
    if argument.startswith("@"):
        return os.path.isfile(argument[1:])  # not a pipe
    name = urlsplit(argument).path if is_url(argument) else argument
    return not is_tar(name) or (name == argument and name.lower().endswith(".tar"))


def _named(path: str) -> Iterator[ImageInput]:
    if is_tar(os.path.basename(path)):
        yield from _tar(path)
    else:
        yield _file(path)


def _tar(place: str) -> Iterator[ImageInput]:
    """The images in a tar file. Those of a plain file on disk are read later, in place."""
    empty = True
    try:
        with open_tar(place) as (tar, in_place):
            total = os.path.getsize(place) if in_place else math.inf
            for name, offset, size in members(tar, place, total):
                if not is_image(os.path.basename(name)):
                    continue
                empty, where = False, f"{place}/{name}"
                if in_place:
                    yield ImageInput(where, partial(read_part, place, offset, size))
                elif size > MAX_BYTES:
                    yield _unreadable(where, f"larger than {MAX_BYTES >> 20} MB")
                elif len(data := tar.read(size)) == size:
                    yield ImageInput(where, partial(bytes, data))
                else:
                    raise damaged(place)
    except DataError as error:
        yield _unreadable(place, error.what)
    else:
        if empty:
            yield _unreadable(place, "no images in this tar file")


def _file(path: str) -> ImageInput:
    return ImageInput(path, partial(read_file, path))


def _is_candidate(path: str) -> bool:
    """Whether a pattern means this path: of an image or a tar, no directory, pipe or device."""
    there = os.path.isfile(path) or not os.path.exists(path)
    name = os.path.basename(path)
    return (is_image(name) or is_tar(name)) and there


def _directory(path: str) -> Iterator[ImageInput]:
    skipped = Counter[str]()
    yield from map(_file, walk(path, skipped))
    if skipped:
        warnings.warn(f"{path}: {skipped_words(skipped)}", VitWarning, stacklevel=1)


def _or_error(found: Iterator[ImageInput], name: str, what: str) -> Iterator[ImageInput]:
    empty = True
    for image in found:
        empty = False
        yield image
    if empty:
        yield _unreadable(name, what)


def _unreadable(name: str, what: str) -> ImageInput:
    def read() -> bytes:
        raise ImageError(what, where=name)

    return ImageInput(name, read)


def _listed(path: str, offline: bool) -> Iterator[ImageInput]:
    """The images of a list, one a line; `-` is standard input."""
    try:
        with open_file(path) if path != "-" else contextlib.nullcontext(sys.stdin.buffer) as lines:
            for line in lines:
                if b"\0" in line:
                    raise ValueError("it is not a text file")
                name = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
                if name.strip():
                    yield from _found(name, offline)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        yield _unreadable(f"@{path}", f"the list cannot be read: {reason}")


def fetch(url: str) -> bytes:
    """The bytes at an http(s) URL.

    Raises:
        ImageError: no answer within `URL_TIMEOUT` seconds, an error, or more than `MAX_BYTES`.
    """
    from vitcli.data.remote import RemoteFile

    deadline, blocks = time.monotonic() + URL_DEADLINE, []
    try:
        with RemoteFile(url, timeout=0, silence=URL_TIMEOUT) as file:
            for block in limited(io.BufferedReader(file), url):
                blocks.append(block)
                if time.monotonic() > deadline:
                    what = f"not received within {URL_DEADLINE:g} seconds"
                    raise ImageError(what, where=url)
    except DataError as error:
        raise ImageError(error.what, where=url) from error
    return b"".join(blocks)
