"""Bad checkpoints and outputs, as `vit convert` and `vit resize-posemb` answer them: an error and a
hint at most, exit code 1, and nothing written."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from conftest import start_vit
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.tensor_file import write
from vitcli.config import ModelConfig

GOLDEN = Path(__file__).parents[1] / "golden"
TIMM = GOLDEN / "timm_vit_default" / "model.safetensors"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"
HF = GOLDEN / "hf_vit"
POSITIONS = "Transformer/posembed_input/pos_embedding"
Vit = Callable[..., Result]


def commands(path: Path, *words: object) -> list[tuple[object, ...]]:
    """Both, from a file to one beside it."""
    suffix = path.suffix if path.suffix == ".npz" else ".safetensors"
    out = path.with_name(f"out{suffix}")
    resize = ("resize-posemb", path, "--grid", 6, "-o", out, *words)
    return [("convert", path, out, *words), resize]


def assert_refused(vit: Vit, directory: Path, *words: object, said: object) -> None:
    before = {path: path.stat().st_size for path in directory.rglob("*")}
    result = vit(*words)
    assert (result.exit_code, result.stdout) == (1, ""), words
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) <= 2
    assert str(said) in result.stderr
    assert "should not have happened" not in result.stderr, result.stderr
    assert {path: path.stat().st_size for path in directory.rglob("*")} == before


def npz(directory: Path, **changed: Any) -> Path:
    arrays = {**np.load(NPZ), **changed}
    np.savez(directory / "x.npz", **{n: a for n, a in arrays.items() if a is not None})
    return directory / "x.npz"


def test_values_that_are_not_numbers_are_warned_of(vit, tmp_path):
    table = np.load(NPZ)[POSITIONS].copy()
    table[0, 3, 7] = np.nan
    path = npz(tmp_path, **{POSITIONS: table})
    for words in commands(path, "--force"):
        result = vit(*words)
        assert result.exit_code == 0 and (tmp_path / "out.npz").is_file()
        assert f"warning: {path}: {POSITIONS} " in result.stderr and "NaN" in result.stderr


def test_an_output_that_exists(vit, tmp_path):
    path = Path(shutil.copy(TIMM, tmp_path / "x.safetensors"))
    (tmp_path / "out.safetensors").write_text("mine")
    for words in commands(path):
        assert_refused(vit, tmp_path, *words, said="already exists\nhint: use --force")
        assert vit(*words, "--force").exit_code == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    words = ("resize-posemb", HF, "--grid", "6", "-o", tmp_path / "out")
    assert_refused(vit, tmp_path, *words, said="already exists")
    assert vit(*words, "--force").exit_code == 0
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert read_info(tmp_path / "out")[0].model.grid == (6, 6)
    resize = ("resize-posemb", TIMM, "--grid", "6", "-o")
    assert_refused(vit, tmp_path, *resize, tmp_path / "x.npz", said="`vit convert`")
    assert_refused(vit, tmp_path, *resize, tmp_path / "a" / "x.safetensors", said="cannot be")


@pytest.mark.parametrize("name", ["out.onnx", "out.pth", "out.gguf", "out.JPG"])
def test_an_output_of_an_unknown_kind(vit, tmp_path, name):
    words = ("convert", TIMM, tmp_path / name)
    result = vit(*words)
    assert (result.exit_code, result.stdout) == (2, "") and name in result.stderr
    assert not [*tmp_path.iterdir()]
    assert vit("convert", TIMM, f"{tmp_path / name}/").exit_code == 0
    assert (tmp_path / name / "model.safetensors").is_file()


@pytest.mark.slow
def test_killed_in_the_middle(vit, tmp_path):
    """kill -9 at twelve moments: the old file or the new one, and at the end nothing beside it."""
    config = ModelConfig(512, 8, 8, 2048, patch_size=(16, 16), num_classes=0)
    source, original = tmp_path / "x.safetensors", tmp_path / "original"
    write(source, {n: np.zeros(s, np.float32) for n, s in config.tensor_shapes().items()}, {})
    os.link(source, original)
    words = ("resize-posemb", source, "--in-place", "-q", "--grid")
    start = time.monotonic()
    process = start_vit(*words, 16)
    _, said = process.communicate()
    assert process.returncode == 0, said
    took, expected = time.monotonic() - start, source.read_bytes()
    for moment in range(12):
        shutil.copy(original, source)
        process = start_vit(*words, 16)
        time.sleep(took * (0.3 + 0.06 * moment))
        process.kill()
        process.communicate()
        assert source.read_bytes() in (original.read_bytes(), expected)
        assert read_info(source)[0].model.grid in ((14, 14), (16, 16))
    assert vit(*words, 8).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"x.safetensors", "original"}
