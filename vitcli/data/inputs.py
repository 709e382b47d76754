"""The images that a command line names: files, directories, patterns, URLs, lists, standard input.

Found lazily and read one at a time, so that a million take no more memory than a hundred. Standard
library only.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from vitcli.data.files import is_image, limited, open_file, read_file, skipped_words, walk
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

    A file, whatever its ending; a directory, with everything below it (see `files.walk`); a pattern
    with `*`, `?`, `[...]` or `**`; an http(s) URL; `-`: one image on standard input; `@list.txt`
    (`@-`): one of these a line. An argument that names no image yields one that cannot be read.
    """
    for argument in arguments:
        if argument.startswith("@"):
            yield from _or_error(_listed(argument[1:], offline), argument, "no images listed")
        else:
            yield from _found(argument, offline)


def _found(argument: str, offline: bool) -> Iterator[ImageInput]:
    if argument == "-":
        yield ImageInput("-", lambda: b"".join(limited(sys.stdin.buffer, "-")))
    elif argument.lower().startswith(("http://", "https://")):
        if offline:
            yield _unreadable(argument, "not downloaded, and --offline is set")
        else:
            yield ImageInput(argument, partial(fetch, argument))
    elif os.path.isdir(argument):
        yield from _or_error(_directory(argument), argument, "no images in this directory")
    elif "\0" not in argument and not os.path.lexists(argument) and glob.has_magic(argument):
        matches = filter(_is_candidate, sorted(glob.iglob(argument, recursive=True)))
        yield from _or_error(map(_file, matches), argument, "no images match")
    else:
        yield _file(argument)


def _file(path: str) -> ImageInput:
    return ImageInput(path, partial(read_file, path))


def _is_candidate(path: str) -> bool:
    """Whether a pattern means this path: an image's, and not a directory, pipe or device."""
    there = os.path.isfile(path) or not os.path.exists(path)
    return is_image(os.path.basename(path)) and there


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
