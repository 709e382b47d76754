"""Graceful stop on a signal: a run ends after the current step, with a saved state."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from vitcli.distributed import is_lost_peer
from vitcli.errors import PeerFailedError
from vitcli.machine import STOP_SIGNALS, is_launched
from vitcli.train.events import Note, OnEvent

STOPPING = Note("stopping after this step; interrupt again to stop at once")


@dataclass
class Stop:
    """The signal that requested the run to stop, if any."""

    signal: int | None = None


@contextlib.contextmanager
def stop_requested(on_event: OnEvent) -> Iterator[Stop]:
    """Record and report the first of `STOP_SIGNALS`, so that the step can end and the state be
    saved; without a launcher, a second one has its usual effect. Signals are handled only in the
    main thread, and ignored signals (SIGINT in a background job) stay ignored."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    current = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    handlers = {s: handler for s, handler in current.items() if handler is not signal.SIG_IGN}

    def restore() -> None:
        for s, handler in handlers.items():
            signal.signal(s, handler)

    def request(signum: int, frame: object) -> None:
        is_first, stop.signal = stop.signal is None, signum
        if not is_launched():  # a launcher repeats signals that a scheduler sends to all processes
            restore()
        if is_first:
            on_event(STOPPING)

    for s in handlers:
        signal.signal(s, request)
    is_failing, lost_peer = True, False
    try:
        yield stop
        is_failing = False
    except RuntimeError as error:
        lost_peer = is_launched() and is_lost_peer(error)
        if lost_peer and stop.signal is not None:  # the launcher ends this rank too
            raise PeerFailedError("another rank has failed") from error
        raise
    finally:
        if is_launched() and (is_failing or stop.signal is not None):  # the launcher ends all ranks
            handlers = dict.fromkeys(handlers, signal.SIG_IGN)
            if lost_peer:  # this one at once: the launcher knows why the other has ended
                handlers[signal.SIGTERM] = signal.SIG_DFL
        restore()
