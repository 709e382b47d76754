"""`vit convert` as it is typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from typer.testing import Result

from vitcli.checkpoints.read import read_info

Vit = Callable[..., Result]
GOLDEN = Path(__file__).parents[1] / "golden"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"


def test_an_npz_becomes_a_folder(vit, tmp_path):
    result = vit("convert", NPZ, tmp_path / "m")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        f"{tmp_path / 'm'} is {NPZ} (vit-npz) as vit: 32 tensors, 76,282"
    )
    assert "a grid of 4 x 4 patches, preprocessing (bilinear" in result.stderr
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert np.array_equal(found["head.weight"], np.load(NPZ)["head/kernel"].T)
    again = vit("convert", NPZ, tmp_path / "m")
    assert again.exit_code == 1 and "already exists" in again.stderr


def test_a_dry_run_prints_the_names_and_writes_nothing(vit, tmp_path):
    out = tmp_path / "m"
    result = vit("convert", GOLDEN / "hf_vit", out, "--to", "transformers", "--dry-run", "-q")
    assert result.exit_code == 0 and result.stderr == ""
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tensor shape type in the source in the target"
    assert lines[-2] == "head.bias 7 float32 classifier.bias classifier.bias"
    block = "vit.encoder.layer.0.attention.attention.{query,key,value}.bias"
    assert f"blocks.0.attn.qkv.bias 144 float32 {block} {block}" in lines
    assert "would be" in result.stdout and not out.exists()


def test_a_dry_run_shows_what_is_changed(vit, tmp_path):
    words = ["--num-classes", 3, "--patch-size", 32, "--dtype", "bfloat16", "--dry-run", "-q"]
    result = vit("convert", GOLDEN / "timm_vit_default", tmp_path / "m", *words)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tensor shape type was in the source"  # the target's names are ours
    assert "head.weight 3 x 48 bfloat16 (zeros)" in lines
    patch = "patch_embed.proj.weight"
    assert f"{patch} 48 x 3 x 32 x 32 bfloat16 48 x 3 x 16 x 16 float32 {patch}" in lines


def test_json(vit, tmp_path):
    source = GOLDEN / "hf_dinov2"
    told = json.loads(vit("convert", source, tmp_path / "x.safetensors", "--json").stdout)
    assert told["layout"] == "transformers" and told["format"] == "vit" and told["written"]
    assert told["dropped"] == ["dinov2.embeddings.mask_token"]
    assert told["parameters"] == 54582 - 36


def test_verification_that_cannot_be_had_is_told_before_the_work(vit, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    result = vit("convert", NPZ, tmp_path / "m", "--verify")
    assert result.exit_code == 1 and not (tmp_path / "m").exists()
    assert result.stderr.splitlines() == [
        f"error: {NPZ}: cannot be verified: timm is not installed",
        "hint: pip install timm, or with pipx: pipx inject vitcli timm",
    ]


def test_names_in_json_and_one_number_for_three(vit, tmp_path):
    words = ["--dry-run", "--json", "--preprocess", "mean=0.25"]
    told = json.loads(vit("convert", NPZ, tmp_path / "x", *words).stdout)
    assert not told["written"] and not (tmp_path / "x").exists()
    names = {row["ours"]: row for row in told["names"]}
    block = "Transformer/encoderblock_1/MultiHeadDotProductAttention_1"
    assert names["blocks.1.attn.qkv.weight"]["source"] == [
        f"{block}/{part}/kernel" for part in ("query", "key", "value")
    ]
    assert names["head.bias"] == {
        "ours": "head.bias",
        "shape": [10],
        "dtype": "float32",
        "source": ["head/bias"],
        "target": ["head.bias"],
    }
    assert vit("convert", NPZ, tmp_path / "x", *words[2:]).exit_code == 0
    assert read_info(tmp_path / "x")[0].preprocess.mean == (0.25, 0.25, 0.25)
