"""Fetching with the real client from a loopback server: the right file or a clear error."""

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import (
    constants,
    hf_hub_download,
    scan_cache_dir,
    snapshot_download,
    try_to_load_from_cache,
)

from checkpoints.golden_cases import GOLDEN
from conftest import VitProcess, use_hub, wait_for
from hub_server import LoopbackHub
from loopback import Fault
from vitcli.errors import HubError, VitWarning
from vitcli.hub import registry
from vitcli.hub.cache import RepoCache
from vitcli.hub.fetch import cached, fetch, reachable
from vitcli.hub_requests import Transfer

CASE = GOLDEN / "timm_dinov2"
FILES = {name: (CASE / name).read_bytes() for name in ("config.json", "model.safetensors")}
WEIGHTS = FILES["model.safetensors"]
LISTING = "GET /api/models/me/model/revision/main?blobs=true"


@pytest.fixture
def commit(hub):
    """The commit of "me/model", the only repo."""
    return hub.add("me/model", FILES)


def blob_path(name: str = "model.safetensors") -> Path:
    """Path of a file's content in the cache."""
    return Path(str(try_to_load_from_cache("me/model", name))).resolve()


def partial_path() -> Path:
    """Path of the weights during the download."""
    return next((RepoCache("me/model").directory / "blobs").glob("*.incomplete"))


def downloads(hub: LoopbackHub) -> list[str]:
    """The requests for contents of large files."""
    return [request for request in hub.requests if "GET /lfs/" in request]


def fetch_error(repo: str = "me/model", revision: str | None = None, **options: Any) -> HubError:
    """Return the error: two lines that start with the repo."""
    with pytest.raises(HubError) as caught:
        fetch(repo, revision, **options)
    assert str(caught.value).count("\n") == 1 and str(caught.value).startswith(f"{repo}: ")
    return caught.value


# ---------------------------------------------------------------------------------------------
# Fetching and caching


def test_repo_is_fetched_and_verified_once(hub, commit, monkeypatch):
    assert cached("me/model") is None
    transfers: list[Transfer] = []
    file = fetch("me/model", on_progress=transfers.append)
    for name, content in FILES.items():
        assert (file.parent / name).read_bytes() == content
    assert transfers[-1] == ("model.safetensors", len(WEIGHTS), len(WEIGHTS), None)
    assert cached("me/model") == cached("me/model", commit) == file.parent
    assert cached("me/model", "other") is None

    monkeypatch.setattr("vitcli.hub.cache.digest_of", lambda *_: pytest.fail("was read again"))
    hub.requests.clear()
    assert fetch("me/model") == file
    assert hub.requests == [LISTING]  # is it still the latest?
    hub.requests.clear()
    assert fetch("me/model", commit) == file and fetch("me/model", offline=True) == file
    assert hub.requests == []
    (file.parent / "config.json").unlink()  # without it, the model would be mistaken for another
    assert fetch_error(offline=True).what == "only partly in the cache: config.json is missing"


def test_latest_commit_is_fetched(hub, commit):
    old = fetch("me/model")
    hub.repos["me/model"].refs["v1.0"] = commit
    newer = hub.add("me/model", {"config.json": b"{}"})
    file = fetch("me/model")
    assert file.parent.name == newer and (file.parent / "config.json").read_bytes() == b"{}"
    assert fetch("me/model", commit) == fetch("me/model", "v1.0") == old
    assert fetch("me/model", "v1.0", offline=True) == old
    assert len(downloads(hub)) == 1  # the same content
    assert "in the cache at revision v2" in fetch_error("me/model", "v2", offline=True).what


def test_cache_is_shared_with_client(hub, commit):
    """Files from other tools are found and verified, and other tools find ours."""
    snapshot = Path(snapshot_download("me/model"))
    assert cached("me/model") == snapshot
    hub.requests.clear()
    assert fetch("me/model").parent == snapshot and not downloads(hub)
    hub.add("me/other", FILES)
    file = fetch("me/other")
    for name in FILES:
        path = hf_hub_download("me/other", name, local_files_only=True)
        assert Path(path) == file.parent / name
    assert not scan_cache_dir(constants.HF_HUB_CACHE).warnings
    hub.add("me/part", FILES | {"preprocessor_config.json": b"{}"})
    snapshot_download("me/part", allow_patterns=[*FILES])
    assert "preprocessor_config.json is missing" in fetch_error("me/part", offline=True).what


@pytest.mark.parametrize("first", FILES)
def test_partly_downloaded_repo_is_not_cached(hub, first):
    repo = registry.entries()["test-vit"].repo
    hub.add(repo, FILES)
    hf_hub_download(repo, first)
    with pytest.raises(HubError, match="not downloaded"):
        fetch(repo, offline=True)
    assert cached(repo) is None
    for name in FILES:
        hf_hub_download(repo, name)
    assert cached(repo) == fetch(repo, offline=True).parent


def test_read_only_cache(hub, commit, monkeypatch):
    file = fetch("me/model")
    hub.add("me/model", {"config.json": b"{}"})
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.warns(VitWarning, match=f"is read-only; using the cached commit {commit[:7]}"):
        assert fetch("me/model") == file


# ---------------------------------------------------------------------------------------------
# Repo contents


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["pytorch_model.bin", "model.safetensors", "flax_model.msgpack"], "model.safetensors"),
        (["weights.npz", "README.md"], "weights.npz"),
        (["onnx/model.safetensors", "deit.safetensors", "x.npz"], "deit.safetensors"),
    ],
)
def test_safetensors_are_preferred(hub, files, chosen):
    hub.add("me/model", {name: b"\0" + name.encode() for name in files})
    file = fetch("me/model")
    assert file.name == chosen and cached("me/model") == file.parent
    assert {request.rpartition("/")[2] for request in downloads(hub)} == {chosen}


@pytest.mark.parametrize(("stem", "suffix"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_sharded_checkpoint(hub, stem, suffix):
    last, index = f"b.{suffix}", f"{stem}.{suffix}.index.json"
    weight_map = {"x": f"a.{suffix}", "y": last}
    content = json.dumps({"weight_map": weight_map}).encode()
    files = {"config.json": b"{}", index: content, f"a.{suffix}": b"\0a", last: b"\0b"}
    hub.add("me/model", files)
    options = {"allow_pickle": suffix == "bin"}
    file = fetch("me/model", **options)
    assert file.name == index
    assert {path.name for path in file.parent.iterdir()} == set(files)
    assert cached("me/model") == file.parent
    blob_path(last).unlink()
    assert cached("me/model") is None
    assert last in fetch_error(offline=True, **options).what
    assert fetch("me/model", **options) == file and blob_path(last).read_bytes() == b"\0b"


def test_pickles_need_allow_pickle(hub):
    files = {"config.json": b"{}", "pytorch_model.bin": b"\0pickle", "training_args.bin": b"\0"}
    hub.add("me/model", files)
    assert "--allow-pickle" in str(fetch_error().hint)
    assert not [request for request in hub.requests if "pytorch_model" in request]
    assert fetch("me/model", allow_pickle=True).name == "pytorch_model.bin"
    fetch_error()


def test_repo_with_several_checkpoints(hub):
    hub.add("me/model", {name: b"\0" + name.encode() for name in ("a.npz", "b.npz")})
    assert fetch_error().what == "the repo has several checkpoints: a.npz, b.npz"


# ---------------------------------------------------------------------------------------------
# An untrusted Hub


def test_hostile_etag_and_commit_are_not_followed(hub, commit, tmp_path):
    """The client itself writes wherever an ETag points."""
    target = tmp_path / ".bashrc"
    target.write_text("mine")
    hostile = {"ETag": f'"{target}"', "X-Repo-Commit": "../../evil"}
    hub.faults.append(Fault("body", "config.json", body=b"evil", headers=hostile, times=9))
    assert "damaged in two downloads" in fetch_error().what
    hub.faults.clear()
    fetch("me/model")
    assert target.read_text() == "mine" and not list(tmp_path.rglob("evil"))


def test_link_out_of_the_cache_is_not_followed(hub, commit, tmp_path):
    fetch("me/model")
    outside = tmp_path / "precious"
    outside.write_text("mine")
    blob_path().unlink()
    link = RepoCache("me/model").snapshot(commit) / "model.safetensors"
    link.unlink()
    link.symlink_to(outside)
    fetch_error(offline=True)
    assert fetch("me/model").read_bytes() == WEIGHTS and outside.read_text() == "mine"


def test_download_ends_at_the_listed_size(hub, commit):
    hub.faults.append(Fault("body", "GET /lfs/", body=bytes(len(WEIGHTS) + (8 << 20)), times=2))
    transfers: list[Transfer] = []
    assert "damaged in two" in fetch_error(on_progress=transfers.append).what
    assert max(transfer.done for transfer in transfers) < len(WEIGHTS) + (1 << 20)


@pytest.mark.parametrize(
    "names",
    [
        *(["../x.npz"], ["a\\b.npz"], ["a\nb.npz"], ["/etc/x.npz"], ["a//b.npz"]),
        *([None], ["sha"], ["size"]),
    ],
)
def test_invalid_responses_are_rejected(hub, commit, names, tmp_path):
    sha = "../../evil" if names == ["sha"] else commit
    files = [{"rfilename": name, "blobId": "0" * 40, "size": 1} for name in names]
    files[0]["size"] = "1" if names == ["size"] else 1
    listing = {"id": "me/model", "sha": sha, "siblings": files, "private": False}
    hub.faults.append(Fault("body", "/revision/", body=json.dumps(listing).encode()))
    assert "sent an invalid response" in fetch_error().what
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"[" * 100_000, b'{"siblings": 3}', b"<html>Please log in</html>"]
)
def test_non_hub_servers_are_recognized(hub, commit, body):
    """Captive portals, proxies, and JSON that is not the Hub's."""
    hub.faults.append(Fault("body", "/revision/", body=body))
    assert fetch_error().hint and fetch("me/model", commit[:7]).read_bytes() == WEIGHTS


# ---------------------------------------------------------------------------------------------
# Damaged files


@pytest.mark.parametrize(
    ("name", "where"), [("model.safetensors", "GET /lfs/"), ("config.json", "config.json")]
)
def test_damaged_downloads(hub, commit, name, where):
    """Damaged once: fetched again. Twice: removed, and an error."""
    hub.faults.append(Fault("flip", where, times=2))
    assert fetch_error().what == f"{name} was damaged in two downloads, and has been removed"
    assert cached("me/model") is None
    fetch_error(offline=True)
    hub.faults[:] = [Fault("flip", where, at=len(FILES[name]) // 2)]
    assert fetch("me/model").read_bytes() == WEIGHTS
    assert hub.faults[0].hits == 1


def test_damaged_cache_is_detected(hub, commit):
    fetch("me/model")
    content = bytearray(WEIGHTS)
    content[-1] ^= 1
    blob_path().write_bytes(content)
    assert "damaged" in fetch_error(offline=True).what
    assert cached("me/model") is None
    assert fetch("me/model").read_bytes() == WEIGHTS
    hub.add("me/other", {"model.safetensors": WEIGHTS[:-1] + b"x"})
    hub.faults.append(Fault("flip", "GET /lfs/"))
    snapshot_download("me/other")  # the client accepts it
    assert "damaged" in fetch_error("me/other", offline=True).what


# ---------------------------------------------------------------------------------------------
# Retries and resumed downloads


@pytest.mark.parametrize("kind", ["truncate", "reset", "stall", "length"])
def test_interrupted_download_is_resumed(hub, commit, kind, monkeypatch):
    """Interrupted three times, each time further on: no byte is sent twice."""
    if kind == "stall":
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults.append(Fault(kind, "GET /lfs/", at=50_000, times=3))
    transfers: list[Transfer] = []
    file = fetch("me/model", on_progress=transfers.append)
    assert file.read_bytes() == WEIGHTS
    assert max(transfer.done for transfer in transfers) == len(WEIGHTS)
    requests = zip(hub.requests, hub.ranges, strict=True)
    ranges = [header for request, header in requests if "GET /lfs/" in request]
    starts = [int(r.removeprefix("bytes=").partition("-")[0] or 0) for r in ranges]
    assert len(starts) >= 4 and all(b - a <= 50_000 for a, b in pairwise(starts)), ranges
    if kind in ("truncate", "length"):  # after a reset, the OS may drop received data
        assert starts == [0, 50_000, 100_000, 150_000]


@pytest.mark.parametrize("where", ["/revision/", "config.json", "GET /lfs/"])
@pytest.mark.parametrize("status", [0, 503, 429])
def test_transient_failures_are_retried(hub, commit, where, status):
    fault = Fault("status" if status else "reset", where, status=status, times=2)
    hub.faults.append(fault)
    transfers: list[Transfer] = []
    assert fetch("me/model", on_progress=transfers.append).read_bytes() == WEIGHTS
    assert fault.hits == 2 and sum(transfer.note is not None for transfer in transfers) == 2


@pytest.mark.parametrize(
    ("where", "status"),
    [("/revision/", None), ("/revision/", 503), ("config.json", 503), ("GET /lfs/", 503)],
)
def test_unresponsive_hub_times_out(hub, commit, where, status, monkeypatch):
    """All attempts together take no longer than the timeout."""
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(constants, name, 600)
    if status:
        hub.faults.append(Fault("status", where, status=status))
    hub.faults.append(fault := Fault("stall", where, times=99))
    start = time.monotonic()
    with pytest.raises(HubError, match="did not respond in time"):
        fetch("me/model", timeout=0.5)
    # On a slow machine, an earlier response may come too late.
    assert fault.hits == 1 or (status and not fault.hits)
    assert time.monotonic() - start < 300


def test_server_that_ignores_ranges(hub, commit):
    hub.faults.append(Fault("body", "GET /lfs/", nth=2, body=WEIGHTS))
    hub.faults.append(Fault("truncate", "GET /lfs/", at=100_000))
    assert fetch("me/model").read_bytes() == WEIGHTS
    assert len(downloads(hub)) == 2


@pytest.mark.parametrize(
    ("status", "header", "value", "pause"),
    [
        (429, "Retry-After", "20", 20.0),
        (429, "RateLimit", '"resolvers";r=0;t=20', 20.0),
        (503, "RateLimit", '"resolvers";r=480;t=250', 1.0),
    ],
)
def test_rate_limits_are_respected(hub, commit, pauses, status, header, value, pause):
    hub.faults.append(Fault("status", "/revision/", status=status, headers={header: value}))
    fetch("me/model")
    assert pauses == [pause]


def test_killed_download_is_resumed(hub, commit):
    hub.faults.append(stall := Fault("stall", "GET /lfs/", at=100_000))
    with VitProcess("pull", "me/model", HF_HUB_DOWNLOAD_TIMEOUT="600") as process:
        wait_for(lambda: stall.hits, process)  # config.json has arrived by then
        wait_for(lambda: partial_path().stat().st_size >= 65_536, process)
        process.kill()
    size, transfers = partial_path().stat().st_size, list[Transfer]()
    assert fetch("me/model", on_progress=transfers.append).read_bytes() == WEIGHTS
    assert hub.ranges[-1] == f"bytes={size}-"
    assert any("resumed" in str(transfer.note) for transfer in transfers)


def test_concurrent_processes_download_once(hub, commit):
    """The first is held up until the others report that they are waiting for it."""
    hub.faults.append(slow := Fault("slow", "GET /lfs/"))
    first = VitProcess("pull", "me/model", HF_HUB_DOWNLOAD_TIMEOUT="600")
    wait_for(lambda: slow.hits, first)
    others = [VitProcess("pull", "me/model") for _ in range(2)]
    for other in others:
        assert any("waiting for another process" in line for line in other.stderr)
    hub.closing.set()
    for process in (first, *others):
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    assert len(downloads(hub)) == 1


def test_full_disk_is_detected_before_download(hub, commit, monkeypatch):
    full_disk = SimpleNamespace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: full_disk)
        assert "MB free" in fetch_error().what
    assert not downloads(hub)
    fetch("me/model")
    hub.add("me/model", {"README.md": b"the same weights"})
    monkeypatch.setattr("shutil.disk_usage", lambda path: full_disk)
    fetch("me/model")


# ---------------------------------------------------------------------------------------------
# Errors


def test_private_and_gated_repos(hub, monkeypatch):
    hub.add("me/private", FILES, private=True)
    hub.add("other/gated", FILES, gated=True)
    assert fetch("me/private").read_bytes() == WEIGHTS  # with the regular token
    hub.readers.clear()
    assert fetch_error("other/gated").what == "access is restricted"
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "no such repo on the Hub" in fetch_error("me/private").what
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the Hub rejected the token (401): Invalid credentials" in fetch_error("me/private").what
    monkeypatch.setenv("HF_TOKEN", "hf_ключ")
    assert "the token contains invalid characters" in fetch_error("me/private").what


@pytest.mark.parametrize(
    ("repo", "revision", "message"),
    [
        ("me/missing", None, "no such repo on the Hub"),
        ("me/model", "v9", "has no revision 'v9'"),
        ("me/..", None, "is not a valid repo"),
        ("me/model", "..", "is not a valid repo or revision name"),
    ],
)
def test_missing_repo_or_revision(hub, commit, repo, revision, message):
    assert message in fetch_error(repo, revision).what


# ---------------------------------------------------------------------------------------------
# Without a network


def test_no_network(hub, pauses, monkeypatch, tmp_path):
    use_hub(monkeypatch, {"HF_ENDPOINT": "http://127.0.0.1:9"}, tmp_path / "home")
    assert "cannot reach 127.0.0.1" in fetch_error().what
    assert not reachable("me/model") and not pauses


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
def test_failing_hub_falls_back_to_cache(hub, commit, fault, monkeypatch):
    file = fetch("me/model")
    if fault.kind == "stall":
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    hub.faults.append(fault)
    with pytest.warns(VitWarning, match=f"cached commit {commit[:7]}"):
        assert fetch("me/model") == file
    assert fault.hits == 1
    hub.faults[:] = [Fault("status", status=400)]
    assert "error 400" in fetch_error().what
    hub.faults[:] = [Fault("status", status=401)]
    fetch_error()


def test_offline_makes_no_requests(hub, commit, monkeypatch):
    assert "--offline" in str(fetch_error(offline=True).hint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not reachable("me/model")
    assert "not in the cache" in fetch_error().what
    assert hub.requests == []


def test_reachable_respects_timeout(hub, commit):
    assert reachable("me/model", timeout=600)
    hub.faults.append(Fault("status", status=500))
    assert not reachable("me/model", timeout=600)
    hub.faults.append(Fault("stall"))
    assert not reachable("me/model", timeout=0.3)
