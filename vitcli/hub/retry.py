"""The one way to ask the Hub: every request is retried by the same policy, and every failure of
its client becomes a HubError that says what happened and what to do.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from vitcli.config import nearest
from vitcli.errors import HubError, VitError

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds without progress after which a request is given up, and the longest pause that the Hub
may ask for (Retry-After)."""
PAUSE = 1.0
"""Seconds before the first retry; each further pause is twice as long, up to 16 times this."""

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class Transfer(NamedTuple):
    """How far a download is."""

    name: str
    done: int = 0
    """Bytes that are on disk."""
    total: int | None = None
    note: str | None = None
    """What a person should know: it resumes, waits or is retried."""


Progress = Callable[[Transfer], None]


def ask(
    repo: str,
    call: Callable[[], T],
    *,
    name: str = "",
    revision: str | None = None,
    timeout: float | None = None,
    position: Callable[[], int] = lambda: 0,
    on_progress: Progress | None = None,
) -> T:
    """What `call` returns. Failures that may pass (5xx, 429, a broken or silent connection) are
    retried until `timeout` seconds have gone by without `position` growing.

    Args:
        name: the file that is asked for.
        timeout: default TIMEOUT; 0 tries once.

    Raises:
        HubError: the Hub said no, or could not be asked.
    """
    timeout = TIMEOUT if timeout is None else timeout
    reached, since, pause = position(), time.monotonic(), PAUSE
    while True:
        try:
            return call()
        except VitError:
            raise
        except Exception as error:
            meaning = explain(error, repo, name, revision)
            if position() > reached:
                reached, since, pause = position(), time.monotonic(), PAUSE
            wait = max(pause, _retry_after(error))
            late = time.monotonic() + wait > since + timeout
            unreachable = isinstance(meaning, UnreachableError) and not reached
            if not may_pass(error) or unreachable or late:
                raise meaning from error
        if on_progress is not None:
            note = f"{name or repo}: {meaning.what}; trying again in {wait:.0f} s"
            on_progress(Transfer(name, reached, note=note))
        time.sleep(wait)
        pause = min(2 * pause, 16 * PAUSE)


def may_pass(error: BaseException | None) -> bool:
    """Whether a failure says nothing about the repo: no network, a time-out, a Hub in trouble."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    error = _root(error)
    if isinstance(error, httpx.TransportError):
        return not isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError)
    return _status(error) in (408, 429) or _status(error) >= 500 or isinstance(error, TimeoutError)


def may_be_done(error: BaseException | None) -> bool:
    """Whether the Hub may have done what it was asked for, although that failed: 412 is also the
    answer to a second try."""
    return may_pass(error) or _status(_root(error)) == 412


class UnreachableError(HubError):
    """There is no connection to the Hub at all."""


def is_offline() -> bool:
    """Whether the environment forbids the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def missing(repo: str, what: str, hint: str) -> HubError:
    """The error for a repo that cannot be found, which may be a mistyped path."""
    parent = Path(repo).parent
    siblings = [path.as_posix() for path in parent.iterdir()] if parent.is_dir() else []
    if like := nearest(repo, siblings):
        hint = f"did you mean {' or '.join(like)}?"
    return HubError(what, where=repo, hint=hint)


def explain(
    error: BaseException, repo: str, name: str = "", revision: str | None = None
) -> HubError:
    """The HubError that a failure of the client means. Raises what is no failure of the Hub."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx2 since 2.0

    error = _root(error) or error
    host = urlsplit(constants.ENDPOINT).hostname or "the Hub"

    def say(what: str, hint: str, kind: type[HubError] = HubError) -> HubError:
        return kind(what, where=repo, hint=hint)

    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, repo, name, revision, host)
    if isinstance(error, errors.HFValidationError):
        return say("is not the name of a Hub repo", "write org/name: letters, digits, - _ and .")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return say("the network is forbidden", "unset HF_HUB_OFFLINE")
    if isinstance(error, UnicodeEncodeError | httpx.LocalProtocolError):
        return say("the token holds characters that no token has", LOGIN)
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return say("HF_ENDPOINT is not a URL", "set it to https://..., or unset it")
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return say("the Hub did not answer in time", "try again, or wait longer with --timeout")
    if isinstance(error, httpx.ConnectError | httpx.ProxyError):
        hint = "check the network, the proxy and HF_ENDPOINT"
        return say(f"cannot reach {host}: {error}", hint, UnreachableError)
    if isinstance(error, httpx.TransportError):
        return say("the connection broke", "try again")
    if isinstance(error, OSError):
        reason = error.strerror or error
        hint = "check the disk, or set HF_HOME to a directory on another one"
        return say(f"cannot store {name or 'the files'}: {reason}", hint)
    if isinstance(error, httpx.HTTPError | ValueError | TypeError | KeyError | AttributeError):
        return say(
            f"{host} answered, but not as the Hub does",
            "a proxy or the login page of a network may have answered: open it in a browser, and "
            "check HF_ENDPOINT",
        )
    raise error


def _refusal(error: Exception, repo: str, name: str, revision: str | None, host: str) -> HubError:
    """What an answer with an error status means."""
    from huggingface_hub import errors

    status, response = _status(error), getattr(error, "response", None)

    def say(what: str, hint: str) -> HubError:
        return HubError(what, where=repo, hint=hint)

    if isinstance(error, errors.GatedRepoError):
        return say("access is restricted", f"request it on the repo's page, then {LOGIN}")
    if isinstance(error, errors.RepositoryNotFoundError):
        what = "no such file or directory here, and no such repo on the Hub"
        return missing(repo, what, f"check the name; for a private repo, {LOGIN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return say(
            f"has no revision '{revision or 'main'}'",
            "look at the branches on the repo's page; its history may have been rewritten",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return say(f"has no {name or 'such file'}", "try again: the repo may just have changed")
    if status == 400:
        said = getattr(error, "server_message", None) or str(error).splitlines()[0]
        return say(f"the Hub rejects the request: {said}", "check --license and the README.md")
    if status == 401:
        return say("the Hub does not accept the token (401)", LOGIN)
    if status == 403 and response is not None and response.request.url.host != host:
        hint = "try again; if it lasts, a firewall may block that server"
        return say(f"{response.request.url.host} refuses the download (403)", hint)
    if status == 403:
        owner = repo.partition("/")[0]
        return say(
            "the token has no permission for this (403)",
            f"{LOGIN}; to write, it needs write access to {owner} (or use --create-pr)",
        )
    if status == 409:
        return say("exists already, or is being changed by someone else (409)", "try again")
    if status == 412:
        return say("the repo changed meanwhile", "push again")
    if status == 429:
        wait = _retry_after(error)
        asked = f", asks to wait {wait:.0f} s" if wait else ""
        return say(f"the Hub limits the rate of requests{asked} (429)", "try later, or --timeout")
    if status >= 500:
        return say(f"the Hub is having trouble (error {status})", "try again later")
    return say(f"the Hub answered with error {status}", "try again later")


def _root(error: BaseException | None) -> BaseException | None:
    """What the client wrapped: a failure in one of its upload threads, or of its cache."""
    from huggingface_hub import errors

    wrappers = errors.LocalEntryNotFoundError | RuntimeError
    while isinstance(error, wrappers) and _status(error) == 0 and error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException | None) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _retry_after(error: BaseException) -> float:
    """Seconds that the Hub asks to wait; 0: it does not say."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        parse_ratelimit_headers,
    )

    response = getattr(_root(error), "response", None)
    if response is None:
        return 0.0
    said = re.fullmatch(r"\s*(\d{1,9})\s*", response.headers.get("Retry-After", ""))
    limit = parse_ratelimit_headers(response.headers)
    return float(said[1]) if said else float(limit.reset_in_seconds) if limit else 0.0
