"""`vit convert` and `vit resize-posemb` as they are typed; what they print is in screens.txt."""

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
    assert vit("convert", NPZ, tmp_path / "m").exit_code == 0
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert np.array_equal(found["head.weight"], np.load(NPZ)["head/kernel"].T)


def test_json(vit, tiny_checkpoint, tmp_path):
    source = GOLDEN / "hf_dinov2"
    told = json.loads(vit("convert", source, tmp_path / "x.safetensors", "--json").stdout)
    assert told["layout"] == "transformers" and told["format"] == "vit" and told["written"]
    assert told["dropped"] == ["dinov2.embeddings.mask_token"]
    assert told["parameters"] == 54582 - 36
    words = ("--resolution", "32x96", "--dry-run", "--json")
    told = json.loads(vit("resize-posemb", tiny_checkpoint, *words).stdout)
    assert told["from"] == [4, 4] and told["to"] == [2, 6] and told["written"] is False
    assert 0 < told["loss"] < 1


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


def test_a_plot_of_resized_position_embeddings(vit, tiny_checkpoint, tmp_path):
    words = ("--grid", "6x3", "--plot", tmp_path / "posemb.png", "-o", tmp_path / "resized")
    assert vit("resize-posemb", tiny_checkpoint, *words).exit_code == 0
    assert (tmp_path / "posemb.png").read_bytes().startswith(b"\x89PNG")
