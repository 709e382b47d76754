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
NOT_THE_HUB = (
    "{host} responded, but it does not seem to be the Hub",
    "a network login page or a proxy may have responded: open the address in a browser, and check "
    "HF_ENDPOINT",
)
UNREACHABLE = (
    "cannot reach {host}: {error}",
    "check the network, the proxy and HF_ENDPOINT; for certificates, SSL_CERT_FILE",
)
NO_ANSWER = (
    "the Hub did not respond in time",
    "try again, or wait longer with --timeout of `vit pull` or `vit push`",
)
BAD_TOKEN = ("the token contains invalid characters", LOGIN)

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
    "400": (
        "the Hub rejected the request (400){message}",
        "check the name and the revision; for a push, --license and the README.md",
    ),
    "401": (
        "the Hub rejected the token (401){message}",
        "log in with `hf auth login`, or correct HF_TOKEN, which takes precedence",
    ),
    "403": (
        "the Hub refused the request (403){message}",
        "use a token with access to {owner}; to propose a change to an existing repo without write "
        "access, use --create-pr",
    ),
    "403 elsewhere": (
        "{server} refused the transfer (403)",
        "try again; if the error persists, a firewall may be blocking that server",
    ),
    "409": (
        "the repo already exists, or is being changed by someone else (409){message}",
        "try again",
    ),
    "412": ("the repo changed in the meantime", "push again"),
    "429": (
        "too many requests: the Hub asks to wait {wait} (429)",
        "try later, or wait longer with --timeout of `vit pull` or `vit push`",
    ),
    "HfHubHTTPError": ("the Hub returned error {status}{message}", "try again later"),
    "HFValidationError": ("not a valid name of a Hub repo", "use the form org/name"),
    "OfflineModeIsEnabled": ("{switch} is set", "unset {switch}"),
    "UnicodeEncodeError": BAD_TOKEN,
    "LocalProtocolError": BAD_TOKEN,
    "UnsupportedProtocol": ("HF_ENDPOINT is not a URL", "set it to https://..., or unset it"),
    "InvalidURL": (
        "HF_ENDPOINT or the proxy is not a URL: {error}",
        "correct HF_ENDPOINT, HTTP_PROXY, HTTPS_PROXY or ALL_PROXY",
    ),
    "SSLError": ("cannot read the certificates: {error}", "check SSL_CERT_FILE and SSL_CERT_DIR"),
    "TimeoutException": NO_ANSWER,
    "TimeoutError": NO_ANSWER,
    "ConnectError": UNREACHABLE,
    "ProxyError": UNREACHABLE,
    "TransportError": ("the connection was lost", "try again"),
    "OSError": (
        "cannot store {name}: {error}",
        "check the disk, or set HF_HUB_CACHE to a directory on another one",
    ),
    "RuntimeError": ("the transfer failed: {error}", "try again"),
    "ImportError": ("cannot connect: {error}", "check the proxy: HTTPS_PROXY and ALL_PROXY"),
    **dict.fromkeys(("HTTPError", "ValueError", "TypeError"), NOT_THE_HUB),
    **dict.fromkeys(("KeyError", "AttributeError", "RecursionError"), NOT_THE_HUB),
}
"""Error message and hint, by status code or class of the exception."""


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
    on_progress: Progress | None = None,
) -> T:
    """Return the result of `call`. Transient failures (5xx, 408, 429, a lost connection, a timeout)
    are retried until `timeout` seconds have passed without `position` growing.

    Args:
        call: gets the read timeout of the attempt, in seconds.
        name: the requested file.
        timeout: as for `retry.retry`.
        read_timeout: the longest read timeout of one attempt, in seconds.

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
        lambda error: _to_failure(error, repo, name, revision or "main", position() > 0),
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
    error: BaseException, repo: str, name: str, revision: str, has_started: bool
) -> Failure:
    """The Failure for an exception of the client; re-raises one that is not about the Hub."""
    from huggingface_hub import constants
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx2 since 2.0

    # Wrapped by the client: exceptions of an upload thread, of its cache, and of a rejected card.
    while type(error) in (RuntimeError, ValueError) and error.__cause__ is not None:
        error = error.__cause__
    response, status, wait = getattr(error, "response", None), 0, 0.0
    if response is not None:
        status, wait = response.status_code, retry_after(response.headers)
    message = "; ".join((getattr(error, "server_message", None) or "").splitlines())
    fields = {
        "name": name,
        "revision": revision,
        "owner": repo.partition("/")[0],
        "switch": offline_switch(),
        "error": getattr(error, "strerror", None) or error,
        "status": status,
        "message": f": {message[:300]}" if message else "",
        "wait": f"{wait:.0f} s" if wait else "a while",
        "host": urlsplit(constants.ENDPOINT).hostname or "the Hub",
        "server": urlsplit(str(response.request.url)).hostname if response is not None else "",
    }
    types = [cls.__name__ for cls in type(error).__mro__]
    if isinstance(error, FileNotFoundError) and error.filename is None:  # from ssl
        types.insert(0, "SSLError")
    if "HfHubHTTPError" in types:
        elsewhere = " elsewhere" if fields["server"] != fields["host"] and status == 403 else ""
        types.insert(types.index("HfHubHTTPError"), f"{status}{elsewhere}")
    reason = next((cls for cls in types if cls in MESSAGES), None)
    if reason is None:
        raise error
    what, hint = (template.format(**fields) for template in MESSAGES[reason])
    is_missing = reason == "RepositoryNotFoundError"
    hub_error = not_found(repo, what, hint) if is_missing else HubError(what, where=repo, hint=hint)
    hub_error.reason = reason
    invalid_request = isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError)
    transient = isinstance(error, httpx.TransportError | TimeoutError) and not invalid_request
    hub_error.is_temporary = transient or is_temporary(status)
    unreachable = isinstance(error, httpx.ConnectError) and not has_started
    timed_out = isinstance(error, httpx.TimeoutException)
    return Failure(hub_error, hub_error.is_temporary and not unreachable, wait, timed_out)
