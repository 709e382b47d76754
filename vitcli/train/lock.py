"""One process at a time in a run's folder."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from vitcli.errors import OutputError, RunError

FAR = 1 << 30
"""Windows locks bytes, and nobody may read them: one behind the end of the file is locked."""


class RunLock:
    """A lock on a file that the system lifts when the process ends, however it ends.

    Entering takes it where the folder is there already; `take` takes it once it was made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.path.parent.is_dir():
            self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):  # Windows does not remove what is open
                self.path.unlink()
            self.file.close()
            self.file = None

    def take(self) -> None:
        """Locks the folder, if this object has not yet.

        Raises:
            RunError: another process has it.
            OutputError: the folder cannot be written to.
        """
        while self.file is None:
            try:
                file = open(self.path, "a+b")  # noqa: SIM115
            except OSError as error:
                raise OutputError(
                    f"cannot be used as a run's folder: {error.strerror}", where=self.path.parent
                ) from error
            if not _lock(file):
                file.seek(0)
                number = file.read(32).decode(errors="replace").strip()
                file.close()
                raise RunError(
                    f"another process ({number or 'unknown'}) is running in this folder",
                    where=self.path.parent,
                    hint="wait for it, stop it, or choose another --output",
                )
            if self._is_ours(file):
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
                file.flush()
                self.file = file
            else:  # its last owner has just removed it
                file.close()

    def _is_ours(self, file: BinaryIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except OSError:
            return False


def _lock(file: BinaryIO) -> bool:
    """Whether the lock could be had. File systems without locks let everyone in."""
    if sys.platform == "win32":
        import msvcrt

        file.seek(FAR)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
    else:
        import fcntl

        # Not flock(): workers inherit that, and would hold it for a while after a kill -9.
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return True
    return True
