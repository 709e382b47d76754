"""Requests to the Hub: one retry policy, and every client error becomes a HubError with a hint."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from vitcli.errors import HubError
from vitcli.retry import Failure, is_temporary, retry, retry_after
from vitcli.weight_files import weights_among
from vitcli.words import did_you_mean

T = TypeVar("T")

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
UNREACHABLE = (
    "cannot reach {host}: {error}",
    "check the network, the proxy and HF_ENDPOINT; for certificates, SSL_CERT_FILE",
)
NO_ANSWER = (
    "the Hub did not respond in time",
    "try again; `vit pull` and `vit push` wait longer with --timeout",
)
BAD_TOKEN = ("the token contains invalid characters", LOGIN)
BAD_URL = (
    "HF_ENDPOINT or the proxy is not a URL: {error}",
    "correct HF_ENDPOINT, HTTP_PROXY, HTTPS_PROXY or ALL_PROXY",
)

MESSAGES = {
    "GatedRepoError": ("access is restricted", f"request access on the repo's page, then {LOGIN}"),
    "RepositoryNotFoundError": (
        "no such file or directory, and no such repo on the Hub",
        f"check the name; for a private repo, {LOGIN}",
    ),
    "RevisionNotFoundError": (
        "the repo has no revision '{revision}'",
        "check the branches, tags and commits on the repo's page",
    ),
    "401": (
        "the Hub rejected the token (401){message}",
        "log in with `hf auth login`, or correct HF_TOKEN, which takes precedence",
    ),
    "403": (
        "the Hub refused the request (403){message}",
        "use a token with access to the repo; to propose a change to an existing repo without "
        "write access, use --create-pr",
    ),
    "409": (
        "the repo already exists, or is being changed by someone else (409){message}",
        "try again",
    ),
    "412": ("the repo changed in the meantime", "push again"),
    "429": (
        "too many requests: the Hub asks to wait {wait} (429)",
        "try later; `vit pull` and `vit push` wait longer with --timeout",
    ),
    "HfHubHTTPError": (
        "the Hub returned error {status}{message}",
        "try again later; if the error persists, check the name, the revision and the license",
    ),
    "OfflineModeIsEnabled": (
        "{switch} is set",
        "unset it, or download the repo with `hf download` and pass the path of the copy",
    ),
    **dict.fromkeys(("UnicodeEncodeError", "LocalProtocolError"), BAD_TOKEN),
    **dict.fromkeys(("UnsupportedProtocol", "InvalidURL"), BAD_URL),
    "SSLError": ("cannot read the certificates: {error}", "check SSL_CERT_FILE and SSL_CERT_DIR"),
    **dict.fromkeys(("TimeoutException", "TimeoutError"), NO_ANSWER),
    **dict.fromkeys(("ConnectError", "ProxyError", "ConnectionError"), UNREACHABLE),
    "TransportError": ("the connection was lost", "try again"),
    "OSError": (
        "cannot store {name}: {error}",
        "check the disk, or set HF_HUB_CACHE to a directory on another one",
    ),
    "ArrowInvalid": (
        "not a valid Parquet file: {error}",
        "look at the file on the dataset's page",
    ),
    "Exception": (
        "request failed: {error}",
        "try again; check HF_ENDPOINT and the proxy, and whether the network requires a login",
    ),
}
"""Error message and hint, by status code or class of the exception."""

_TEMPORARY = {"TimeoutException", "TimeoutError", "TransportError"}
_TEMPORARY |= {"ConnectError", "ProxyError", "ConnectionError"}
_WRAPPERS = {"RuntimeError", "ValueError", "DatasetGenerationError"}
"""Exceptions with which the client, `_no_retry_client` and `datasets` wrap others."""


class Transfer(NamedTuple):
    """Progress of a download."""

    name: str
    done: int = 0
    """Bytes on disk."""
    total: int | None = None
    note: str | None = None
    """A message for the user: the download is resumed, is waiting or is retried."""


Progress = Callable[[Transfer], None]


def call_hub(
    repo: str,
    call: Callable[[float], T],
    *,
    name: str = "the files",
    revision: str | None = None,
    timeout: float | None = None,
    read_timeout: float = math.inf,
    position: Callable[[], int] = lambda: 0,
    has_started: bool = False,
    on_progress: Progress | None = None,
) -> T:
    """Return the result of `call`. Transient failures (5xx, 408, 429, a lost connection, a timeout)
    are retried until `timeout` seconds have passed without `position` growing.

    Args:
        call: gets the read timeout of the attempt, in seconds.
        name: the requested file.
        timeout: as for `retry.retry`.
        read_timeout: the longest read timeout of one attempt, in seconds.
        has_started: whether the Hub has responded before; until it has, a Hub that cannot be
            reached is not retried.

    Raises:
        HubError: the request was rejected or failed.
    """

    def report_retry(failure: Failure, wait: float) -> None:
        if on_progress is not None:
            hub_error = failure.error
            note = f"{hub_error.where}: {hub_error.what}; trying again in {wait:.0f} s"
            on_progress(Transfer(name, position(), note=note))

    return retry(
        call,
        lambda error: _to_failure(
            error, repo, name, revision or "main", has_started or position() > 0
        ),
        timeout=timeout,
        read_timeout=read_timeout,
        position=position,
        on_retry=report_retry,
    )


def call_client(repo: str, call: Callable[[], T], timeout: float | None, once: bool = False) -> T:
    """`call_hub` for calls that take no timeout: without one, the client waits forever."""
    from huggingface_hub import get_session, set_client_factory

    def limited(read_timeout: float) -> T:
        if not isinstance(get_session(), _no_retry_client()):
            set_client_factory(_no_retry_client())
        get_session().timeout = read_timeout
        return call()

    return call_hub(repo, limited, timeout=0 if once else timeout, read_timeout=timeout or math.inf)


@functools.cache
def _no_retry_client() -> type[Any]:
    """An HTTP client for `huggingface_hub` that leaves retries to `call_hub`: the library's own,
    five for each request, would multiply the timeout."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        hf_raise_for_status,
        httpx,
    )

    class NoRetryClient(httpx.Client):
        def __init__(self) -> None:
            super().__init__(follow_redirects=True)

        def send(self, *request: Any, **options: Any) -> Any:
            try:
                response = super().send(*request, **options)
                if is_temporary(response.status_code):
                    response.read()
                    hf_raise_for_status(response)
                return response
            except httpx.HTTPError as error:  # as a type that the library does not catch
                raise RuntimeError(str(error)) from error

    return NoRetryClient


def offline_switch(offline: bool = False) -> str | None:
    """What forbids network access: an environment variable or --offline; None if it is allowed."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    is_set = (n for n in names if os.environ.get(n, "").upper() in ("1", "ON", "YES", "TRUE"))
    return next(is_set, "--offline" if offline else None)


def not_found(repo: str, what: str, hint: str) -> HubError:
    """The error for a repo that cannot be found, which may be a mistyped path."""
    parent = Path(repo).parent
    entries = parent.iterdir() if parent.is_dir() else ()
    siblings = [path.as_posix() for path in entries if path.is_dir() or weights_among([path.name])]
    return HubError(what, where=repo, hint=did_you_mean(repo, siblings) or hint)


def _to_failure(
    error: Exception, repo: str, name: str, revision: str, has_started: bool
) -> Failure:
    """The Failure for an exception of the client or of `datasets`."""
    from huggingface_hub import constants

    while type(error).__name__ in _WRAPPERS and isinstance(error.__cause__, Exception):
        error = error.__cause__
    response, status, wait = getattr(error, "response", None), 0, 0.0
    if response is not None:
        status, wait = response.status_code, retry_after(response.headers)
    message = "; ".join((getattr(error, "server_message", None) or "").splitlines())
    text = str(getattr(error, "strerror", None) or error).strip().partition("\n")[0]
    fields = {
        "name": name,
        "revision": revision,
        "switch": offline_switch(),
        "error": text or type(error).__name__,
        "status": status,
        "message": f": {message[:300]}" if message else "",
        "wait": f"{wait:.0f} s" if wait else "a while",
        "host": urlsplit(constants.ENDPOINT).hostname or "the Hub",
    }
    types = [cls.__name__ for cls in type(error).__mro__]
    if isinstance(error, OSError) and error.errno is None:
        types.remove("OSError")  # not the operating system's
    elif isinstance(error, FileNotFoundError) and error.filename is None:  # from ssl
        types.insert(0, "SSLError")
    if "is a gated dataset" in text:  # from `datasets`
        types.insert(0, "GatedRepoError")
    if "HfHubHTTPError" in types:
        types.insert(types.index("HfHubHTTPError"), str(status))
    reason = next(name for name in types if name in MESSAGES)
    what, hint = (template.format(**fields) for template in MESSAGES[reason])
    is_missing = reason == "RepositoryNotFoundError"
    hub_error = not_found(repo, what, hint) if is_missing else HubError(what, where=repo, hint=hint)
    hub_error.reason = reason
    hub_error.is_temporary = reason in _TEMPORARY or is_temporary(status)
    may_retry = hub_error.is_temporary and (has_started or reason != "ConnectError")
    return Failure(hub_error, may_retry, wait, reason == "TimeoutException")
