"""The Hub cache, read without the client and compared with what the client finds."""

import hashlib
import runpy
from pathlib import Path

import pytest
from huggingface_hub import constants, scan_cache_dir

from vitcli.hub import cache
from vitcli.hub.cache import RepoCache
from vitcli.hub.fetch import cached

COMMIT = "c" * 40
VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
FILES = {"model.safetensors": b"weights" * 1000, "config.json": b"{}"}


def add_to_cache(root: Path, repo: str, files: dict[str, bytes], kind: str = "models") -> Path:
    """Store a repo's files in the client's layout and return the snapshot."""
    directory = root / f"{kind}--{repo.replace('/', '--')}"
    snapshot = directory / "snapshots" / COMMIT
    for path in (directory / "refs", directory / "blobs", snapshot):
        path.mkdir(parents=True)
    (directory / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        blob = directory / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty cache in a separate home directory."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "~/hf")
    return tmp_path / "hf" / "hub"


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"XDG_CACHE_HOME": "/xdg"},
        {"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/xdg"},
        {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
        {"HF_HUB_CACHE": "$HOME/new", "HUGGINGFACE_HUB_CACHE": "/old"},
    ],
)
def test_root_matches_client(root, monkeypatch, variables):
    monkeypatch.delenv("HF_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache.root()) == runpy.run_path(constants.__file__)["HF_HUB_CACHE"]


def test_remove_leaves_other_repos(root):
    for repo in ("me/model2", "you/model"):
        add_to_cache(root, repo, FILES)
    config = add_to_cache(root, "me/model", FILES) / "config.json"
    config.resolve().replace(config)  # as without symlinks
    add_to_cache(root, "me/model", FILES, kind="datasets")
    expected = sum(map(len, FILES.values()))
    assert RepoCache("me/model").size() == RepoCache("me/model").remove() == expected
    remaining = {(repo.repo_type, repo.repo_id) for repo in scan_cache_dir(root).repos}
    assert remaining == {("model", "me/model2"), ("model", "you/model"), ("dataset", "me/model")}
    blobs = root / "models--me--cut" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"1234")  # an interrupted download
    assert RepoCache("me/cut").remove() == 4 and not blobs.exists()


def test_remove_keeps_shared_blobs(root):
    """huggingface_hub 2 keeps one copy of a file shared by several repos, linked from each."""
    shared_blobs = pytest.importorskip("huggingface_hub.utils._shared_blobs")
    name = "ab" * 32
    store = root / "blobs" / "ab" / name
    store.parent.mkdir(parents=True)
    (root / "blobs" / shared_blobs.SHARED_BLOBS_MARKER_NAME).write_text("1\n")
    store.write_bytes(b"weights")
    references = []
    for repo in ("me/one", "me/two"):
        link = add_to_cache(root, repo, FILES) / "model.safetensors"
        blob = link.parent / link.readlink()
        blob.unlink()
        blob.symlink_to(Path("..", "..", "blobs", "ab", name))
        references.append(blob.parent.resolve().joinpath(blob.name).relative_to(root.resolve()))
    store.with_name(f"{name}.refs").write_text("".join(f"{r.as_posix()}\n" for r in references))
    RepoCache("me/one").remove()
    assert (cached("me/two") / "model.safetensors").read_bytes() == b"weights"
    RepoCache("me/two").remove()
    assert not store.exists()
