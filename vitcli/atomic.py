"""Files that are written whole or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from vitcli.errors import OutputError


@contextlib.contextmanager
def whole_file(path: str | Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it when the block ends without an error.

    Whatever ends the block early (an error, Ctrl-C, a full disk) leaves the target as it was and
    no temporary file behind. The permissions of a file that is replaced stay. A symbolic link stays
    a link: its target is replaced. A device, a pipe and /dev/stdout cannot be replaced and are
    written to directly.

    Args:
        durable: whether the file must last through a power cut.

    Raises:
        OutputError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise OutputError("cannot be written: it is a directory", where=path)
        number = _descriptor(path)
        if number is not None or (os.path.exists(path) and not os.path.isfile(path)):
            with open(path if number is None else os.dup(number), "wb") as file:
                yield file
            return
        temporary = _temporary(target)
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # there is none, or the file system has no modes
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_directory(target.parent)
    except BrokenPipeError:
        raise  # of the reader of another output
    except (OSError, UnicodeEncodeError) as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def whole_directory(path: str | Path) -> Iterator[Path]:
    """A temporary directory beside `path` (or in it, if it exists: it may be mounted), whose files
    move there when the block ends without an error: all of them, or none. Other files in `path`
    stay. JSON and Markdown files, which describe the others, move last.

    Raises:
        OutputError: the directory or a file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary(target / "files" if target.is_dir() else target)
        temporary.mkdir()
        try:
            yield temporary
            if target.is_dir():
                for file in sorted(temporary.iterdir(), key=_describes):
                    os.replace(file, target / file.name)
                temporary.rmdir()
            else:
                os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_directory(target.parent)
    except OutputError as error:  # of a file in the temporary directory
        where = str(error.where).replace(str(temporary), str(path))
        raise OutputError(error.what, where=where, hint=error.hint) from error
    except OSError as error:
        raise cannot_write(path, error) from error


def make_directory(path: str | Path) -> None:
    """Makes a directory and those above it, where there are none. Raises OutputError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def made_directory(path: str | Path) -> Iterator[None]:
    """Makes a directory if there is none; in the end it is removed again if nothing was put there.

    Raises:
        OutputError: it cannot be made.
    """
    is_new = not os.path.isdir(path)
    make_directory(path)
    try:
        yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(path)


def _describes(file: Path) -> bool:
    return file.suffix in (".json", ".md")


def cannot_write(path: str | Path, error: Exception) -> OutputError:
    """What it means that the system refused an output."""
    directory = Path(path).parent
    if isinstance(error, FileExistsError | NotADirectoryError):
        places = (Path(path), *Path(path).parents)
        file = next((p for p in places if os.path.lexists(p) and not p.is_dir()), path)
        what = f"cannot be written: '{file}' is not a directory"
        return OutputError(what, where=path, hint="choose another output")
    if isinstance(error, FileNotFoundError) and not directory.exists():
        what = f"cannot be written: the directory '{directory}' does not exist"
        return OutputError(what, where=path, hint="create the directory first")
    reason = getattr(error, "strerror", None) or error
    return OutputError(f"cannot be written: {reason}", where=path)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """An empty directory among the system's temporary files, which is removed in the end; so are
    those that killed processes left behind."""
    import tempfile  # slow to import

    place = _temporary(Path(tempfile.gettempdir(), "scratch"))
    place.mkdir(mode=0o700)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON file as `write_text` does."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _temporary(target: Path) -> Path:
    """A new name beside `target`, with the machine and the process that writes there."""
    _clear_abandoned(target.parent)
    return target.with_name(f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}.tmp")


def _prefix() -> str:
    """How the names of temporary files begin. Containers that share a host name number their
    processes separately, so on Linux the PID namespace is part of it."""
    machine, namespace = os.uname().nodename if hasattr(os, "uname") else "", 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f".vit-{machine}-{namespace}-"


_PREFIX = _prefix()


@functools.cache
def _clear_abandoned(directory: Path) -> None:
    """Removes the temporary files that killed processes of this machine left in a directory."""
    pattern = re.compile(re.escape(_PREFIX) + r"(\d{1,9})-[0-9a-f]{8}\.tmp")
    try:
        left = [(path, pattern.fullmatch(path.name)) for path in directory.iterdir()]
    except OSError:
        return
    for path, found in left:
        if found and not _is_running(int(found[1])):
            with contextlib.suppress(OSError):  # it may be another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_running(process: int) -> bool:
    if os.name != "posix":  # where signal 0 would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _descriptor(path: str | Path) -> int | None:
    """The number of the open file that a path stands for: 1 for /dev/stdout."""
    named = {"/dev/stdout": 1, "/dev/stderr": 2}
    found = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path))
    return int(found[1]) if found else named.get(str(path))


def _sync_directory(directory: Path) -> None:
    """Make a rename last through a power cut, where directories can be synced (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
