"""Checkpoints from the Hugging Face Hub: fetched into the ordinary cache, and checked there.

`huggingface_hub` is imported when something is to be fetched and not before.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitcli.errors import HubError

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there and the bytes that there will be."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def fetch(
    repo: str,
    revision: str | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
) -> Path:
    """The folder of a repo's checkpoint in the cache, fetched where it is not there yet.

    The weights are compared with the Hub's sha256 before they are first used: the client itself
    accepts a damaged download. A damaged file is removed and fetched once more.

    Raises:
        HubError: the repo, the revision or the file is not there, access is refused, the network
            fails, or the file arrives damaged twice.
    """
    offline = offline or is_offline()
    if not offline and cached(repo, revision) is None:
        _ask(repo, revision)
    config = _download(repo, CONFIG, revision, offline, on_progress)
    commit = config.parent.name  # both files of one commit, and no second question to the Hub
    weights = _download(repo, WEIGHTS, commit, offline, on_progress)
    if not _is_whole(weights):
        _remove(weights)
        if not offline:
            weights = _download(repo, WEIGHTS, commit, offline, on_progress)
        if offline or not _is_whole(weights):
            _remove(weights)
            raise HubError(
                f"{WEIGHTS} arrived damaged and was removed",
                where=repo,
                hint="try again; if it happens again, the network or the disk alters data",
            )
    return weights.parent


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repo's checkpoint if the cache holds it whole; asks no one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config, weights = (
            try_to_load_from_cache(repo, name, revision=revision) for name in (CONFIG, WEIGHTS)
        )
    except HFValidationError:
        return None
    return Path(weights).parent if isinstance(config, str) and isinstance(weights, str) else None


def is_offline() -> bool:
    """Whether the environment forbids the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def reachable(timeout: float = 3.0, repo: str | None = None) -> bool:
    """Whether the Hub answers within so many seconds, with a file of `repo` if one is named (a
    proxy's refusal is an answer too, but no model); False where the network is forbidden."""
    if is_offline():
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        try:
            page = f"{endpoint}/{repo}/resolve/main/{CONFIG}" if repo else endpoint
            request = urllib.request.Request(page, method="HEAD")
            with urllib.request.urlopen(request, timeout=timeout):
                answered.set()
        except urllib.error.HTTPError:
            if repo is None:
                answered.set()  # an error page is an answer
        except (OSError, ValueError, http.client.HTTPException):
            pass

    # A thread, because looking up a name has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


# ---------------------------------------------------------------------------------------------


def _ask(repo: str, revision: str | None) -> None:
    """One question, so that a failure is known at once: the client would try again for 20 s.

    Raises:
        HubError: the Hub cannot be reached, or does not give this repo's config.json.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        get_hf_file_metadata(hf_hub_url(repo, CONFIG, revision=revision), timeout=10)
    except Exception as error:
        raise _worded(error, repo, CONFIG, revision, offline=False) from error


def _download(
    repo: str, name: str, revision: str | None, offline: bool, on_progress: Progress | None
) -> Path:
    """One file of a repo, in the cache. Raises HubError."""
    from huggingface_hub import hf_hub_download

    options: dict[str, Any] = {}
    if on_progress is not None:
        options["tqdm_class"] = _progress_bar(name, on_progress)
    try:
        return Path(
            hf_hub_download(repo, name, revision=revision, local_files_only=offline, **options)
        )
    except Exception as error:
        raise _worded(error, repo, name, revision, offline) from error


def _worded(
    error: Exception, repo: str, name: str, revision: str | None, offline: bool
) -> Exception:
    """What a failure of the client means to a person; what is no such failure stays as it is."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx2 since 2.0

    def hub_error(what: str, hint: str) -> HubError:
        return HubError(what, where=repo, hint=hint)

    status = getattr(getattr(error, "response", None), "status_code", None)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.LocalEntryNotFoundError) and not offline:
        cause = error.__cause__  # why the Hub was not asked
        if isinstance(cause, Exception):
            return _worded(cause, repo, name, revision, offline)
    if isinstance(error, errors.GatedRepoError):
        return hub_error("access has to be asked for", f"ask on the repo's page, then {login}")
    if isinstance(error, errors.RepositoryNotFoundError):
        return hub_error(
            "there is no such repo on the Hub, and no such folder here",
            f"check the name; for a private repo, {login}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return hub_error(f"has no revision '{revision}'", "look at the branches on its page")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if offline:
            return hub_error(f"{name} is not in the cache", "fetch it once without --offline")
        return hub_error("the Hub cannot be reached", "check the network and HF_ENDPOINT")
    if isinstance(error, errors.EntryNotFoundError):
        return hub_error(f"has no {name}", "only safetensors checkpoints with a config.json load")
    if isinstance(error, httpx.TimeoutException):
        return hub_error("the Hub did not answer in time", "try again")
    if isinstance(error, httpx.TransportError | ConnectionError):
        return hub_error("the Hub cannot be reached", "check the network and HF_ENDPOINT")
    if status in (401, 403):
        return hub_error(f"access is refused ({status})", login)
    if status == 429:
        return hub_error("the Hub asks for patience (429)", "wait a few minutes and try again")
    if status is not None:
        return hub_error(f"the Hub answered with error {status}", "try again later")
    if isinstance(error, errors.HFValidationError):
        return hub_error("is not a name of a repo", "write org/repo")
    if isinstance(error, OSError):
        return hub_error(
            f"{name} cannot be kept: {error.strerror or error}", "look at the disk and at HF_HOME"
        )
    return error


def _progress_bar(name: str, on_progress: Progress) -> type[Any]:
    """A stand-in for the client's progress bar that reports to us and draws nothing."""

    class Bar:
        def __init__(self, *_: Any, total: float | None = None, initial: float = 0, **__: Any):
            self.n, self.total = initial, total

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            on_progress(name, int(self.n), None if self.total is None else int(self.total))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None  # whatever else a bar can do

    return Bar


def _is_whole(path: Path) -> bool:
    """Whether a file of the cache has the sha256 that its blob is named by.

    A blob that was found whole is remembered with its size and time, so that the next start costs
    nothing. Files that the Hub keeps in git are named by another hash and are not weights.
    """
    blob = Path(os.path.realpath(path))
    if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return True
    stat = blob.stat()
    seen = f"{stat.st_size} {stat.st_mtime_ns}"
    note = blob.with_name(f"{blob.name}.vit-verified")
    if note.is_file() and note.read_text() == seen:
        return True
    with open(blob, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != blob.name:
            return False
    with contextlib.suppress(OSError):  # a read-only cache is hashed every time
        note.write_text(seen)
    return True


def _remove(path: Path) -> None:
    """Takes a damaged file out of the cache: the blob and what points to it."""
    blob = Path(os.path.realpath(path))
    blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
