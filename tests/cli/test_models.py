"""`vit models` and `vit pull`: output, removal and errors."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from hub.test_cache import add_to_cache
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.hub import registry

REPO = "timm/vit_base_patch16_224.augreg_in21k"
FILES = {"model.safetensors": b"x" * 2_000_000, "config.json": b"{}"}
FIELDS = {
    *("name", "repo", "revision", "parameters", "classes", "class_list", "bytes", "resolution"),
    *("gmacs", "top1", "license", "status", "path"),
}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub"


def test_lists_all_models(vit, root):
    add_to_cache(root, REPO, FILES)
    result = vit("models")
    assert result.exit_code == 0
    header, *lines = result.stdout.splitlines()
    assert " ".join(header.split()) == "model params classes size px license status"
    assert len(lines) == len(registry.entries()) + len(registry.shipped())
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["vit-b16-i21k"] == ["102.6M", "21,843", "410", "MB", "224", "apache-2.0", "cached"]
    assert rows["vit-ti16-tin-c10"][-3:] == ["included", "as", "default"]
    assert rows["vit-h14-i21k-orig"][1] == "-"
    assert f"{len(lines)} models, 3 available offline" in result.stderr
    assert vit("models", "-q").stderr == ""


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["B16", "384", "orig"], ["r50-vit-b16-i21k-i1k-orig-384", "vit-b16-i21k-i1k-orig-384"]),
        ([REPO], ["vit-b16-i21k", "vit-b16-i21k-i1k"]),
        (["cached"], ["vit-b16-i21k"]),
        (["list", "cached"], ["vit-b16-i21k"]),
        (["included"], ["vit-ti16-tin", "vit-ti16-tin-c10"]),
    ],
)
def test_filter_by_words(vit, root, args, expected):
    add_to_cache(root, REPO, FILES)
    lines = vit("models", *args, "--json").stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(set(row) == FIELDS for row in rows)
    assert sorted(row["name"] for row in rows) == expected


def test_show_released_and_included_model(vit, root):
    snapshot = add_to_cache(root, REPO, FILES)
    text = vit("models", "show", REPO).stdout
    assert f"cached: {snapshot}\n" in text and vit("models", "show", "vit-b16-i21k").stdout == text
    output = json.loads(vit("models", "show", "vit-b16-i21k", "--json").stdout)
    assert set(output) == FIELDS | {
        *("architecture", "config", "flops", "grid", "tokens"),
        *("preprocess", "score", "transformers", "source", "note"),
    }
    assert output["preprocess"]["crop_pct"] == 0.9 and output["score"] == "sigmoid"
    output = json.loads(vit("models", "show", "default", "--json").stdout)
    assert output["name"] == registry.aliases()["default"] and output["status"] == "included"
    assert output["license"] == "apache-2.0" and Path(output["path"]).is_dir()


def test_rm_asks_for_confirmation(vit, root):
    snapshot = add_to_cache(root, REPO, FILES)
    other = add_to_cache(root, "me/other", FILES)
    for answer, message in (("n\n", "nothing was removed"), ("", "cannot ask for confirmation")):
        result = vit("models", "rm", "vit-b16-i21k", input=answer)
        assert result.exit_code == 1 and snapshot.exists() and "removed" not in result.stdout
        assert f"vit-b16-i21k: 2.0 MB in {root}" in result.stderr and message in result.stderr
    result = vit("models", "rm", "vit-b16-i21k", input="y\n")
    assert result.exit_code == 0 and "removed vit-b16-i21k: 2.0 MB freed\n" in result.stdout
    assert not snapshot.exists() and (other / "model.safetensors").exists()


def test_rm_any_repo_with_json(vit, root, tmp_path, monkeypatch):
    """A local directory of the same name is left alone."""
    add_to_cache(root, "me/other", FILES)
    add_to_cache(root, REPO, FILES)
    (tmp_path / "me" / "other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert vit("models", "rm", "me/other", "--json").exit_code == 2  # cannot ask for confirmation
    result = vit("models", "rm", "me/other", "me/other", "vit-b16-i21k", "--yes", "--json")
    assert [json.loads(line) for line in result.stdout.splitlines()] == [
        {"repo": "me/other", "freed": 2_000_002},
        {"repo": REPO, "freed": 2_000_002},
    ]
    assert (tmp_path / "me" / "other").is_dir()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("default", "included with vit"),
        ("me/other@main", "leave out the revision"),
        ("me/nothing", "me/nothing: not downloaded"),
    ],
)
def test_rm_errors(vit, root, name, message):
    snapshot = add_to_cache(root, REPO, FILES)
    result = vit("models", "rm", REPO, name, "--yes")
    assert result.exit_code == 1 and message in result.stderr
    assert snapshot.exists(), "one of them cannot be removed: none is"


def test_pull_continues_after_failure(vit):
    result = vit("pull", "vit-b16-i22k", "default", "--offline", "--json")
    assert result.exit_code == 1
    failure, success = map(json.loads, result.stdout.splitlines())
    assert failure["name"] == "vit-b16-i22k" and failure["error"].startswith("no such file")
    assert "hint: did you mean" in result.stderr
    assert set(success) == {"name", "repo", "path", "bytes"} and success["repo"] is None
    result = vit("pull", "vit-b16-i22k", "default", "--offline")
    assert result.exit_code == 1 and "error: vit-b16-i22k" in result.stderr
    weights = registry.shipped()[registry.aliases()["default"]] / "model.safetensors"
    assert result.stdout == f"{weights}\n" and "default is already on" in result.stderr


def test_pull_show_and_rm_released_model(vit, hub, tmp_path):
    """The smallest in the registry, with a config.json that differs from its registry entry."""
    entry = registry.entries()["test-vit"]
    info = CheckpointInfo(entry.model, dataclasses.replace(entry.preprocess, crop_pct=0.5))
    tensors = {name: np.zeros(s, np.float32) for name, s in info.model.tensor_shapes().items()}
    folder = save_checkpoint(tmp_path / "model", tensors, info)
    hub.add(entry.repo, {file.name: file for file in folder.iterdir()})

    result = vit("pull", entry.name, "-q")
    assert result.exit_code == 0, result.stderr
    output = json.loads(vit("models", "show", entry.name, "--json").stdout)
    assert output["status"] == "cached"
    assert output["path"] == str(Path(result.stdout.strip()).parent)
    output = json.loads(vit("info", entry.name, "--json", "--offline").stdout)
    assert output["preprocess"]["crop_pct"] == 0.5
    assert vit("models", "rm", entry.name, "--yes").exit_code == 0
    assert vit("info", entry.name, "--offline").exit_code == 1


def test_list_and_rm_any_fetched_repo(vit, hub, root, tiny_checkpoint):
    add_to_cache(root, "other/bert", FILES)  # from another tool: maybe not a model that vit reads
    commit = hub.add("me/model", {file.name: file for file in tiny_checkpoint.iterdir()})
    assert vit("pull", "https://huggingface.co/me/model").exit_code == 0  # a pasted URL
    (row,) = (json.loads(line) for line in vit("models", "cached", "--json").stdout.splitlines())
    assert set(row) == FIELDS and row["name"] == "me/model" and row["classes"] == 10
    assert "me/model" in vit("models", "show", "me/model").stdout
    assert "me/none: not downloaded" in vit("models", "show", "me/none").stderr
    output = json.loads(vit("models", "show", f"me/model@{commit}", "--json").stdout)
    assert (output["repo"], output["revision"], output["status"]) == ("me/model", commit, "cached")
    assert "already in the cache" in vit("pull", "me/model").stderr
    assert vit("models", "rm", "me/model", "--yes").exit_code == 0
    assert vit("pull", f"me/model@{commit}").exit_code == 0
    assert f"me/model@{commit} " in vit("models", "cached").stdout
    hub.add("me/words", {"model.safetensors": save({"embeddings": np.zeros((2, 2))})})
    assert vit("pull", "me/words").exit_code == 1  # downloaded, but not a model that vit reads
    assert vit("models", "me/words").stdout.splitlines()[1].split()[:3] == ["me/words", "-", "-"]
    assert vit("models", "show", "me/words").exit_code == 1
