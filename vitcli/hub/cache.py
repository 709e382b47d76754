"""A repo in the cache of the Hub client, and the notes that `vit` keeps there.

    models--ORG--NAME/refs/main            the last known commit of main
    models--ORG--NAME/snapshots/COMMIT/    its files: symlinks into blobs/
    models--ORG--NAME/blobs/               file contents, named by digest
    models--ORG--NAME/trees/COMMIT.json    the commit's files as the client listed them
    models--ORG--NAME/.vit/COMMIT.json     ours: the commit's files as the Hub lists them
    models--ORG--NAME/.vit/DIGEST          ours: size and mtime of a file that was verified

The layout is the client's (https://huggingface.co/docs/huggingface_hub/guides/manage-cache), so
downloads are shared with other tools. It is read without the client, because importing that takes
half of the time of `vit models`.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitcli.atomic import write_text
from vitcli.errors import HubError, OutputError, wrap_os_errors

COMMIT = re.compile(r"[0-9a-f]{40}")
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class HubFile(NamedTuple):
    """A file of a commit."""

    digest: str
    """sha256 for a large file, git's sha1 for others; "" if unknown."""
    size: int | None = None


Listing = dict[str, HubFile]


def root() -> Path:
    """The client's cache directory, from the environment variables that the client reads."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    path = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(path or os.path.join(home, "hub"))))


def cached_repos() -> Iterator[tuple[str, str | None]]:
    """The repos that `vit` has downloaded and that are still cached, with each branch and tag (None
    for main), and the hash of each commit that is none of these."""
    for notes in sorted(root().glob("models--*/.vit")):
        repo = notes.parent.name.removeprefix("models--").replace("--", "/", 1)
        refs = notes.parent / "refs"
        names = {path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file()}
        commits = {path.name for path in (notes.parent / "snapshots").glob("*")}
        commits &= {path.stem for path in notes.glob("*.json")}
        names |= commits - {RepoCache(repo).commit(name) for name in names}
        yield from ((repo, None if name == "main" else name) for name in sorted(names) or ["main"])


def check_space(directory: Path, needed: int, purpose: str, repo: str, variable: str) -> None:
    """Raise HubError if the disk of a directory, which an environment variable sets, has fewer than
    `needed` bytes free."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise HubError(
            f"{purpose} needs {math.ceil(needed / 1e6):,} MB, but {existing} has only "
            f"{free // 10**6:,} MB free",
            where=repo,
            hint=f"free some space, or set {variable} to a directory on another disk",
        )


@dataclass(frozen=True)
class RepoCache:
    """A repo in the cache."""

    repo: str

    @property
    def directory(self) -> Path:
        return root() / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.directory / "snapshots" / commit

    def blob(self, digest: str) -> Path:
        return self.directory / "blobs" / digest

    def commit(self, revision: str) -> str | None:
        """The commit of a branch when it was last fetched; a commit hash is returned as it is."""
        if COMMIT.fullmatch(revision):
            return revision
        with contextlib.suppress(OSError, ValueError):
            commit = (self.directory / "refs" / revision).read_text("utf-8").strip()
            return commit if COMMIT.fullmatch(commit) else None
        return None

    def listing(self, commit: str) -> Listing | None:
        """The commit's files as the Hub lists them; None if that is not recorded."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            text = self._note(f"{commit}.json").read_text("utf-8")
            return {name: HubFile(*file) for name, file in json.loads(text)["files"].items()}
        return None

    def tree(self, commit: str) -> Listing:
        """The commit's files at the top level, of unknown digests, if the client recorded them."""
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            text = (self.directory / "trees" / f"{commit}.json").read_text("utf-8")
            names = json.loads(text)["files"]
            return {name: HubFile("") for name in names if Path(name).name == name}
        return {}

    def cached_files(self, commit: str) -> Listing:
        """The commit's cached files, whichever tool downloaded them."""
        listing, snapshot = self.listing(commit) or {}, self.snapshot(commit)
        files = (path for path in snapshot.rglob("*") if path.is_file())
        paths = {path.relative_to(snapshot).as_posix(): path for path in files}
        return {n: listing.get(n) or HubFile(_digest_in_name(p)) for n, p in paths.items()}

    def record(self, revision: str, commit: str, listing: Listing) -> None:
        """Record the Hub's response once the files are cached. If the cache is not writable, the
        request is made every time."""
        with contextlib.suppress(OSError, OutputError):
            if self.listing(commit) != listing:
                self._write_note(f"{commit}.json", json.dumps({"files": listing}, indent=1))
            ref = self.directory / "refs" / revision
            if self.commit(revision) != commit:
                ref.parent.mkdir(parents=True, exist_ok=True)
                write_text(ref, commit)

    def is_valid(self, path: Path, digest: str) -> bool:
        """Whether a file matches its digest. A match is recorded with the file's size and mtime.
        If the digest is unknown, any existing file is accepted."""
        digest = digest or _digest_in_name(path)
        if not path.is_file() or not digest:
            return path.is_file()
        status = path.stat()
        state = f"{status.st_size} {status.st_mtime_ns}"
        with contextlib.suppress(OSError, ValueError):
            if self._note(digest).read_text("utf-8") == state:
                return True
        if digest_of(path, len(digest)) != digest:
            return False
        with contextlib.suppress(OSError, OutputError):
            self._write_note(digest, state)
        return True

    def link(self, commit: str, name: str, digest: str) -> Path:
        """Link a blob into a snapshot, as the client does."""
        path = self.snapshot(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(self.blob(digest), path.parent))
        except OSError:  # Windows without permission to create symlinks
            os.replace(self.blob(digest), path)
        return path

    def drop(self, commit: str, name: str, digest: str) -> None:
        """Remove a damaged file: the repo's own link and blob, but nothing they point to."""
        (self.snapshot(commit) / name).unlink(missing_ok=True)
        if digest:
            self.blob(digest).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, digest: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock that the client also holds while it downloads a blob."""
        from filelock import Timeout
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        path = root() / ".locks" / self.directory.name / f"{digest}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(WeakFileLock(path, timeout=0.1))
            except Timeout:
                on_wait()
                stack.enter_context(WeakFileLock(path))
            yield

    def size(self) -> int:
        """Size of the repo in bytes, counting each file once."""
        paths = (p for name in ("blobs", "snapshots") for p in (self.directory / name).rglob("*"))
        files = {path.resolve() for path in paths if path.is_file()}
        return sum(map(size_of, files))

    def remove(self) -> int:
        """Remove all revisions of the repo; return its size in bytes. The client does it, because
        several repos may share blobs.

        Raises:
            HubError: the repo cannot be removed.
        """
        from huggingface_hub import scan_cache_dir

        directory, size = self.directory, self.size()
        with wrap_os_errors(HubError, "cannot be removed", directory):
            cached = scan_cache_dir(root())
            for repo in cached.repos:
                if repo.repo_type == "model" and repo.repo_id == self.repo:
                    # Only this repo: a copy of it has the same commits.
                    only_this = dataclasses.replace(cached, repos=frozenset({repo}))
                    only_this.delete_revisions(*(r.commit_hash for r in repo.revisions)).execute()
            if directory.is_dir():  # not a repo to the client, such as an incomplete one
                shutil.rmtree(directory)
        return size

    def _note(self, name: str) -> Path:
        return self.directory / ".vit" / name

    def _write_note(self, name: str, text: str) -> None:
        self._note(name).parent.mkdir(exist_ok=True)
        write_text(self._note(name), text)


def _digest_in_name(path: Path) -> str:
    """The digest in the name of a blob, from the first symlink: the next may lead into a store that
    several repos share, where blobs have other names."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if DIGEST.fullmatch(name) else ""


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if there is none, as another process may have moved it."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def digest_of(source: Path | bytes, length: int) -> str:
    """The sha256 (64 digits) or git's sha1 (40) of a file or its content."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        if length == 64:
            return hashlib.file_digest(file, "sha256").hexdigest()
        content = file.read()
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
