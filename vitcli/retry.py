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
    RateLimit header; 0 if there is neither."""
    match = re.fullmatch(r"\s*(\d{1,9})\s*", headers.get("Retry-After", ""))
    match = match or re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    return float(match[1]) if match else 0.0


class Failure(NamedTuple):
    """The failure of one attempt."""

    error: VitError
    is_temporary: bool
    """Whether another attempt may succeed."""
    wait: float = 0.0
    """Seconds to wait as requested by the server."""
    timed_out: bool = False
    """Whether the attempt timed out without receiving data."""


def retry(
    call: Callable[[float], T],
    explain: Callable[[Exception], Failure],
    *,
    timeout: float | None = None,
    read_timeout: float = math.inf,
    position: Callable[[], int] = lambda: 0,
    on_retry: Callable[[Failure, float], None] = lambda failure, wait: None,
) -> T:
    """Return the result of `call`. Temporary failures are retried until `timeout` seconds have
    passed without an increase of `position`.

    Args:
        call: makes one attempt, with this read timeout in seconds.
        explain: converts an exception of `call` to a Failure.
        timeout: seconds without progress, over all attempts; default TIMEOUT; 0: one attempt.
        read_timeout: maximum read timeout of one attempt in seconds.
        on_retry: called before each wait, with the failure and the seconds to wait.

    Raises:
        VitError: raised by `call`, or the one that explains the last failure.
    """
    timeout = TIMEOUT if timeout is None else timeout
    last_position, last_progress, pause = position(), math.inf, PAUSE
    attempt_timeout = min(read_timeout, timeout or TIMEOUT)
    while True:
        start = time.monotonic()
        try:
            return call(attempt_timeout)
        except VitError:
            raise
        except Exception as error:
            failure, now = explain(error), time.monotonic()
            if last_progress == math.inf or position() > last_position:
                last_position, pause = position(), PAUSE
                last_progress = max(start, now - attempt_timeout) if failure.timed_out else now
            wait = max(pause, failure.wait)
            remaining = last_progress + timeout - now - wait
            if not failure.is_temporary or remaining <= 0:
                raise failure.error from error
            attempt_timeout = min(read_timeout, remaining)
        on_retry(failure, wait)
        time.sleep(wait)
        pause = min(2 * pause, 16 * PAUSE)
