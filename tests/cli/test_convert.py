"""The `vit convert` and `vit resize-posemb` commands; their printed output is in screens.txt."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from checkpoints.golden_cases import GOLDEN
from cli.conftest import error_message
from vitcli.checkpoints.read import read_info
from vitcli.cli import progress

TIMM = GOLDEN / "timm_vit_default" / "model.safetensors"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"


def test_json(vit, tiny_checkpoint, tmp_path):
    source = GOLDEN / "hf_dinov2"
    output = json.loads(vit("convert", source, tmp_path / "x.safetensors", "--json").stdout)
    assert output["layout"] == "transformers" and output["format"] == "vit" and output["written"]
    assert output["dropped"] == ["dinov2.embeddings.mask_token"]
    assert output["parameters"] == 54582 - 36
    args = ("--resolution", "32x96", "--dry-run", "--json")
    output = json.loads(vit("resize-posemb", tiny_checkpoint, *args).stdout)
    assert output["from"] == [4, 4] and output["to"] == [2, 6] and output["written"] is False
    assert 0 < output["difference"] < 1


def test_verify_without_timm_fails_early(vit, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if not installed
    result = vit("convert", NPZ, tmp_path / "m", "--verify")
    assert result.exit_code == 1 and not (tmp_path / "m").exists()
    assert result.stderr.splitlines() == [
        f"error: {NPZ}: cannot be verified: timm is not installed",
        "hint: pip install timm, or with pipx: pipx inject vitcli timm",
    ]


def test_tensor_names_in_json_and_scalar_mean(vit, tmp_path):
    args = ["--dry-run", "--json", "--preprocess", "mean=0.25"]
    output = json.loads(vit("convert", NPZ, tmp_path / "x", *args).stdout)
    assert not output["written"] and not (tmp_path / "x").exists()
    rows = {row["name"]: row for row in output["names"]}
    block = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    assert rows["blocks.1.attn.qkv.weight"]["source"] == [
        f"{block}/{part}/kernel" for part in ("query", "key", "value")
    ]
    assert rows["head.bias"] == {
        "name": "head.bias",
        "shape": [10],
        "dtype": "float32",
        "source": ["head/bias"],
        "target": ["head.bias"],
    }
    assert vit("convert", NPZ, tmp_path / "x", *args[2:]).exit_code == 0
    assert read_info(tmp_path / "x")[0].preprocess.mean == (0.25, 0.25, 0.25)


def test_plot_of_resized_position_embeddings(vit, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    args = ("--grid", "6x3", "--plot", "~/posemb.png", "-o", "~/resized")
    assert vit("resize-posemb", tiny_checkpoint, *args).exit_code == 0
    assert (tmp_path / "resized").is_dir()
    assert (tmp_path / "posemb.png").read_bytes().startswith(b"\x89PNG")


def commands(path: Path, out: Path) -> list[tuple[object, ...]]:
    """Both commands, from one file to another."""
    return [("convert", path, out), ("resize-posemb", path, "--grid", 6, "-o", out)]


def test_warns_about_nan_values(vit, tmp_path):
    arrays, positions = dict(np.load(NPZ)), "Transformer/posembed_input/pos_embedding"
    arrays[positions][0, 3, 7] = np.nan
    np.savez(path := tmp_path / "x.npz", **arrays)
    for args in commands(path, tmp_path / "out.npz"):
        result = vit(*args, "--force")
        assert result.exit_code == 0 and (tmp_path / "out.npz").is_file()
        assert f"warning: {path}: {positions} " in result.stderr and "NaN" in result.stderr


@pytest.mark.parametrize("command", ["convert", "resize-posemb"])
def test_long_writing_shows_progress(vit, tmp_path, monkeypatch, command):
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)
    out = tmp_path / "x.safetensors"
    options = [out] if command == "convert" else ["-o", out, "--grid", "9"]
    lines = vit(command, TIMM, *options).stderr.splitlines()
    shown = [line.partition(",")[0] for line in lines if line.startswith("tensors")]
    assert shown == [f"tensors: {i} of 32" for i in range(1, 33)]


def test_existing_output_needs_force(vit, tmp_path):
    out, directory = tmp_path / "out.safetensors", tmp_path / "out"
    for args in commands(TIMM, out):
        out.write_text("mine")
        assert "already exists\nhint: use --force" in error_message(vit(*args))
        assert out.read_text() == "mine"
        assert vit(*args, "--force").exit_code == 0
    directory.mkdir()
    (directory / "mine.txt").write_text("mine")
    _, resize = commands(GOLDEN / "hf_vit", directory)
    assert "already exists" in error_message(vit(*resize)) and len([*directory.iterdir()]) == 1
    assert vit(*resize, "--force").exit_code == 0
    assert (directory / "mine.txt").read_text() == "mine"
    assert read_info(directory)[0].model.grid == (6, 6)
    _, resize = commands(TIMM, tmp_path / "x.npz")
    assert "`vit convert`" in error_message(vit(*resize))


@pytest.mark.parametrize(
    "files", [["metrics.jsonl"], ["split.json", "README.md"], ["split.json", "state"]]
)
def test_force_does_not_replace_weights_of_a_run(vit, tiny_checkpoint, tmp_path, files):
    """The card and figures of the run would then describe other weights."""
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    for name in files:
        (run / name).touch()
    before = (run / "model.safetensors").read_bytes()
    result = vit("convert", tiny_checkpoint, run, "--force", "--dtype", "float16")
    assert result.exit_code == 1 and (run / "model.safetensors").read_bytes() == before
