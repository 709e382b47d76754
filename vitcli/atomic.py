"""Atomic writes of files and directories. Standard library only."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from vitcli.errors import OutputError


@contextlib.contextmanager
def atomic_write(path: str | Path, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it when the block ends without an error.

    If the block fails (an error, Ctrl-C, a full disk), the target is unchanged and the temporary
    file is removed. A replaced file keeps its permissions. Symlinks are followed: the link stays
    and its target is replaced. Devices, pipes and /dev/stdout cannot be replaced and are written
    to directly.

    Args:
        durable: whether the file must survive a power failure.

    Raises:
        OutputError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise OutputError("cannot be written: it is a directory", where=path)
        descriptor = _get_descriptor(path)
        if descriptor is not None or (os.path.exists(path) and not os.path.isfile(path)):
            with open(path if descriptor is None else os.dup(descriptor), "wb") as file:
                yield file
            return
        temporary = _temporary_path(target)
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            with contextlib.suppress(OSError):  # no such file, or no modes on the file system
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_directory(target.parent)
    except BrokenPipeError:
        raise  # from another output, whose reader is gone
    except (OSError, UnicodeEncodeError) as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Create a temporary directory beside `path` (or in it if it exists: it may be a mount point),
    whose files are moved to `path` when the block ends without an error. Other files in `path` are
    kept. JSON and Markdown files, which describe the others, are moved last.

    Raises:
        OutputError: the directory or a file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        parent = target if target.is_dir() else target.parent
        with temporary_directory(parent, mode=0o777) as temporary:
            yield temporary
            if target.is_dir():
                for file in sorted(temporary.iterdir(), key=lambda f: f.suffix in (".json", ".md")):
                    os.replace(file, target / file.name)
            else:
                os.rename(temporary, target)
        _sync_directory(target.parent)
    except OutputError as error:  # from a file in the temporary directory
        where = str(error.where).replace(str(temporary), str(path))
        raise OutputError(error.what, where=where, hint=error.hint) from error
    except OSError as error:
        raise cannot_write(path, error) from error


@contextlib.contextmanager
def temporary_directory(parent: str | Path, mode: int = 0o700) -> Iterator[Path]:
    """Create a directory in `parent` for the block, and remove those that killed processes left."""
    path = _temporary_path(Path(parent) / "directory")
    path.mkdir(mode)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def make_directory(path: str | Path) -> None:
    """Create a directory and its parents if they do not exist. Raises OutputError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: str | Path, error: Exception) -> OutputError:
    """The OutputError for a failed write to `path`."""
    directory = Path(path).parent
    if isinstance(error, FileExistsError | NotADirectoryError):
        paths = (Path(path), *Path(path).parents)
        file = next((p for p in paths if os.path.lexists(p) and not p.is_dir()), path)
        message = f"cannot be written: '{file}' is not a directory"
        return OutputError(message, where=path, hint="choose another path")
    if isinstance(error, FileNotFoundError) and not directory.exists():
        message = f"cannot be written: the directory '{directory}' does not exist"
        return OutputError(message, where=path, hint="create the directory first")
    reason = getattr(error, "strerror", None) or error
    return OutputError(f"cannot be written: {reason}", where=path)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file (UTF-8), whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Write a JSON file, like `write_text`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _temporary_path(target: Path) -> Path:
    """A new temporary path beside `target`, whose name identifies the machine and the process."""
    if target.parent not in _directories:
        _directories.add(target.parent)
        _remove_temporary(target.parent, lambda pid: not _is_running(pid))
    return target.with_name(f"{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}.tmp")


def _temporary_prefix() -> str:
    """The prefix of temporary file names. Containers with the same hostname may have equal PIDs,
    so on Linux the PID namespace is part of it."""
    hostname, namespace = os.uname().nodename if hasattr(os, "uname") else "", 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f".vit-{hostname}-{namespace}-"


_PREFIX = _temporary_prefix()
_directories = set[Path]()
"""Directories in which this process has created temporary files."""


def remove_own() -> None:
    """Remove the temporary files of this process, before an exit without unwinding."""
    for directory in _directories:
        _remove_temporary(directory, lambda pid: pid == os.getpid())


def _remove_temporary(directory: Path, applies: Callable[[int], bool]) -> None:
    """Remove the temporary files of some processes of this machine, given by PID, such as those
    that killed processes left."""
    pattern = re.compile(re.escape(_PREFIX) + r"(\d{1,9})-[0-9a-f]{8}\.tmp")
    try:
        matches = [(path, pattern.fullmatch(path.name)) for path in directory.iterdir()]
    except OSError:
        return
    for path, match in matches:
        if match and applies(int(match[1])):
            with contextlib.suppress(OSError):  # it may be another user's
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_running(pid: int) -> bool:
    if os.name != "posix":  # on Windows, signal 0 would terminate the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _get_descriptor(path: str | Path) -> int | None:
    """The file descriptor that a path refers to, such as 1 for /dev/stdout, if any."""
    standard_streams = {"/dev/stdout": 1, "/dev/stderr": 2}
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", str(path))
    return int(match[1]) if match else standard_streams.get(str(path))


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power failure, where directories can be synced (not on Windows)."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
