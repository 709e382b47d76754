"""Fifty random faults at random bytes: the right file or a clear line, and nothing that stays."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from huggingface_hub import constants

from checkpoints.golden_cases import GOLDEN
from hub_server import ON_ANSWER, Fault, LoopbackHub
from vitcli.errors import HubError
from vitcli.hub.fetch import fetch

CASE = GOLDEN / "timm_dinov2"
FILES = {name: (CASE / name).read_bytes() for name in ("config.json", "model.safetensors")}
PLACES = {
    "/api/models/": 600,
    "GET /me/model/resolve/": len(FILES["config.json"]),
    "GET /lfs/": len(FILES["model.safetensors"]),
}
"""Where something may go wrong, and in how many bytes."""


def random_fault(draw: random.Random) -> Fault:
    where = draw.choice(list(PLACES))
    # A flipped bit in a listing is caught by TLS and by nobody else.
    kinds = [
        k for k in ("status", "status", "status", *ON_ANSWER) if k != "flip" or "/api/" not in where
    ]
    return Fault(
        draw.choice(kinds),  # type: ignore[arg-type]
        where,
        at=draw.randrange(PLACES[where]),
        nth=draw.choice((1, 1, 1, 2)),
        times=draw.choice((1, 2, 99, 99)),
        seconds=2.0,
        status=draw.choice((401, 403, 404, 429, 500, 503)),
        code=draw.choice(("", "", "RepoNotFound", "EntryNotFound", "GatedRepo")),
    )


def set_patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, seconds)


def check(folder: Path) -> None:
    """That what the caller would read is what the Hub has."""
    for name, content in FILES.items():
        assert (folder / name).read_bytes() == content, name


def test_fifty_random_faults(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("me/model", FILES)
    outcomes = {"right": 0, "said": 0, "struck": 0}
    for number in range(50):
        fault = random_fault(random.Random(number))
        if fault.kind == "slow":
            fault.seconds = 0.001
        if fault.kind == "stall":
            fault.times = min(fault.times, 2)
        cache = str(tmp_path / str(number))
        monkeypatch.setenv("HF_HUB_CACHE", cache)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        hub.faults[:] = [fault]
        set_patience(monkeypatch, 0.3)
        try:
            check(fetch("me/model").parent)
            outcomes["right"] += 1
        except HubError as error:
            assert error.where == "me/model" and error.what and error.hint, fault
            outcomes["said"] += 1
        outcomes["struck"] += fault.struck > 0
        hub.faults.clear()
        set_patience(monkeypatch, 10.0)
        try:  # nothing that is wrong is in the cache for a run that asks no one
            check(fetch("me/model", offline=True).parent)
        except HubError as error:
            assert "in the cache" in error.what and "damaged" not in error.what, fault
        check(fetch("me/model").parent)  # nor for one that does
    assert min(outcomes.values()) >= 4 and outcomes["struck"] >= 25, outcomes
