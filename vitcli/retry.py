"""The retry policy of all requests over the network: how long and how often to retry, and after
which answers."""

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
"""Seconds without progress after which a request is given up, and the longest pause that a server
may ask for (Retry-After)."""
PAUSE = 1.0
"""Seconds before the first retry; each further pause is twice as long, up to 16 times this."""


def is_temporary(status: int) -> bool:
    """Whether a request that was answered with this status may succeed if it is made again."""
    return status in (408, 429) or status >= 500


def retry_after(headers: Mapping[str, str] | Message) -> float:
    """Seconds that a server asks to wait: its Retry-After, or the time until its RateLimit, as the
    Hub has it, allows another request; 0: it does not ask."""
    said = re.fullmatch(r"\s*(\d{1,9})\s*", headers.get("Retry-After", ""))
    said = said or re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("RateLimit", ""))
    return float(said[1]) if said else 0.0


class Failure(NamedTuple):
    """What went wrong in one attempt."""

    meaning: VitError
    may_pass: bool
    """Whether another attempt may succeed."""
    wait: float = 0.0
    """Seconds that the server asks to wait."""
    silent: bool = False
    """Whether the server said nothing for as long as it was allowed to."""


def persist(
    call: Callable[[float], T],
    explain: Callable[[Exception], Failure],
    *,
    timeout: float | None = None,
    patience: float = math.inf,
    position: Callable[[], int] = lambda: 0,
    on_retry: Callable[[Failure, float], None] = lambda failure, wait: None,
) -> T:
    """What `call` returns. Failures that may pass are retried until `timeout` seconds have gone by
    without `position` growing.

    Args:
        call: is given the seconds for which the server may be silent.
        explain: what an exception of `call` means.
        timeout: seconds without progress, over all attempts; default TIMEOUT; 0: one attempt.
        patience: the most seconds of silence in one attempt.
        on_retry: called before the pause, with its seconds.

    Raises:
        VitError: that of `call`, or the meaning of the last failure.
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
