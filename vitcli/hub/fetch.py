"""Downloading checkpoints from the Hub into the client's regular cache, with verification.

The client looks up repos and makes requests. Its downloads are not used, because it names blobs by
whatever ETag it receives, accepts damaged files, and restarts from the first byte after Ctrl-C.
A file is downloaded by plain HTTP (not Xet, which cannot be resumed) to `blobs/DIGEST.incomplete`,
compared with the digest that the Hub lists, and only then moved into place.

`huggingface_hub` is imported only when a request is made.
"""

import contextlib
import os
import re
import threading
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitcli.errors import CheckpointError, HubError, warn
from vitcli.hub import registry
from vitcli.hub.cache import COMMIT, DIGEST, HubFile, Listing, RepoCache, check_space, root, size_of
from vitcli.hub_requests import Progress as Progress
from vitcli.hub_requests import Transfer, call_hub, not_found, offline_switch
from vitcli.weight_files import INDEX, PICKLED_INDEX, PICKLES, SAFE, weights_among
from vitcli.words import join_or

MAIN, CONFIG = "main", "config.json"


def fetch(
    repo: str,
    revision: str | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Path:
    """Return the weights file of a repo in the cache (for shards, their index). Missing files are
    downloaded, including the configurations read beside it.

    If the Hub is unavailable, the cached revision is used, with a warning.

    Args:
        timeout: as for `hub_requests.call_hub`.

    Raises:
        HubError: the repo, the revision or a file does not exist, access is denied, the network
            fails, a file arrives damaged twice, or the weights are pickled and `allow_pickle` is
            not set.
    """
    from vitcli.layouts.catalog import config_files

    cache, revision = RepoCache(repo), revision or MAIN
    _check_name(repo, revision)
    state = _resolve(
        cache, revision, bool(offline_switch(offline)), timeout, on_progress or _no_progress
    )
    weights = _choose_weights(state.listing, repo, allow_pickle)
    file = state.get([*(name for name in config_files() if name in state.listing), weights])
    if weights in (INDEX, PICKLED_INDEX):
        state.get(_shard_names(file))
    if state.unavailable is None:
        cache.record(revision, state.commit, state.listing)
    return file


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The directory of a repo's checkpoint if it is fully cached; makes no requests."""
    cache = RepoCache(repo)
    commit = cache.commit(revision or MAIN)
    if commit is None:
        return None
    present, directory = _cached_files(cache, commit), cache.snapshot(commit)
    try:
        weights = _choose_weights(present, repo, allow_pickle=True)
        shards = _shard_names(directory / weights) if weights in (INDEX, PICKLED_INDEX) else ()
    except (HubError, CheckpointError):
        return None
    return directory if all(shard in present for shard in shards) else None


def reachable(repo: str, timeout: float = 3.0) -> bool:
    """Whether the Hub serves a repo's config.json within `timeout` seconds."""
    if offline_switch():
        return False
    answered = threading.Event()

    def request() -> None:
        from huggingface_hub import get_session, hf_hub_url

        with contextlib.suppress(Exception):
            if get_session().head(hf_hub_url(repo, CONFIG), timeout=timeout).is_success:
                answered.set()

    # In a thread, because a DNS lookup has no timeout of its own.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


# ---------------------------------------------------------------------------------------------
# The files of a revision


def _no_progress(transfer: Transfer) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class _Revision:
    """A commit of a repo: its files, and whether those that are not cached can be downloaded."""

    cache: RepoCache
    commit: str
    listing: Listing
    unavailable: HubError | None = None
    """Why nothing can be downloaded; None if it can."""
    timeout: float | None = None
    on_progress: Progress = _no_progress

    def get(self, names: Collection[str]) -> Path:
        """Make sure that files are cached and intact; return the last. Raises HubError."""
        repo, snapshot = self.cache.repo, self.cache.snapshot(self.commit)
        if unlisted := [name for name in names if name not in self.listing]:
            error = HubError(f"the repo has no {unlisted[0]}, which its index lists", where=repo)
            raise self.unavailable or error
        files = {name: self.listing[name] for name in names}
        absent = {n: f for n, f in files.items() if not self.cache.is_valid(snapshot / n, f.digest)}
        if absent and self.unavailable is not None:
            raise self._unavailable_error(next(iter(absent)), self.unavailable)
        new = [file for file in absent.values() if not self.cache.blob(file.digest).exists()]
        needed = sum((file.size or 0) - size_of(self._partial_path(file)) for file in new)
        check_space(root(), needed, "the download", repo, "HF_HUB_CACHE")
        for name, file in absent.items():
            self._download(name, file)
        return snapshot / list(names)[-1]

    def _unavailable_error(self, name: str, unavailable: HubError) -> HubError:
        """The error for a file that cannot be downloaded; if it is there but damaged, remove it."""
        what, hint = f"only partly in the cache: {name} is missing", unavailable.hint
        if (self.cache.snapshot(self.commit) / name).is_file():
            with contextlib.suppress(OSError):
                self.cache.drop(self.commit, name, self.listing[name].digest)
            what, hint = f"{name} in the cache is damaged", "download it again without --offline"
        return HubError(what, where=self.cache.repo, hint=hint)

    def _partial_path(self, file: HubFile) -> Path:
        return self.cache.blob(f"{file.digest}.incomplete")

    def _download(self, name: str, file: HubFile) -> None:
        """Download a file into the cache, unless another process does so in the meantime."""
        cache, digest = self.cache, file.digest
        waiting = Transfer(name, note=f"waiting for another process that is downloading {name}")

        def download(_: float) -> None:
            with cache.locked(digest, lambda: self.on_progress(waiting)):
                if cache.is_valid(cache.snapshot(self.commit) / name, digest):
                    return  # the other process has downloaded it
                if not cache.is_valid(cache.blob(digest), digest):
                    self._download_blob(name, file)
                cache.link(self.commit, name, digest)

        call_hub(cache.repo, download, name=name, timeout=0)  # converts errors of the file system

    def _download_blob(self, name: str, file: HubFile) -> None:
        """Download a blob into place, and once more if it arrives damaged."""
        partial, blob = self._partial_path(file), self.cache.blob(file.digest)
        blob.unlink(missing_ok=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            self._stream(name, file, partial)
            if self.cache.is_valid(partial, file.digest):
                os.replace(partial, blob)
                return
            partial.unlink()
        raise HubError(
            f"{name} was damaged in two downloads, and has been removed",
            where=self.cache.repo,
            hint="try again; if the error persists, check the network, proxy and disk",
        )

    def _stream(self, name: str, file: HubFile, partial: Path) -> None:
        """Download to `partial`, resuming where an earlier download stopped."""
        from huggingface_hub import constants, get_session, hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
            httpx,
        )

        url = hf_hub_url(self.cache.repo, name, revision=self.commit)
        with open(partial, "ab") as target:

            def restart() -> None:
                target.seek(0)
                target.truncate()

            if file.size is None or target.tell() > file.size:
                restart()
            if start := target.tell():
                text = f"{name}: resumed at {start / 1e6:,.1f} MB"
                self.on_progress(Transfer(name, start, file.size, text))

            def receive(timeout: float) -> None:
                position = target.tell()
                if position == file.size:
                    return
                headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
                if position:
                    headers["Range"] = f"bytes={position}-"
                with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
                    hf_raise_for_status(response)
                    if response.status_code != 206:
                        restart()
                    self.on_progress(Transfer(name, target.tell(), file.size))
                    for chunk in response.iter_bytes():
                        target.write(chunk)
                        if file.size is not None and target.tell() > file.size:
                            break  # the digest differs, and the rest may be endless
                        self.on_progress(Transfer(name, target.tell(), file.size))
                ignored = position > 0 and response.status_code == 200
                if file.size is not None and target.tell() < file.size and not ignored:
                    raise httpx.ReadError(f"{name} ended early")

            call_hub(
                self.cache.repo,
                receive,
                name=name,
                revision=self.commit,
                timeout=self.timeout,
                read_timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                position=target.tell,
                on_progress=self.on_progress,
            )


def _check_name(repo: str, revision: str) -> None:
    """Raise HubError for an invalid name of a repo or revision: both become paths."""
    for name in (repo, revision):
        if not re.fullmatch(r"\w[\w.+-]*(/[\w.+-]+)*", name, re.ASCII) or ".." in name:
            what = f"'{name}' is not a valid repo or revision name"
            raise HubError(what, where=repo, hint="use the form org/name or org/name@revision")


def _resolve(
    cache: RepoCache,
    revision: str,
    offline: bool,
    timeout: float | None,
    on_progress: Progress,
) -> _Revision:
    """Resolve a revision to a commit and its files, with one request, or none for a commit whose
    files are known. Raises HubError."""
    known = cache.commit(revision)
    present = _cached_files(cache, known) if known else {}
    listing = (cache.listing(known) or cache.tree(known) | present) if known else {}
    entry = registry.entry_of(cache.repo)  # whose name is not a mistyped path
    if offline:
        suffix = "" if revision == MAIN else f"@{revision}"
        name = entry.name if entry and not suffix else f"{cache.repo}{suffix}"
        switch = offline_switch(offline)
        hint = f"run `vit pull {name}` without {switch}"
        if entry:
            offline_error = HubError(f"not downloaded, and {switch} is set", where=name, hint=hint)
        else:
            suffix = f" at revision {revision}" if suffix else ""
            what = f"no such file or directory, and not in the cache{suffix}"
            offline_error = not_found(cache.repo, what, f"{hint}, or check the name")
        if known is None or not (weights_among(present) or (present and cache.listing(known))):
            raise offline_error
        return _Revision(cache, known, listing, offline_error)
    if known == revision and cache.listing(known):
        return _Revision(cache, known, listing, None, timeout, on_progress)
    usable = known is not None and bool(weights_among(present))
    try:
        commit, files, _ = list_repo(cache.repo, revision, timeout, on_progress, once=usable)
    except HubError as error:
        if known is None and error.is_temporary:
            if entry:
                raise
            what = f"no such file or directory, and {error.what}"
            raise not_found(cache.repo, what, error.hint or "") from error
        if known is None or not usable or not error.is_temporary:
            raise
        reason = error
    else:
        is_writable = commit == known or os.access(cache.directory, os.W_OK)
        if known is None or not usable or is_writable:
            return _Revision(cache, commit, files, None, timeout, on_progress)
        what = "there is a newer commit, but the cache is read-only"
        hint = "set HF_HUB_CACHE to a directory that you can write to"
        reason = HubError(what, where=cache.repo, hint=hint)
    warn(f"{reason.what}; using the cached commit {known[:7]}", cache.repo)
    return _Revision(cache, known, listing, reason)


def _cached_files(cache: RepoCache, commit: str) -> Listing:
    """The cached files of a commit; for a released model, none if its configuration is missing, as
    timm downloads only the weights."""
    files = cache.cached_files(commit)
    return files if CONFIG in files or registry.entry_of(cache.repo) is None else {}


class RepoState(NamedTuple):
    """The contents of a repo at a revision."""

    commit: str
    files: Listing
    private: bool


def list_repo(
    repo: str,
    revision: str | None,
    timeout: float | None = None,
    on_progress: Progress | None = None,
    once: bool = False,
) -> RepoState:
    """Request the state of a revision from the Hub. Raises HubError, also for an invalid response:
    its names and digests become paths, and downloads may be as large as it says."""
    from huggingface_hub import HfApi, constants

    default_timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = call_hub(
        repo,
        lambda read_timeout: HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=read_timeout
        ),
        revision=revision,
        timeout=0 if once else timeout,
        read_timeout=min(default_timeout, timeout or default_timeout),
        on_progress=on_progress,
    )
    files = {
        file.rfilename: HubFile(
            *((file.lfs.sha256, file.lfs.size) if file.lfs else (str(file.blob_id), file.size))
        )
        for file in info.siblings or ()
    }
    invalid = [] if COMMIT.fullmatch(str(info.sha)) else [repr(info.sha)]
    for name, file in files.items():
        is_safe = isinstance(name, str) and name.isprintable() and "\\" not in name
        if not is_safe or {"", ".", ".."} & set(name.split("/")):  # outside the repo
            invalid.append(repr(name))
        if not DIGEST.fullmatch(str(file.digest)):
            invalid.append(f"{name}: {file.digest!r}")
        if file.size is not None and (not isinstance(file.size, int) or file.size < 0):
            invalid.append(f"{name}: {file.size!r}")
    if invalid:
        what = f"the Hub sent an invalid response: it lists {invalid[0][:100]}"
        hint = "check HF_ENDPOINT and the proxy, or use `hf download` and pass the path"
        raise HubError(what, where=repo, hint=hint)
    return RepoState(str(info.sha), files, bool(info.private))


def _choose_weights(names: Collection[str], repo: str, allow_pickle: bool) -> str:
    """The name of a repo's weights file, preferably not a pickle. Raises HubError."""
    safe = weights_among(names, SAFE)
    candidates = safe or weights_among(names, PICKLES)
    if not candidates:
        examples = ", ".join(sorted(names)[:8]) or "no files"
        suffixes = join_or(pattern[1:] for pattern in SAFE + PICKLES if pattern.startswith("*"))
        hint = f"vit reads files at the top level of a repo that end in {suffixes}"
        if nested := sorted(name for name in names if weights_among([name.rpartition("/")[2]])):
            hint = f"the repo has weights in subdirectories: {', '.join(nested[:8])}; download one "
            hint += f"with `hf download {repo} {nested[0]}` and pass its path"
        raise HubError(f"no weights that vit can read; found {examples}", where=repo, hint=hint)
    if len(candidates) > 1:
        raise HubError(
            f"the repo has several checkpoints: {', '.join(candidates[:8])}",
            where=repo,
            hint=f"download one with `hf download {repo} {candidates[0]}` and pass its path",
        )
    if not safe and not allow_pickle:
        raise HubError(
            f"the repo only has pickled weights ({candidates[0]}), and a pickle can run code",
            where=repo,
            hint="pass --allow-pickle to read the tensors without running any code",
        )
    return candidates[0]


def _shard_names(index: Path) -> list[str]:
    """The files listed in an index. Raises CheckpointError."""
    from vitcli.checkpoints.shards import read_index

    return sorted(set(read_index(index).values()))
