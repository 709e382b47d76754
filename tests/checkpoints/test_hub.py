"""Fetching with the real client from a server on loopback: the right file or a clear line."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from checkpoints.golden_cases import GOLDEN
from checkpoints.loopback_hub import COMMIT, Hub, loopback_hub
from vitcli.checkpoints.hub import cached, fetch, reachable
from vitcli.checkpoints.load import load
from vitcli.errors import HubError

CASE = GOLDEN / "timm_dinov2"
NAMES = ("config.json", "model.safetensors")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one repo, and an empty cache."""
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with loopback_hub({name: (CASE / name).read_bytes() for name in NAMES}) as running:
        point_to(monkeypatch, running.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield running


def point_to(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def test_a_repo_is_fetched_once(hub: Hub) -> None:
    assert cached("me/model") is None
    heard: list[tuple[str, int, int | None]] = []
    folder = fetch("me/model", on_progress=lambda *event: heard.append(event))
    for name in NAMES:
        assert (folder / name).read_bytes() == (CASE / name).read_bytes()
    size = (CASE / "model.safetensors").stat().st_size
    assert heard[-1] == ("model.safetensors", size, size)
    assert cached("me/model") == folder and cached("me/model", COMMIT) == folder

    hub.asked.clear()
    assert fetch("me/model") == folder
    assert hub.asked == ["HEAD /me/model/resolve/main/config.json"]  # is it still the latest?
    hub.asked.clear()
    assert fetch("me/model", COMMIT) == folder and fetch("me/model", offline=True) == folder
    assert hub.asked == []


def test_a_model_is_loaded_by_its_repo(hub: Hub) -> None:
    images = torch.rand(1, 3, 56, 56)
    with torch.inference_mode():
        assert torch.equal(load("me/model@main")(images), load(CASE)(images))


def test_a_damaged_download_is_fetched_again(hub: Hub) -> None:
    hub.flip = 1
    folder = fetch("me/model")
    assert (folder / "model.safetensors").read_bytes() == (CASE / "model.safetensors").read_bytes()
    assert hub.flip == 0


def test_a_download_damaged_twice_is_removed_and_said(hub: Hub) -> None:
    hub.flip = 2
    with pytest.raises(HubError, match=r"model\.safetensors arrived damaged") as caught:
        fetch("me/model")
    assert caught.value.where == "me/model" and caught.value.hint
    assert cached("me/model") is None
    with pytest.raises(HubError, match="is not in the cache"):
        fetch("me/model", offline=True)


def test_a_file_that_rots_in_the_cache_is_found(hub: Hub) -> None:
    folder = fetch("me/model")
    blob = (folder / "model.safetensors").resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(HubError, match="damaged"):
        fetch("me/model", offline=True)
    fetch("me/model")
    assert (folder / "model.safetensors").read_bytes() == (CASE / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("repo", "revision", "said"),
    [
        ("me/missing", None, "there is no such repo on the Hub, and no such folder here"),
        ("me/model", "v9", "has no revision 'v9'"),
        ("me/..", None, "is not a name of a repo"),
    ],
)
def test_what_is_not_there(hub: Hub, repo: str, revision: str | None, said: str) -> None:
    with pytest.raises(HubError, match=said) as caught:
        fetch(repo, revision)
    assert caught.value.where == repo and str(caught.value).count("\n") == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_there(hub: Hub, name: str) -> None:
    del hub.files[name]
    with pytest.raises(HubError, match=f"has no {name}"):
        fetch("me/model")


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "GatedRepo", "access has to be asked for"),
        (401, "", "there is no such repo|access is refused"),
        (403, "", r"access is refused \(403\)"),
        (429, "", r"asks for patience \(429\)"),
        (500, "", "answered with error 500"),
    ],
)
def test_refusals(hub: Hub, status: int, code: str, said: str) -> None:
    hub.status, hub.code = status, code
    with pytest.raises(HubError, match=said) as caught:
        fetch("me/model")
    assert str(caught.value).count("\n") == 1


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        point_to(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
    begin = time.monotonic()
    with pytest.raises(HubError, match="the Hub cannot be reached"):
        fetch("me/model")
    assert not reachable()
    assert time.monotonic() - begin < 5


def test_without_a_network_the_cache_will_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("me/model")
    point_to(monkeypatch, "http://127.0.0.1:9")
    assert fetch("me/model") == folder
    assert load("me/model").config.width == 36


def test_offline_asks_no_one(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match=r"config\.json is not in the cache"):
        fetch("me/model", offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not reachable()
    with pytest.raises(HubError, match=r"config\.json is not in the cache"):
        fetch("me/model")
    assert hub.asked == []


def test_reachable_is_decided_in_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reachable(timeout=3.0)
    hub.status = 500
    assert reachable(timeout=3.0)  # an error page is an answer
    with socket.socket() as silent:  # accepts and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        assert not reachable(timeout=0.3)
        assert time.monotonic() - begin < 2
    monkeypatch.setenv("HF_ENDPOINT", "no address")
    assert not reachable(timeout=0.3)
