"""`vit resize-posemb` as it is typed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Vit = Callable[..., Result]


@pytest.fixture
def file(tiny_checkpoint, tmp_path):
    return Path(shutil.copy(tiny_checkpoint / "model.safetensors", tmp_path / "ckpt.safetensors"))


def test_as_typed_it_writes_beside_the_input(vit, file):
    result = vit("resize-posemb", file, "--grid", "24")
    assert result.exit_code == 0, result.output
    new = file.with_name("ckpt-24x24.safetensors")
    assert new.is_file() and str(new) in result.stdout and "4 x 4 (bilinear)" in result.stdout
    assert "accuracy drops until the model is fine-tuned" in result.stderr
    again = vit("resize-posemb", file, "--grid", "24")
    assert again.exit_code == 1 and "already exists\nhint: use --force" in again.stderr
    assert vit("resize-posemb", file, "--grid", "24", "--force", "-q").stderr == ""


def test_json_and_a_dry_run(vit, file):
    result = vit("resize-posemb", file, "--resolution", "32x96", "--dry-run", "--json")
    told = json.loads(result.stdout)
    assert told["from"] == [4, 4] and told["to"] == [2, 6] and told["written"] is False
    assert 0 < told["loss"] < 1
    result = vit("resize-posemb", file, "--resolution", "32x96", "--dry-run")
    assert "would be" in result.stdout and f"{told['loss']:.2%}" in result.stdout
    assert list(file.parent.iterdir()) == [file]


def test_a_image_of_both(vit, file):
    plot = file.with_name("posemb.png")
    assert vit("resize-posemb", file, "--grid", "6x3", "--plot", plot).exit_code == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_same_grid_says_so(vit, file):
    result = vit("resize-posemb", file, "--grid", "4", "--in-place")
    assert "is unchanged: the grid is already 4 x 4" in result.stdout and result.stderr == ""
    result = vit("resize-posemb", file, "--grid", "4")
    assert f"is a copy of {file}: the grid is already 4 x 4" in result.stdout
