"""One repo in the ordinary cache of the Hub's client, and what we remember of it there.

    models--ORG--NAME/refs/main            the commit that main was at
    models--ORG--NAME/snapshots/COMMIT/    its files: links into blobs/
    models--ORG--NAME/blobs/               contents, by their digest
    models--ORG--NAME/.vit/COMMIT.json     ours: what the Hub says that the commit's files are
    models--ORG--NAME/.vit/DIGEST          ours: size and time of a content that was found whole

The layout is the client's (https://huggingface.co/docs/huggingface_hub/guides/manage-cache), so
what others fetched is found here, and what we fetch is found by them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vitcli.atomic import write_text
from vitcli.errors import OutputError
from vitcli.hub import cache

COMMIT = re.compile(r"[0-9a-f]{40}")
Listing = dict[str, str]
"""Names of files to their digests: sha256 of large files, git's sha1 of the others; "" unknown."""


@dataclass(frozen=True)
class RepoCache:
    """What the cache has of a repo."""

    repo: str

    @property
    def folder(self) -> Path:
        return cache.folder(self.repo)

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def commit(self, revision: str) -> str | None:
        """The commit that a branch was at when somebody last looked; a commit is itself."""
        if COMMIT.fullmatch(revision):
            return revision
        with contextlib.suppress(OSError):
            return (self.folder / "refs" / revision).read_text("utf-8").strip()
        return None

    def listing(self, commit: str) -> Listing | None:
        """The commit's files as the Hub lists them; None if we have not asked yet."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(self._note(f"{commit}.json").read_text("utf-8")))
        return None

    def present(self, commit: str) -> Listing:
        """The commit's files that are here, whoever fetched them."""
        listing, snapshot = self.listing(commit) or {}, self.snapshot(commit)
        files = (path for path in snapshot.rglob("*") if path.is_file())
        found = {path.relative_to(snapshot).as_posix(): path for path in files}
        return {name: listing.get(name) or _digest_in_name(path) for name, path in found.items()}

    def remember(self, revision: str, commit: str, listing: Listing) -> None:
        """Writes down what the Hub said, once the files are here. A cache that cannot be written
        is asked about every time."""
        with contextlib.suppress(OSError, OutputError):
            note = self._note(f"{commit}.json")
            note.parent.mkdir(exist_ok=True)
            if self.listing(commit) != listing:
                write_text(note, json.dumps(listing, indent=1))
            ref = self.folder / "refs" / revision
            if not COMMIT.fullmatch(revision) and self.commit(revision) != commit:
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_text(ref, commit)

    def is_whole(self, path: Path, digest: str) -> bool:
        """Whether a file has its digest. One that was found whole is remembered with its size and
        time, so that the next start costs nothing. Where neither the Hub nor the file's own name in
        the cache has a digest, it is taken as it is."""
        digest = digest or _digest_in_name(path)
        if not digest:
            return True
        stat = path.stat()
        seen = f"{stat.st_size} {stat.st_mtime_ns}"
        note = self._note(digest)
        with contextlib.suppress(OSError):
            if note.read_text("utf-8") == seen:
                return True
        if _digest(path, digest) != digest:
            return False
        with contextlib.suppress(OSError, OutputError):
            note.parent.mkdir(exist_ok=True)
            write_text(note, seen)
        return True

    def remove(self, path: Path) -> None:
        """Takes a damaged file out of the cache: what points to it and all that is pointed to."""
        while True:
            target = path.parent / os.readlink(path) if path.is_symlink() else None
            path.unlink(missing_ok=True)
            if target is None:
                return
            path = target

    def clear_incomplete(self) -> None:
        """Removes what downloads left behind that were killed: what is locked is somebody's."""
        from filelock import Timeout

        for left in (self.folder / "blobs").glob("*.incomplete"):
            with (
                contextlib.suppress(OSError, Timeout),
                self.locked(left.name.partition(".")[0], timeout=0.01),
            ):
                left.unlink()

    @contextlib.contextmanager
    def locked(self, digest: str, timeout: float | None = None) -> Iterator[None]:
        """Holds the lock that the client holds while it downloads a content.

        Raises:
            filelock.Timeout: somebody else held it all the time.
        """
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        locks = self.folder.parent / ".locks" / self.folder.name
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{digest}.lock", timeout=timeout):
            yield

    def _note(self, name: str) -> Path:
        return self.folder / ".vit" / name


def _digest_in_name(path: Path) -> str:
    """The digest that a blob is called by: that of the first link, for the last may lead into a
    store that several repos share, where contents have other names."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else ""


def _digest(path: Path, like: str) -> str:
    """A file's sha256, or git's sha1 of it where `like` is one."""
    with open(path, "rb") as file:
        if len(like) == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        header = f"blob {path.stat().st_size}\0".encode()
        return hashlib.sha1(header + file.read(), usedforsecurity=False).hexdigest()
