"""Bytes that go from file to file as they are: by the kernel where it can, else in pieces."""

from __future__ import annotations

import contextlib
import errno
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

from vitcli.errors import CheckpointError

Made = TypeVar("Made")

PIECE = 1 << 25
"""Bytes that the kernel copies at a time, and after which the disk starts to write them."""
BUFFER = 1 << 20
"""Bytes that pass through our memory at a time where the kernel does not copy."""
_CANNOT = {
    getattr(errno, name)
    for name in ("EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP", "EBADF", "EPERM", "ESPIPE", "ETXTBSY")
    if hasattr(errno, name)
}
"""Two file systems, a pipe, an old kernel: no failure, only not by this way."""


class Extent(NamedTuple):
    """A stretch of a file."""

    path: Path
    start: int
    length: int


def append(target: BinaryIO, pieces: Iterable[memoryview | Extent]) -> None:
    """Appends to a file what is in memory, and what lies in other files.

    Raises:
        CheckpointError: another file ends before its stretch does.
        OSError: the target cannot take them, or another file cannot be read.
    """
    sent = written = 0
    start = target.tell() if target.seekable() else 0
    with contextlib.ExitStack() as opened:
        open_file = functools.cache(lambda path: opened.enter_context(open(path, "rb")))
        for piece in pieces:
            if isinstance(piece, Extent):
                copy_range(open_file(piece.path), target, piece.start, piece.length)
                written += piece.length
            else:
                written += target.write(piece)
            if written - sent >= PIECE:
                target.flush()
                start_writing(target, start + sent, written - sent)
                sent = written


def made_ahead(makers: Iterable[Callable[[], Made]]) -> Iterator[Made]:
    """What each of these makes, in order; the next is made while the caller has one."""
    from concurrent.futures import Future, ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        ahead: Future[Made] | None = None
        for make in makers:
            following = pool.submit(make)
            if ahead is not None:
                yield ahead.result()
            ahead = following
        if ahead is not None:
            yield ahead.result()


def copy_range(source: BinaryIO, target: BinaryIO, start: int, length: int) -> None:
    """Appends `length` bytes of a file, from `start` on, to another one.

    Raises:
        CheckpointError: the source ends before.
        OSError: the target cannot take them.
    """
    done = _copy_by_kernel(source, target, start, length) if target.seekable() else 0
    source.seek(start + done)
    while done < length:
        piece = source.read(min(length - done, BUFFER))
        if not piece:
            raise CheckpointError("was cut short while it was read", where=source.name)
        target.write(piece)
        done += len(piece)


def _copy_by_kernel(source: BinaryIO, target: BinaryIO, start: int, length: int) -> int:
    """How much of it the kernel copied; the target stands behind that."""
    if sys.platform != "linux":
        return 0
    from os import copy_file_range

    target.flush()
    at, done = target.tell(), 0
    try:
        while done < length:
            count = min(PIECE, length - done)
            count = copy_file_range(
                source.fileno(), target.fileno(), count, start + done, at + done
            )
            if not count:
                break
            if count == PIECE:
                start_writing(target, at + done, count)
            done += count
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    target.seek(at + done)
    return done


def start_writing(target: BinaryIO, start: int, length: int) -> None:
    """Sets the disk to work on what was written, so that less is left for the last sync.

    Linux starts to write a stretch back when it is told that it will not be needed; what is not on
    the disk yet stays in memory.
    """
    if sys.platform == "linux":
        from os import POSIX_FADV_DONTNEED, posix_fadvise

        with contextlib.suppress(OSError):  # a pipe; a failing disk is told of by the sync
            posix_fadvise(target.fileno(), start, length, POSIX_FADV_DONTNEED)
