"""Images given on the command line: files, directories, tars, patterns, URLs, lists, stdin.

They are found lazily and read one at a time, so memory does not grow with their number. Standard
library only.
"""

import contextlib
import glob
import io
import itertools
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from vitcli.data.files import (
    MAX_BYTES,
    describe_skipped,
    is_image,
    is_url,
    read_file,
    read_limited,
    read_range,
    url_path,
    walk,
)
from vitcli.data.tar import damaged_error, is_tar, members, open_tar
from vitcli.errors import DataError, ImageError, warn
from vitcli.words import URL_USER, public_url

URL_TIMEOUT = 10.0
"""Read timeout in seconds."""
URL_DEADLINE = 60.0
"""Time limit in seconds for one download."""
MAX_LINE = 1 << 20
"""Size limit in bytes for a line of a list."""
_EMPTY_TAR = "no images in this tar file"


@dataclass(frozen=True)
class ImageInput:
    """An image to read: its name for messages, and a function that returns its encoded bytes (or
    an open Pillow image) or raises ImageError."""

    name: str
    read: Callable[[], Any]
    shared: bool = False
    """Whether the caller may reuse it for the next image, so it must be decoded immediately."""


def find_images(arguments: Iterable[str], offline: bool = False) -> Iterator[ImageInput]:
    """Yield the images of each argument, in order.

    An argument is a file with any suffix; a directory, searched recursively (see `files.walk`); a
    tar file of images, compressed or not; a glob pattern with `*`, `?`, `[...]` or `**`; an http(s)
    URL of an image or tar file; `-`, one image on standard input; or `@list.txt` (`@-`), a file of
    such arguments, one per line. If an argument has no images or cannot be read, an unreadable
    image with its name is yielded.
    """
    for argument in arguments:
        if argument.startswith("@"):
            argument = f"@{os.path.expanduser(argument[1:])}"
            lists = (_images_in_list(name[1:], offline) for name in expand_pattern(argument))
            images = itertools.chain.from_iterable(lists)
            yield from _or_error(images, argument, "no images listed")
        else:
            yield from _images_of(argument, offline)


def _images_of(argument: str, offline: bool) -> Iterator[ImageInput]:
    argument = os.path.expanduser(argument)
    if argument == "-":
        yield ImageInput("-", lambda: b"".join(read_limited(sys.stdin.buffer, "-")))
    elif is_url(argument):
        name = public_name(argument)
        if offline:
            yield _unreadable_input(name, "not downloaded, and --offline is set")
        elif is_tar(url_path(argument)):
            yield from _or_error(_images_in_tar(argument), name, _EMPTY_TAR)
        else:
            yield ImageInput(name, partial(fetch, argument))
    elif os.path.isdir(argument):
        yield from _or_error(_images_in_dir(argument), argument, "no images in this directory")
    else:
        images = itertools.chain.from_iterable(map(_images_at, expand_pattern(argument)))
        yield from _or_error(images, argument, "no images match")


def expand_pattern(argument: str) -> list[str]:
    """Expand a glob pattern to images and tar files, or with a leading @ to lists. Any other
    argument is returned unchanged."""
    pattern = argument.removeprefix("@")
    exists = is_url(pattern) or "\0" in pattern or os.path.lexists(pattern)
    if exists or not glob.has_magic(pattern):
        return [argument]
    paths = sorted(glob.iglob(pattern, recursive=True))
    if "**" in pattern:  # which follows symlinks: visit each directory once, as `walk` does
        resolve, unique = cache(os.path.realpath), dict[tuple[str, str], str]()
        for path in sorted(paths, key=lambda path: path.count(os.sep)):
            directory, name = os.path.split(path)
            unique.setdefault((resolve(directory), name), path)
        paths = sorted(unique.values())
    if pattern != argument:
        return [f"@{path}" for path in paths if os.path.isfile(path)]
    return list(filter(_is_candidate, paths))


def is_countable(argument: str) -> bool:
    """Whether the argument's images can be counted without reading all data."""
    if argument.startswith("@"):
        return os.path.isfile(argument[1:])  # not a pipe
    name = url_path(argument) if is_url(argument) else argument
    return not is_tar(name) or (name == argument and name.lower().endswith(".tar"))


def _images_at(path: str) -> Iterator[ImageInput]:
    if is_tar(os.path.basename(path)):
        yield from _or_error(_images_in_tar(path), path, _EMPTY_TAR)
    else:
        yield _file_input(path)


def _images_in_tar(location: str) -> Iterator[ImageInput]:
    """Yield the images in a tar file. In an uncompressed local file they are read on demand."""
    try:
        with open_tar(location) as (tar, in_place):
            total = os.path.getsize(location) if in_place else math.inf
            for name, offset, size in members(tar, location, total):
                if not is_image(os.path.basename(name)):
                    continue
                where = f"{public_url(location)}/{name}"
                if in_place:
                    yield ImageInput(where, partial(read_range, location, offset, size))
                elif size > MAX_BYTES:
                    yield _unreadable_input(where, f"larger than {MAX_BYTES >> 20} MB")
                elif len(data := tar.read(size)) == size:
                    yield ImageInput(where, partial(bytes, data))
                else:
                    raise damaged_error(location)
    except DataError as error:
        yield _unreadable_input(public_name(location), error.what)


def public_name(argument: str) -> str:
    """The name of an argument in results: a URL without user name and password. Its query may be
    all that distinguishes it from others."""
    return URL_USER.sub("", argument) if is_url(argument) else argument


def _file_input(path: str) -> ImageInput:
    return ImageInput(path, partial(read_file, path))


def _is_candidate(path: str) -> bool:
    """Whether a path that matches a pattern is an image or tar, not a directory, pipe or device."""
    file_or_missing = os.path.isfile(path) or not os.path.exists(path)
    name = os.path.basename(path)
    return (is_image(name) or is_tar(name)) and file_or_missing


def _images_in_dir(path: str) -> Iterator[ImageInput]:
    skipped = Counter[str]()
    yield from map(_file_input, walk(path, skipped))
    if skipped:
        warn(describe_skipped(skipped), path)


def _or_error(images: Iterator[ImageInput], name: str, what: str) -> Iterator[ImageInput]:
    empty = True
    for image in images:
        empty = False
        yield image
    if empty:
        yield _unreadable_input(name, what)


def _unreadable_input(name: str, what: str) -> ImageInput:
    def read() -> bytes:
        raise ImageError(what, where=name)

    return ImageInput(name, read)


def _images_in_list(path: str, offline: bool) -> Iterator[ImageInput]:
    """Yield the images of a list file with one argument per line; `-` is standard input."""
    try:
        with open(path, "rb") if path != "-" else contextlib.nullcontext(sys.stdin.buffer) as lines:
            for line in iter(partial(lines.readline, MAX_LINE), b""):
                if b"\0" in line:
                    raise ValueError("it is not a text file")
                name = os.fsdecode(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
                if name.strip():
                    yield from _images_of(name, offline)
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        reason = "no such file" if missing else getattr(error, "strerror", None) or error
        yield _unreadable_input(f"@{path}", f"the list cannot be read: {reason}")


def fetch(url: str) -> bytes:
    """Download the content of an http(s) URL.

    Raises:
        ImageError: a timeout (`URL_TIMEOUT`, `URL_DEADLINE`), an error, or more than `MAX_BYTES`.
    """
    from vitcli.data.remote import RemoteFile

    deadline, blocks = time.monotonic() + URL_DEADLINE, []
    try:
        with RemoteFile(url, timeout=0, read_timeout=URL_TIMEOUT) as file:
            for block in read_limited(io.BufferedReader(file), url):
                blocks.append(block)
                if time.monotonic() > deadline:
                    what = f"not received within {URL_DEADLINE:g} seconds"
                    raise ImageError(what, where=url)
    except DataError as error:
        raise ImageError(error.what, where=url) from error
    return b"".join(blocks)
