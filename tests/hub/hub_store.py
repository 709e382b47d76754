"""What the loopback Hub keeps on disk: contents by their sha256, and one JSON file per commit.

    blobs/SHA256                            every content, once
    repos/ORG/NAME/repo.json                private, gated, and which commit each branch is at
    repos/ORG/NAME/commits/COMMIT.json      parent, message, and every file: its sha256, size, ...

A commit is there once repo.json names it, and that file is replaced in one step: a server that is
killed in the middle of a push leaves the repo as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAIN = "main"
CHUNK = 1 << 20


class Refusal(Exception):
    """An answer of no: an HTTP status, the Hub's X-Error-Code, and what to say."""

    def __init__(self, status: int, message: str, code: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.fields = status, code, fields


def is_large(sample: bytes, size: int) -> bool:
    """Whether the Hub would keep a file beside git: binary ones, and large ones."""
    return size > 0 and (b"\0" in sample or size > 10_000_000)


class HubStore:
    """The repos of one folder. Every change is made under one lock."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.lock = threading.RLock()
        for folder in ("blobs", "repos"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    # Contents -----------------------------------------------------------------------------------

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def keep(self, content: bytes | Path) -> dict[str, Any]:
        """Keeps a content; returns what a commit says of its file."""
        if isinstance(content, Path):
            with open(content, "rb") as file:
                return self.keep_stream(file.read, content.stat().st_size)
        blob = self.blob(hashlib.sha256(content).hexdigest())
        if not blob.exists():
            _write(blob, content)
        return self.describe(blob.name)

    def keep_stream(
        self, read: Callable[[int], bytes], size: int, sha256: str | None = None
    ) -> dict[str, Any]:
        """Keeps the `size` bytes that `read` gives, if they are all there and have the sha256."""
        part = self.root / "blobs" / f".{os.urandom(8).hex()}.part"
        digest, left = hashlib.sha256(), size
        try:
            with open(part, "wb") as file:
                while left and (chunk := read(min(left, CHUNK))):
                    digest.update(chunk)
                    file.write(chunk)
                    left -= len(chunk)
            if left or sha256 not in (None, digest.hexdigest()):
                raise Refusal(400, "the content is not what was announced")
            os.replace(part, self.blob(digest.hexdigest()))
        finally:
            part.unlink(missing_ok=True)
        return self.describe(digest.hexdigest())

    def describe(self, sha256: str) -> dict[str, Any]:
        """A file as a commit has it: sha256, size, whether it is large, and git's name of it."""
        blob = self.blob(sha256)
        size = blob.stat().st_size
        with open(blob, "rb") as file:
            large = is_large(file.read(512), size)
        oid = f"version lfs\noid sha256:{sha256}\nsize {size}\n".encode() if large else b""
        content = oid or blob.read_bytes()
        git = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
        return {"sha256": sha256, "size": size, "large": large, "oid": git}

    # Repos --------------------------------------------------------------------------------------

    def folder(self, repo: str) -> Path:
        if repo.count("/") != 1 or any(part in ("", ".", "..") for part in repo.split("/")):
            raise Refusal(400, f"{repo} is no name of a repo")
        return self.root / "repos" / repo

    def exists(self, repo: str) -> bool:
        return (self.folder(repo) / "repo.json").is_file()

    def read(self, repo: str) -> dict[str, Any]:
        """A repo's visibility and branches: {"private", "gated", "refs": {name: commit}}."""
        return json.loads((self.folder(repo) / "repo.json").read_text())

    def write(self, repo: str, state: dict[str, Any]) -> None:
        _write(self.folder(repo) / "repo.json", json.dumps(state, indent=1).encode())

    def create(self, repo: str, private: bool = False, gated: bool = False) -> None:
        """An empty repo: one commit without files."""
        with self.lock:
            (self.folder(repo) / "commits").mkdir(parents=True, exist_ok=True)
            first = self._write_commit(repo, None, "initial commit", {})
            self.write(repo, {"private": private, "gated": gated, "refs": {MAIN: first}})

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, Any]]:
        """The commit of a branch, a tag or (the beginning of) a commit's name."""
        commit = self.read(repo)["refs"].get(revision)
        commits = self.folder(repo) / "commits"
        if commit is None and len(revision) >= 7 and revision.isalnum():
            commit = next((file.stem for file in commits.glob(f"{revision}*.json")), None)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, json.loads((commits / f"{commit}.json").read_text())

    def history(self, repo: str, revision: str) -> list[tuple[str, dict[str, Any]]]:
        """A revision's commits, the latest first."""
        found = [self.find(repo, revision)]
        while parent := found[-1][1]["parent"]:
            found.append(self.find(repo, parent))
        return found

    def branch(self, repo: str, name: str, start: str) -> None:
        with self.lock:
            state = self.read(repo)
            if name in state["refs"]:
                raise Refusal(409, f"Reference already exists: {name}")
            state["refs"][name] = self.find(repo, start)[0]
            self.write(repo, state)

    def commit(
        self,
        repo: str,
        files: Mapping[str, dict[str, Any] | None],
        title: str = "upload",
        revision: str = MAIN,
        parent: str | None = None,
        create_pr: bool = False,
    ) -> tuple[str, str]:
        """One commit of new files (as `describe` has them) and removed ones (None; a folder's name
        ends in "/"); returns its name and the branch it is on."""
        with self.lock:
            head, before = self.find(repo, revision)
            if parent is not None and not create_pr and not head.startswith(parent):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            if parent is not None and create_pr:
                head, before = self.find(repo, parent)
            after = dict(before["files"])
            for path, described in files.items():
                if described is not None:
                    after[path] = described
                    continue
                gone = [p for p in after if p == path or (path[-1:] == "/" and p.startswith(path))]
                if not gone:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
                for name in gone:
                    del after[name]
            state = self.read(repo)
            if create_pr:
                revision = f"refs/pr/{1 + sum(ref.startswith('refs/pr/') for ref in state['refs'])}"
            state["refs"][revision] = self._write_commit(repo, head, title, after)
            self.write(repo, state)
            return state["refs"][revision], revision

    def _write_commit(
        self, repo: str, parent: str | None, title: str, files: dict[str, Any]
    ) -> str:
        commit = {"parent": parent, "title": title, "date": now(), "files": files}
        content = json.dumps(commit, indent=1).encode()
        name = hashlib.sha1(content).hexdigest()
        _write(self.folder(repo) / "commits" / f"{name}.json", content)
        return name


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _write(path: Path, content: bytes) -> None:
    """A file, whole or not at all."""
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    part.write_bytes(content)
    os.replace(part, path)
