"""The Hub's cache on this disk, read by its layout: to look into it needs no client.

`models--ORG--NAME/refs/BRANCH` holds a commit, `snapshots/COMMIT/` that commit's files, which are
links into `blobs/` (huggingface_hub's documentation, "Understand caching").
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
from pathlib import Path

from vitcli.errors import HubError

WEIGHTS = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".tar")
"""Suffixes of files that hold a model."""


def root() -> Path:
    """Where the client keeps what it fetched, by the variables that it reads itself."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(home, "huggingface")
    path = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(path or os.path.join(home, "hub"))))


def folder(repo: str) -> Path:
    """Where a repo's files are kept, whether they are there or not."""
    return root() / f"models--{repo.replace('/', '--')}"


def snapshot(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repo's files at a branch or a commit, if it holds weights; else None."""
    kept = folder(repo)
    revision = revision or "main"
    try:
        commit = (kept / "refs" / revision).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    try:
        files = list((kept / "snapshots" / commit).iterdir())
    except OSError:
        return None
    whole = any(file.suffix in WEIGHTS and file.exists() for file in files)
    return kept / "snapshots" / commit if whole else None


def size(repo: str) -> int:
    """Bytes that a repo's files take, each once."""
    blobs = folder(repo) / "blobs"
    if not blobs.is_dir():
        return 0
    return sum(file.stat().st_size for file in blobs.iterdir() if file.exists())


def remove(repo: str) -> int:
    """Takes a repo out of the cache, all of its revisions; returns the bytes that this freed.

    The client does it, which knows of files that it keeps once for several repos.

    Raises:
        HubError: it is not there, or cannot be removed.
    """
    from huggingface_hub import scan_cache_dir

    kept = folder(repo)
    if not kept.is_dir():
        raise HubError("is not in the cache", where=repo)
    freed, cached = 0, scan_cache_dir(root())
    try:
        for found in cached.repos:
            if found.repo_type == "model" and found.repo_id == repo:
                # Of this repo alone: a copy of it has the same commits.
                alone = dataclasses.replace(cached, repos=frozenset({found}))
                revisions = (revision.commit_hash for revision in found.revisions)
                plan = alone.delete_revisions(*revisions)
                freed = int(plan.expected_freed_size)
                plan.execute()
        if kept.is_dir():  # what the client does not count as a repo, such as one cut short
            files = (file.lstat() for file in kept.rglob("*"))
            freed += sum(file.st_size for file in files if stat.S_ISREG(file.st_mode))
            shutil.rmtree(kept)
    except OSError as error:
        raise HubError(f"cannot be removed: {error.strerror}", where=kept) from error
    return freed
