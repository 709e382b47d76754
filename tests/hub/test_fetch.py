"""Fetching with the real client from a server on loopback: the right file or a clear line."""

from __future__ import annotations

import json
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest
from huggingface_hub import (
    constants,
    hf_hub_download,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import WeakFileLock

from checkpoints.golden_cases import GOLDEN
from conftest import use_hub
from hub_faults import Fault
from hub_server import LoopbackHub
from vitcli.checkpoints.read import read_info
from vitcli.errors import HubError, VitWarning
from vitcli.hub import fetch as hub_module
from vitcli.hub.fetch import cached, fetch, reachable
from vitcli.hub.repo_cache import RepoCache

CASE = GOLDEN / "timm_dinov2"
FILES = {name: (CASE / name).read_bytes() for name in ("config.json", "model.safetensors")}
WEIGHTS = FILES["model.safetensors"]


@pytest.fixture
def commit(hub: LoopbackHub) -> str:
    """The commit of the repo "me/model", which is all that there is."""
    return hub.add("me/model", FILES)


def blob(name: str = "model.safetensors") -> Path:
    """A file's content in the cache."""
    return Path(str(try_to_load_from_cache("me/model", name))).resolve()


def refused(repo: str = "me/model", revision: str | None = None, **options: bool) -> HubError:
    """The two lines that a person reads."""
    with pytest.raises(HubError) as caught:
        fetch(repo, revision, **options)
    assert str(caught.value).count("\n") == 1 and str(caught.value).startswith(f"{repo}: ")
    return caught.value


# ---------------------------------------------------------------------------------------------
# Fetching and finding again


def test_a_repo_is_fetched_once(hub: LoopbackHub, commit: str) -> None:
    assert cached("me/model") is None
    heard: list[tuple[str, int, int | None]] = []
    file = fetch("me/model", on_progress=lambda *event: heard.append(event))
    for name, content in FILES.items():
        assert (file.parent / name).read_bytes() == content
    assert heard[-1] == ("model.safetensors", len(WEIGHTS), len(WEIGHTS))
    assert cached("me/model") == cached("me/model", commit) == file.parent

    hub.asked.clear()
    assert fetch("me/model") == file
    assert hub.asked == ["GET /api/models/me/model/revision/main?blobs=true"]  # still the latest?
    hub.asked.clear()
    assert fetch("me/model", commit) == file and fetch("me/model", offline=True) == file
    assert hub.asked == []
    (file.parent / "config.json").unlink()  # without it, the model would be taken for another
    assert refused(offline=True).what == "is not in the cache"


def test_a_verified_file_is_not_read_again(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("me/model")
    monkeypatch.setattr("vitcli.hub.repo_cache._digest", lambda *_: pytest.fail("was read"))
    fetch("me/model")
    fetch("me/model", offline=True)


def test_the_latest_commit_is_fetched(hub: LoopbackHub, commit: str) -> None:
    old = fetch("me/model")
    newer = hub.add("me/model", {"config.json": b"{}"})
    file = fetch("me/model")
    assert file.parent.name == newer and (file.parent / "config.json").read_bytes() == b"{}"
    assert fetch("me/model", commit) == old
    assert sum(asked.startswith("GET /lfs/") for asked in hub.asked) == 1  # the same content


def test_branches(hub: LoopbackHub, commit: str) -> None:
    hub.store.branch("me/model", "v1.0", "main")
    hub.add("me/model", {"config.json": b"{}"})
    assert fetch("me/model", "v1.0").parent.name == commit
    assert fetch("me/model", "v1.0", offline=True).parent.name == commit
    assert refused(offline=True).what == "is not in the cache"
    assert refused("me/model", "v2", offline=True).what == "v2 is not in the cache"


def test_the_cache_is_the_ordinary_one(hub: LoopbackHub, commit: str) -> None:
    """What others fetched is found by us, checked, and the other way round."""
    theirs = Path(snapshot_download("me/model"))
    assert cached("me/model") == theirs
    hub.asked.clear()
    assert fetch("me/model").parent == theirs and not [a for a in hub.asked if "/lfs/" in a]
    path = hf_hub_download("me/model", "model.safetensors", local_files_only=True)
    assert Path(path) == theirs / "model.safetensors"
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings


def test_ours_is_found_by_others(hub: LoopbackHub, commit: str) -> None:
    file = fetch("me/model")
    for name in FILES:
        path = hf_hub_download("me/model", name, local_files_only=True)
        assert Path(path) == file.parent / name
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings


def test_a_cache_that_cannot_be_written(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fetch("me/model")
    monkeypatch.setattr("vitcli.hub.repo_cache.write_text", _raise_read_only)
    hub.add("me/model", {"more": b"more"})
    assert fetch("me/model").resolve() == file.resolve()


def _raise_read_only(*_: object) -> None:
    raise OSError(30, "Read-only file system")


# ---------------------------------------------------------------------------------------------
# What a repo may hold


SHARDS = {"a.safetensors": ["x"], "b.safetensors": ["y"]}
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    ).encode(),
    "a.safetensors": b"\0a",
    "b.safetensors": b"\0b",
}


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["pytorch_model.bin", "model.safetensors", "flax_model.msgpack"], "model.safetensors"),
        (["weights.npz", "README.md"], "weights.npz"),
        (["open_clip_model.safetensors", "weights.npz"], "open_clip_model.safetensors"),
        (["onnx/model.safetensors", "deit.safetensors"], "deit.safetensors"),
    ],
)
def test_safetensors_come_first(hub: LoopbackHub, files: list[str], chosen: str) -> None:
    hub.add("me/model", {name: b"\0" + name.encode() for name in files})
    file = fetch("me/model")
    assert file.name == chosen and cached("me/model") == file.parent
    got = {asked.rpartition("/")[2] for asked in hub.asked if asked.startswith("GET /lfs/")}
    assert got == {chosen}  # and nothing else
    hub.asked.clear()
    assert fetch("me/model") == file and len(hub.asked) == 1


def test_shards(hub: LoopbackHub) -> None:
    hub.add("me/model", SHARDED)
    file = fetch("me/model")
    assert file.name == "model.safetensors.index.json"
    assert {path.name for path in file.parent.iterdir()} == set(SHARDED)
    assert cached("me/model") == file.parent
    blob("b.safetensors").unlink()
    assert cached("me/model") is None
    assert refused(offline=True).what == "is not in the cache"
    assert fetch("me/model") == file and blob("b.safetensors").read_bytes() == b"\0b"


def test_pickles_have_to_be_allowed(hub: LoopbackHub) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"\0pickle", "training_args.bin": b"\0"}
    hub.add("me/model", files)
    error = refused()
    assert "as a pickle only, pytorch_model.bin" in error.what
    assert "--allow-pickle" in str(error.hint)
    assert not [asked for asked in hub.asked if "pytorch_model" in asked]
    assert fetch("me/model", allow_pickle=True).name == "pytorch_model.bin"
    refused()


def test_several_checkpoints_are_not_guessed_at(hub: LoopbackHub) -> None:
    hub.add("me/model", {"a.npz": b"\0a", "b.npz": b"\0b"})
    error = refused()
    assert error.what == "holds several checkpoints: a.npz, b.npz"
    assert error.hint == "fetch one (hf download me/model a.npz) and name its path"


def test_nothing_to_load(hub: LoopbackHub) -> None:
    hub.add("me/model", {"README.md": b"# soon"})
    assert refused().what == "holds no weights that we read, but README.md"


def test_a_config_that_is_not_listed_is_asked_for(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its config a model would be taken for another one."""
    ask = hub_module._ask

    def forget(cache: RepoCache, revision: str) -> object:
        found = ask(cache, revision)
        del found.listing["config.json"]
        return found

    monkeypatch.setattr(hub_module, "_ask", forget)
    assert refused().what == "lists no config.json but has one"


# ---------------------------------------------------------------------------------------------
# Damage


def test_a_damaged_download_is_fetched_again(hub: LoopbackHub, commit: str) -> None:
    hub.faults.append(Fault("flip", "GET /lfs/", at=len(WEIGHTS) // 2))
    assert fetch("me/model").read_bytes() == WEIGHTS
    assert hub.faults[0].struck == 1


@pytest.mark.parametrize(
    ("name", "where"),
    [("model.safetensors", "GET /lfs/"), ("config.json", "resolve/")],
)
def test_a_download_damaged_twice_is_removed_and_said(
    hub: LoopbackHub, commit: str, name: str, where: str
) -> None:
    hub.faults.append(Fault("flip", where, times=2))
    assert refused().what == f"{name} arrived damaged, twice, and was removed"
    assert cached("me/model") is None
    refused(offline=True)
    assert fetch("me/model").read_bytes() == WEIGHTS


def test_a_file_that_rots_in_the_cache_is_found(hub: LoopbackHub, commit: str) -> None:
    fetch("me/model")
    content = bytearray(WEIGHTS)
    content[-1] ^= 1
    blob().write_bytes(content)
    error = refused(offline=True)
    assert error.what == "model.safetensors is damaged in the cache, and was removed"
    assert cached("me/model") is None
    assert fetch("me/model").read_bytes() == WEIGHTS


def test_what_others_left_damaged_is_found_offline(hub: LoopbackHub, commit: str) -> None:
    hub.faults.append(Fault("flip", "GET /lfs/"))
    snapshot_download("me/model")  # accepts it
    assert "damaged" in refused(offline=True).what


@pytest.mark.parametrize("kind", ["truncate", "reset", "stall", "length"])
def test_a_cut_download_goes_on_by_range(
    hub: LoopbackHub, commit: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut three times, each time further on; no byte is sent twice but those of one chunk."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.faults.append(Fault(kind, "GET /lfs/", at=50_000, times=3, seconds=5))  # type: ignore[arg-type]
    heard: list[int] = []
    file = fetch("me/model", on_progress=lambda name, done, total: heard.append(done))
    assert file.read_bytes() == WEIGHTS and max(heard) == len(WEIGHTS)
    ranges = [r for r, asked in zip(hub.ranges, hub.asked, strict=True) if "GET /lfs/" in asked]
    begins = [int(r.removeprefix("bytes=").partition("-")[0] or 0) for r in ranges]
    assert len(begins) == 4 and all(b - a >= 45_904 for a, b in pairwise(begins)), ranges


def test_a_connection_that_is_always_reset(hub: LoopbackHub, commit: str) -> None:
    hub.faults.append(Fault("reset", "GET /lfs/", at=50_000, times=99))
    assert refused().what == "the connection broke in the middle"
    assert hub.faults[0].struck == 3
    assert list((RepoCache("me/model").folder / "blobs").glob("*.incomplete")) == []


def test_no_one_finds_a_damaged_file(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its place in the cache after it was checked: whoever is killed meanwhile leaves
    nothing that another tool would take for whole."""
    seen: list[bool] = []

    def look(path: Path, digest: str) -> str:
        seen.append((RepoCache("me/model").blob(digest)).exists())
        return digest

    monkeypatch.setattr("vitcli.hub.repo_cache._digest", look)
    fetch("me/model")
    assert seen == [True, False]  # config.json, which the client put there; the weights


def test_what_killed_downloads_left_is_cleared(hub: LoopbackHub, commit: str) -> None:
    fetch("me/model")
    blobs, locks = blob().parent, Path(constants.HF_HUB_CACHE) / ".locks" / "models--me--model"
    for name in ("dead.incomplete", "dead.0123abcd.incomplete", "alive.4567.incomplete"):
        (blobs / name).write_bytes(b"half")
    with WeakFileLock(locks / "alive.lock"):  # as the client does while it downloads
        fetch("me/model")
    assert [path.name for path in blobs.glob("*.incomplete")] == ["alive.4567.incomplete"]


# ---------------------------------------------------------------------------------------------
# Refusals


def test_private_and_gated_repos(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/private", FILES, private=True)
    hub.add("other/gated", FILES, gated=True)
    assert fetch("me/private").read_bytes() == WEIGHTS  # with the ordinary token
    hub.may_read.clear()
    error = refused("other/gated")
    assert error.what == "access has to be asked for"
    assert error.hint == (
        "ask on the repo's page, then log in with `hf auth login`, or set HF_TOKEN"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert refused("me/private").what == "there is no such repo on the Hub, and no such folder here"
    assert "for a private repo, log in" in str(refused("me/private").hint)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refused("me/private").what == "the Hub does not know this token (401)"


@pytest.mark.parametrize(
    ("repo", "revision", "said"),
    [
        ("me/missing", None, "there is no such repo on the Hub, and no such folder here"),
        ("me/model", "v9", "has no revision 'v9'"),
        ("me/model", "0" * 40, f"has no revision '{'0' * 40}'"),
        ("me/..", None, "is not a name of a repo"),
    ],
)
def test_what_is_not_there(
    hub: LoopbackHub, commit: str, repo: str, revision: str | None, said: str
) -> None:
    assert refused(repo, revision).what == said


def test_a_file_that_is_not_there(hub: LoopbackHub, commit: str) -> None:
    hub.faults.append(
        Fault("status", "/resolve/", status=404, code="EntryNotFound", nth=2, times=99)
    )
    assert refused().what == "has no config.json"


@pytest.mark.parametrize("where", ["/api/models/", "/resolve/", "GET /lfs/"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "the Hub does not know this token (401)"),
        (403, "access is refused (403)"),
        (429, "the Hub asks for patience (429)"),
        (500, "the Hub is in trouble (error 500)"),
        (503, "the Hub is in trouble (error 503)"),
        (418, "the Hub answered with error 418"),
    ],
)
def test_refusals(hub: LoopbackHub, commit: str, where: str, status: int, said: str) -> None:
    hub.faults.append(Fault("status", where, status=status, times=99))
    what = refused().what
    assert what == said or (status == 401 and what.startswith("there is no such repo on the Hub"))
    assert cached("me/model") is None
    hub.faults.clear()
    assert fetch("me/model").read_bytes() == WEIGHTS


def test_answers_that_make_no_sense(hub: LoopbackHub, commit: str) -> None:
    for cut in (0, 20):
        hub.faults[:] = [Fault("length", "/api/models/", at=cut)]
        assert refused().what == "the Hub's answer is not understood"
    assert fetch("me/model", commit[:7]).read_bytes() == WEIGHTS


# ---------------------------------------------------------------------------------------------
# Without a network


def test_no_network(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    use_hub(monkeypatch, {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}, tmp_path / "home")
    begin = time.monotonic()
    assert refused().what == "the Hub cannot be reached"
    assert not reachable()
    assert time.monotonic() - begin < 10


def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_hub(monkeypatch, {"HF_ENDPOINT": "nonsense"}, tmp_path)
    assert refused().what == "HF_ENDPOINT is no address"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", status=503, times=99),
        Fault("status", status=429, times=99),
        Fault("stall", times=99),
        Fault("reset", times=99),
        Fault("truncate", at=30, times=99),
    ],
    ids=lambda fault: f"{fault.kind}{fault.status}",
)
def test_a_hub_in_trouble_leaves_the_cache(
    hub: LoopbackHub, commit: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = fetch("me/model")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub.faults.append(fault)
    with pytest.warns(VitWarning, match=f"the cache has of it is used, commit {commit[:7]}"):
        assert fetch("me/model") == file
    assert fault.struck == 1
    hub.faults[:] = [Fault("status", status=401)]
    refused()


def test_a_hub_that_does_not_answer(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub.faults.append(Fault("stall", times=99))
    assert refused().what == "the Hub did not answer in time"


def test_offline_asks_no_one(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(offline=True).hint == "fetch it once without --offline"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not reachable()
    assert refused().what == "is not in the cache"
    assert hub.asked == []


def test_reachable_is_decided_in_time(
    hub: LoopbackHub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reachable(timeout=3.0)
    hub.faults.append(Fault("status", status=500))
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


def test_a_model_is_read_by_its_repo(hub: LoopbackHub, commit: str) -> None:
    info, file = read_info("me/model@main")
    assert info == read_info(CASE)[0] and file.name == "model.safetensors"
