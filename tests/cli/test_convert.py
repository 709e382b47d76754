"""`vit convert` as it is typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import Result

from vitcli.checkpoints.read import read_info

Vit = Callable[..., Result]
GOLDEN = Path(__file__).parents[1] / "golden"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"


def test_an_npz_becomes_a_folder(vit: Vit, tmp_path: Path) -> None:
    result = vit("convert", NPZ, tmp_path / "m")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(
        f"{tmp_path / 'm'} is {NPZ} (vit-npz) as vit: 32 tensors, 76,282"
    )
    assert "assumed: pictures prepared as usual for vit-npz" in result.stderr
    found = load_file(tmp_path / "m" / "model.safetensors")
    assert np.array_equal(found["head.weight"], np.load(NPZ)["head/kernel"].T)
    again = vit("convert", NPZ, tmp_path / "m")
    assert again.exit_code == 1 and "exists already\n--force replaces it" in again.stderr


def test_a_dry_run_prints_the_names_and_writes_nothing(vit: Vit, tmp_path: Path) -> None:
    out = tmp_path / "m"
    result = vit("convert", GOLDEN / "hf_vit", out, "--to", "transformers", "--dry-run", "-q")
    assert result.exit_code == 0 and result.stderr == ""
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][0] == "ours"
    assert ["head.weight", "classifier.weight", "classifier.weight"] in lines
    assert "would be" in result.stdout and not out.exists()


def test_json(vit: Vit, tmp_path: Path) -> None:
    source = GOLDEN / "hf_dinov2"
    told = json.loads(vit("convert", source, tmp_path / "x.safetensors", "--json").stdout)
    assert told["layout"] == "transformers" and told["format"] == "vit" and told["written"]
    assert told["dropped"] == ["dinov2.embeddings.mask_token"]
    assert told["parameters"] == 54582 - 36


def test_options_reach_the_file(vit: Vit, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("n1\tcrane\nn2\tcrane\n")
    out = tmp_path / "m"
    words = ["--num-classes", 2, "--labels", tmp_path / "names.txt", "--dtype", "float16"]
    words += ["--preprocess", "size=64", "--preprocess", "std=0.2,0.3,0.4"]
    result = vit("convert", NPZ, out, *words)
    assert result.exit_code == 0, result.output
    info, file = read_info(out)
    assert [label.id for label in info.classes] == ["n1", "n2"]
    assert info.preprocess.std == (0.2, 0.3, 0.4) and info.preprocess.size == (64, 64)
    assert {a.dtype.name for a in load_file(file).values()} == {"float16"}


def test_what_is_refused(vit: Vit, tmp_path: Path) -> None:
    result = vit("convert", GOLDEN / "timm_vit_reg4_dinov2", tmp_path / "x.npz")
    assert result.exit_code == 1 and "4 register tokens" in result.stderr
    assert vit("convert", NPZ, tmp_path / "x", "--preprocess", "mean").exit_code == 2
    both = ["--drop-head", "--num-classes", 3]
    assert vit("convert", NPZ, tmp_path / "x", *both).exit_code == 2


def test_verification_that_cannot_be_had_is_told_before_the_work(
    vit: Vit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    result = vit("convert", NPZ, tmp_path / "m", "--verify")
    assert result.exit_code == 1 and not (tmp_path / "m").exists()
    assert result.stderr.splitlines() == [
        f"error: {NPZ}: cannot be verified: timm is not installed",
        "pip install timm, or with pipx: pipx inject vitcli timm",
    ]
