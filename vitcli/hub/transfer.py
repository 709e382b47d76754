"""How a file comes from the Hub into the cache: whole, or not at all.

Small files, and those of Xet (which checks its own chunks), come by the client's own way. Other
large files come by its `http_get` into a file beside their place, which they take once they have
the sha256 that the Hub lists: nobody ever finds half of one there, or a damaged one. `http_get`
goes on by Range after a cut or a silence; after a reset, which it does not forgive, it is sent on
from where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

from vitcli.hub.client_errors import worded
from vitcli.hub.repo_cache import RepoCache

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes that are there and the bytes that there will be."""
TRIES = 3
"""Transfers in a row that may break off without a byte of progress."""


def download(
    cache: RepoCache, name: str, commit: str, digest: str, on_progress: Progress | None
) -> None:
    """Puts a file into the cache, unless it arrives damaged: then a large one is not put there, and
    it is for the caller to look at the others.

    Raises:
        HubError: it cannot be had.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    options: dict[str, Any] = {}
    if on_progress is not None:
        options["tqdm_class"] = _progress_bar(name, on_progress)
    with worded(cache.repo, name, commit):
        if len(digest) == 64 and not cache.blob(digest).exists():
            url = hf_hub_url(cache.repo, name, revision=commit)
            patience = constants.HF_HUB_ETAG_TIMEOUT
            about = get_hf_file_metadata(url, timeout=patience, retry_on_errors=True)
            by_xet = about.xet_file_data is not None and not constants.HF_HUB_DISABLE_XET
            if not by_xet and not _stage(cache, url, digest, about.size, options):
                return
        hf_hub_download(cache.repo, name, revision=commit, **options)


def _stage(
    cache: RepoCache, url: str, digest: str, size: int | None, options: dict[str, Any]
) -> bool:
    """Brings a content to its place in the cache; False if it arrived damaged."""
    with cache.locked(digest):
        cache.blob(digest).parent.mkdir(parents=True, exist_ok=True)
        part = cache.blob(f"{digest}.{os.urandom(4).hex()}.incomplete")
        try:
            with open(part, "xb") as file:
                _stream(url, file, size, options)
            if not cache.is_whole(part, digest):
                return False
            os.replace(part, cache.blob(digest))
        finally:
            part.unlink(missing_ok=True)
    return True


def _stream(url: str, file: BinaryIO, size: int | None, options: dict[str, Any]) -> None:
    """Fills a file, going on from where it is as long as that leads on. Raises as the client."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers, httpx  # type: ignore[attr-defined]

    tries = TRIES
    while True:
        start = file.tell()
        try:
            return http_get(
                url,
                file,
                resume_size=start,
                headers=build_hf_headers(),
                expected_size=size,
                **options,
            )
        except (httpx.ReadError, OSError) as error:  # OSError: it ended before its size
            tries = TRIES if file.tell() > start else tries - 1
            broke_off = isinstance(error, httpx.ReadError) or "Consistency check" in str(error)
            if not tries or not broke_off or (size is not None and file.tell() >= size):
                raise


def _progress_bar(name: str, on_progress: Progress) -> type[Any]:
    """A stand-in for the client's progress bar that reports to us and draws nothing."""

    class Bar:
        def __init__(self, *_: Any, total: float | None = None, initial: float = 0, **__: Any):
            self.n, self.total = initial, total
            self.update(0)  # the first bytes may take a while

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            on_progress(name, int(self.n), None if self.total is None else int(self.total))

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *args, **kwargs: None  # whatever else a bar can do

    return Bar
