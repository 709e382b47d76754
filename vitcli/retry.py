"""The retry policy of all network requests: for how long and how often to retry, and after which
status codes."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vitcli.errors import VitError

if TYPE_CHECKING:
    from email.message import Message

T = TypeVar("T")

TIMEOUT = 60.0
"""Seconds without progress after which a request fails, and the longest wait that a server may
request (Retry-After)."""
PAUSE = 1.0
"""Initial backoff in seconds; it doubles after each retry, up to 16 times this."""


def is_temporary(status: int) -> bool:
    """Whether a request that failed with this status code may succeed if retried."""
    return status in (408, 429) or status >= 500


def retry_after(headers: Mapping[str, str] | Message) -> float:
    """Seconds to wait according to the Retry-After header or, if no requests remain, the Hub's
    RateLimit header; 0 if neither says."""
    said = re.fullmatch(r"\s*(\d{1,9})\s*", headers.get("Retry-After", ""))
    said = said or re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    return float(said[1]) if said else 0.0


class Failure(NamedTuple):
    """The failure of one attempt."""

    meaning: VitError
    may_pass: bool
    """Whether another attempt may succeed."""
    wait: float = 0.0
    """Seconds to wait as requested by the server."""
    silent: bool = False
    """Whether the attempt timed out without receiving data."""


def persist(
    call: Callable[[float], T],
    explain: Callable[[Exception], Failure],
    *,
    timeout: float | None = None,
    patience: float = math.inf,
    position: Callable[[], int] = lambda: 0,
    on_retry: Callable[[Failure, float], None] = lambda failure, wait: None,
) -> T:
    """Return the result of `call`. Temporary failures are retried until `timeout` seconds have
    passed without an increase of `position`.

    Args:
        call: makes one attempt, with this read timeout in seconds.
        explain: converts an exception of `call` to a Failure.
        timeout: seconds without progress, over all attempts; default TIMEOUT; 0: one attempt.
        patience: maximum read timeout of one attempt in seconds.
        on_retry: called before each wait, with the failure and the seconds to wait.

    Raises:
        VitError: raised by `call`, or the one that explains the last failure.
    """
    timeout = TIMEOUT if timeout is None else timeout
    reached, since, pause = position(), math.inf, PAUSE
    silence = min(patience, timeout or TIMEOUT)
    while True:
        try:
            return call(silence)
        except VitError:
            raise
        except Exception as error:
            failure, now = explain(error), time.monotonic()
            if since == math.inf or position() > reached:
                reached, pause = position(), PAUSE
                since = now - silence if failure.silent else now
            wait = max(pause, failure.wait)
            left = since + timeout - now - wait
            if not failure.may_pass or left <= 0:
                raise failure.meaning from error
            silence = min(patience, left)
        on_retry(failure, wait)
        time.sleep(wait)
        pause = min(2 * pause, 16 * PAUSE)
