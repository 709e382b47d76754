"""The loopback Hub, tried with the real client: what is pushed comes back, refusals and faults."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx

from hub_faults import Fault
from hub_server import LoopbackHub, loopback_hub

WEIGHTS = bytes(range(256)) * 300
FILES = {
    "README.md": b"---\nlicense: apache-2.0\n---\n# A model\n",
    "config.json": b"{}\n",
    "empty": b"",
    "images/deep/cat.png": b"\x89PNG\0\0",
    "model.safetensors": WEIGHTS,
}
LARGE = {"images/deep/cat.png", "model.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What is to be pushed."""
    for name, content in FILES.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "model"


def contents(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def test_what_is_pushed_comes_back(hub: LoopbackHub, folder: Path) -> None:
    api = HfApi()
    assert api.whoami()["name"] == "me"
    assert api.create_repo("me/model").repo_id == "me/model"
    assert api.create_repo("me/model", exist_ok=True).url == f"{hub.url}/me/model"
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_repo("me/model")
    commit = api.upload_folder(repo_id="me/model", folder_path=folder).oid
    assert hub.files("me/model") == FILES

    assert contents(snapshot_download("me/model")) == FILES
    assert Path(hf_hub_download("me/model", "model.safetensors")).read_bytes() == WEIGHTS
    assert api.model_info("me/model").sha == commit
    assert {s.rfilename for s in api.model_info("me/model").siblings or ()} == set(FILES)
    assert [c.title for c in api.list_repo_commits("me/model")][1:] == ["initial commit"]


def test_only_large_files_go_to_the_second_origin(hub: LoopbackHub, folder: Path) -> None:
    HfApi().create_repo("me/model")
    HfApi().upload_folder(repo_id="me/model", folder_path=folder)
    assert sum(asked.startswith("PUT /lfs/") for asked in hub.asked) == len(LARGE)
    for name in FILES:
        meta = get_hf_file_metadata(hf_hub_url("me/model", name), token="hf_me")
        assert meta.size == len(FILES[name])
        assert meta.location.startswith(hub.storage_url if name in LARGE else hub.url)
        assert len(meta.etag or "") == (64 if name in LARGE else 40)
    request = urllib.request.Request(meta.location, headers={"Authorization": "Bearer hf_me"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)


def test_only_what_changed_is_uploaded(hub: LoopbackHub, folder: Path) -> None:
    HfApi().create_repo("me/model")
    first = HfApi().upload_folder(repo_id="me/model", folder_path=folder).oid
    hub.asked.clear()
    assert HfApi().upload_folder(repo_id="me/model", folder_path=folder).oid == first
    (folder / "config.json").write_bytes(b"[]\n")
    assert HfApi().upload_folder(repo_id="me/model", folder_path=folder).oid != first
    assert not [asked for asked in hub.asked if "PUT /lfs/" in asked]
    assert hub.files("me/model") == {**FILES, "config.json": b"[]\n"}


def test_trees_come_in_pages(hub: LoopbackHub) -> None:
    hub.add("me/model", FILES)
    hub.page_size = 2
    files = {f.path: f for f in HfApi().list_repo_tree("me/model", recursive=True)}
    assert set(files) == {*FILES, "images", "images/deep"}
    assert {name for name, file in files.items() if getattr(file, "lfs", None)} == LARGE
    assert len([asked for asked in hub.asked if "/tree/" in asked]) == 4
    top = [file.path for file in HfApi().list_repo_tree("me/model")]
    assert top == ["README.md", "config.json", "empty", "images", "model.safetensors"]
    assert [file.path for file in HfApi().list_repo_tree("me/model", "images")] == ["images/deep"]


def test_a_commit_is_whole_or_not_at_all(hub: LoopbackHub) -> None:
    first = hub.add("me/model", FILES)
    new = CommitOperationAdd("config.json", b"new")
    absent = CommitOperationDelete("absent.txt")
    with pytest.raises(EntryNotFoundError):
        HfApi().create_commit("me/model", [new, absent], commit_message="broken")
    second = hub.add("me/model", {"more": b"more"})
    with pytest.raises(HfHubHTTPError, match="412"):
        HfApi().create_commit(
            "me/model",
            [CommitOperationAdd("config.json", b"new")],
            commit_message="late",
            parent_commit=first,
        )
    assert hub.store.find("me/model", "main")[0] == second
    operations = [CommitOperationDelete("images/"), CommitOperationDelete("more")]
    HfApi().create_commit("me/model", operations, commit_message="clean", parent_commit=second)
    assert set(hub.files("me/model")) == set(FILES) - {"images/deep/cat.png"}
    assert hub.files("me/model", first) == FILES


def test_branches_and_pull_requests(hub: LoopbackHub) -> None:
    first = hub.add("me/model", FILES)
    HfApi().create_branch("me/model", branch="v2")
    HfApi().create_branch("me/model", branch="v2", exist_ok=True)
    new = CommitOperationAdd("config.json", b"v2")
    HfApi().create_commit("me/model", [new], commit_message="v2", revision="v2")
    more = CommitOperationAdd("config.json", b"pr")
    done = HfApi().create_commit("me/model", [more], commit_message="try", create_pr=True)
    assert done.pr_url == f"{hub.url}/me/model/discussions/1" and done.pr_revision == "refs/pr/1"
    for revision, content in {"main": b"{}\n", "v2": b"v2", "refs/pr/1": b"pr"}.items():
        path = hf_hub_download("me/model", "config.json", revision=revision)
        assert Path(path).read_bytes() == content
    refs = HfApi().list_repo_refs("me/model")
    assert [ref.name for ref in refs.branches] == ["main", "v2"]
    assert refs.branches[0].target_commit == first


def test_bad_front_matter_is_refused(hub: LoopbackHub) -> None:
    hub.add("me/model", {})
    readme = CommitOperationAdd("README.md", b"---\nlicense: mit\n# no end\n")
    with pytest.raises(ValueError, match="the front matter has no end"):
        HfApi().create_commit("me/model", [readme], commit_message="card")


def test_private_and_gated_repos(hub: LoopbackHub) -> None:
    HfApi().create_repo("me/private", private=True)
    hub.add("me/private", FILES)
    hub.add("other/gated", FILES, gated=True)
    hf_hub_download("me/private", "config.json")
    hf_hub_download("other/gated", "config.json")
    hub.may_read.clear()
    for token in ("hf_me", False):
        with pytest.raises(GatedRepoError):
            hf_hub_download("other/gated", "empty", token=token)
    for token in ("hf_other", False):
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download("me/private", "empty", token=token)
    with pytest.raises(HfHubHTTPError, match="401"):
        hf_hub_download("me/private", "empty", token="hf_wrong")
    with pytest.raises(HfHubHTTPError, match="403"):
        HfApi().create_repo("other/mine")


@pytest.mark.parametrize(
    ("repo", "revision", "name", "error"),
    [
        ("me/missing", "main", "config.json", RepositoryNotFoundError),
        ("me/model", "v9", "config.json", RevisionNotFoundError),
        ("me/model", "main", "missing", EntryNotFoundError),
    ],
)
def test_what_is_not_there(
    hub: LoopbackHub, repo: str, revision: str, name: str, error: type[Exception]
) -> None:
    hub.add("me/model", FILES)
    with pytest.raises(error):
        hf_hub_download(repo, name, revision=revision)


# ---------------------------------------------------------------------------------------------
# Faults


def body(hub: LoopbackHub, *, begin: int | None = None) -> bytes:
    """One download of the weights, without the client's retries."""
    meta = get_hf_file_metadata(hf_hub_url("me/model", "model.safetensors"), token="hf_me")
    headers = {} if begin is None else {"Range": f"bytes={begin}-"}
    with httpx.Client(verify=False, timeout=0.3) as client:
        return client.get(meta.location, headers=headers).content


def test_ranges(hub: LoopbackHub) -> None:
    hub.add("me/model", FILES)
    assert body(hub, begin=1000) == WEIGHTS[1000:]
    assert body(hub, begin=len(WEIGHTS) - 1) == WEIGHTS[-1:]


@pytest.mark.parametrize("at", [0, 1, 20_000, len(WEIGHTS) - 1])
def test_faults_at_a_byte(hub: LoopbackHub, at: int) -> None:
    hub.add("me/model", FILES)

    def order(kind: str) -> None:
        hub.faults[:] = [Fault(kind, "GET /lfs/", at=at, seconds=5)]  # type: ignore[arg-type]

    order("flip")
    damaged = body(hub)
    assert [i for i, (a, b) in enumerate(zip(damaged, WEIGHTS, strict=True)) if a != b] == [at]
    order("length")
    assert body(hub) == WEIGHTS[:at]
    order("truncate")
    with pytest.raises(httpx.RemoteProtocolError):
        body(hub)
    order("reset")
    with pytest.raises(httpx.ReadError):
        body(hub)
    order("stall")
    with pytest.raises(httpx.ReadTimeout):
        body(hub)
    assert body(hub) == WEIGHTS  # once is once


def test_faults_are_counted(hub: LoopbackHub) -> None:
    hub.add("me/model", FILES)
    hub.faults.append(Fault("status", "/resolve/", nth=2, times=2, status=503, code="Busy"))
    url = f"{hub.url}/me/model/resolve/main/config.json"
    with httpx.Client(verify=False, headers={"Authorization": "Bearer hf_me"}) as client:
        answers = [client.get(url) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 503, 503, 200]
    assert answers[1].headers["X-Error-Code"] == "Busy" and hub.faults[0].struck == 2


def test_slow(hub: LoopbackHub) -> None:
    hub.add("me/model", FILES)
    hub.faults.append(Fault("slow", "GET /lfs/", seconds=0.01))
    assert body(hub) == WEIGHTS and hub.faults[0].struck == 1


def test_a_cut_download_goes_on_by_range(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("me/model", FILES)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.faults.append(Fault("truncate", "GET /lfs/", at=50_000))
    assert Path(hf_hub_download("me/model", "model.safetensors")).read_bytes() == WEIGHTS
    assert hub.ranges[-1].startswith("bytes=49152-")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("hangup", "PUT /lfs/", at=7777, times=99),
        Fault("status", "PUT /lfs/", status=500, times=99),
        Fault("status", "/commit/", status=500, times=99),
        Fault("status", "/preupload/", status=403, times=99),
        Fault("status", "/objects/batch", status=429, times=99),
    ],
    ids=lambda fault: f"{fault.kind} {fault.where}",
)
def test_a_push_that_fails_changes_nothing(hub: LoopbackHub, folder: Path, fault: Fault) -> None:
    before = hub.add("me/model", {"config.json": b"old"})
    hub.faults.append(fault)
    with pytest.raises((HfHubHTTPError, httpx.TransportError, RuntimeError)):
        HfApi().upload_folder(repo_id="me/model", folder_path=folder)
    assert fault.struck and hub.store.find("me/model", "main")[0] == before
    hub.faults.clear()
    HfApi().upload_folder(repo_id="me/model", folder_path=folder)
    assert hub.files("me/model") == FILES


def test_it_runs_by_hand_and_keeps_what_was_pushed(tmp_path: Path, folder: Path) -> None:
    server = Path(__file__).with_name("hub_server.py")
    for turn in range(2):
        with subprocess.Popen(
            [sys.executable, str(server), "--root", str(tmp_path / "kept")],
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            line = running.stdout.readline()
            found = re.fullmatch(
                r"export HF_ENDPOINT=(\S+) HF_TOKEN=(\S+) HF_HUB_DISABLE_XET=1\n", line
            )
            assert found, line
            api = HfApi(endpoint=found[1], token=found[2])
            if turn == 0:
                api.create_repo("me/model")
                api.create_commit(
                    "me/model", [CommitOperationAdd("a.txt", b"a")], commit_message="first"
                )
            assert api.list_repo_files("me/model") == ["a.txt"]
            running.terminate()


def test_two_hubs_at_once(tmp_path: Path) -> None:
    with loopback_hub(tmp_path / "a") as one, loopback_hub(tmp_path / "b") as two:
        one.add("me/model", FILES)
        assert one.url != two.url and not two.store.exists("me/model")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", int(one.url.rpartition(":")[2])))
