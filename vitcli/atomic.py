"""Files that are written whole or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vitcli.errors import OutputError


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that takes its place once the block has ended well.

    Whatever ends the block early (an error, Ctrl-C, a full disk) leaves the target as it was and
    no temporary file behind. A symbolic link stays a link: its target is replaced. A device, a
    pipe, or what is open already (/dev/stdout, wherever it goes) is no file that could be replaced:
    it is written to as it comes.

    Raises:
        OutputError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        if (number := _descriptor(path)) is not None:
            with open(os.dup(number), "wb") as file:
                yield file
            return
        if target.is_dir():
            raise OutputError("cannot be written: it is a folder", where=path)
        if os.path.exists(path) and not os.path.isfile(path):
            with open(path, "wb") as file:
                yield file
            return
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=path) from error


@contextlib.contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """A temporary folder beside `path`, whose files take their places there once the block has
    ended well: all of them, or none. What else is in `path` stays.

    Raises:
        OutputError: the folder or a file cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            yield temporary
            if target.is_dir():
                for file in sorted(temporary.iterdir()):
                    os.replace(file, target / file.name)
                temporary.rmdir()
            else:
                os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(target.parent)
    except OutputError as error:  # of a file in the temporary folder
        where = str(error.where).replace(str(temporary), str(path))
        raise OutputError(error.what, where=where, hint=error.hint) from error
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=path) from error


def write_text(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    with whole_file(path) as file:
        file.write(text.encode())


def _descriptor(path: str | Path) -> int | None:
    """The number of the open file that a path stands for: 1 for /dev/stdout."""
    named = {"/dev/stdout": 1, "/dev/stderr": 2}
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path))
    return int(found[1]) if found else named.get(str(path))


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where folders can be synced (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
