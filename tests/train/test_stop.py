"""Signals during a run of several ranks."""

import signal

import pytest

from vitcli.errors import DataError
from vitcli.train.stop import stop_requested


@pytest.mark.parametrize(
    ("error", "expected"),
    [(RuntimeError, signal.SIG_DFL), (DataError, signal.SIG_IGN)],
)
def test_launcher_can_end_a_rank_that_lost_another(monkeypatch, error, expected):
    """From the moment of the error, while the rank still closes its files; but a rank with an error
    of its own reports that first."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(error), stop_requested(print):
            raise error("x")
        assert signal.getsignal(signal.SIGTERM) is expected
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
