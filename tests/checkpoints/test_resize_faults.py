"""Bad input of `vit resize-posemb`: a line that says what is wrong, and nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from checkpoints.golden_cases import GOLDEN
from vitcli import atomic
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.resize import plan_resize, resize_posemb
from vitcli.cli.main import app
from vitcli.config import ModelConfig

TIMM = GOLDEN / "timm_vit_default" / "model.safetensors"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"
HF = GOLDEN / "hf_vit"


def vit(*words: object) -> Result:
    return CliRunner().invoke(app, ["resize-posemb", *map(str, words)], prog_name="vit")


def assert_refused(folder: Path, *words: object, said: str) -> None:
    """A clear line, exit 1, and the folder as it was."""
    before = sorted(path.name for path in folder.rglob("*"))
    result = vit(*words)
    assert result.exit_code == 1, result.output
    assert said in result.stderr and "unexpected " not in result.stderr
    assert 1 <= len(result.stderr.splitlines()) <= 2
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize("source", [TIMM, NPZ], ids=["safetensors", "npz"])
def test_cut_at_every_tenth(tmp_path: Path, source: Path) -> None:
    data = source.read_bytes()
    path = tmp_path / f"x{source.suffix}"
    for tenth in range(10):
        path.write_bytes(data[: len(data) * tenth // 10])
        assert_refused(tmp_path, path, "--grid", "6", said=str(path))


def test_headers_that_lie(tmp_path: Path) -> None:
    data = TIMM.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    path = tmp_path / "x.safetensors"

    def written(name: str, key: str, value: object) -> None:
        text = json.dumps({**header, name: {**header[name], key: value}}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)

    start, end = header["pos_embed"]["data_offsets"]
    size = end - start
    for offsets, said in [
        ([start - 4, end - 4], "overlaps"),
        ([start + len(body), end + len(body)], "leaves a gap"),
        ([-size, 0], "bad offsets"),
        ([2**63, 2**63 + size], "bad offsets"),
    ]:
        written("pos_embed", "data_offsets", offsets)
        assert_refused(tmp_path, path, "--grid", "6", said=said)
    written("pos_embed", "shape", [1, 17, 49])
    assert_refused(tmp_path, path, "--grid", "6", said="does not take the")
    text = json.dumps(header)[:-1] + ', "pos_embed": ' + json.dumps(header["pos_embed"]) + "}"
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + body)
    assert_refused(tmp_path, path, "--grid", "6", said="'pos_embed' stands twice")


def test_tables_that_are_no_grid(tmp_path: Path) -> None:
    config = ModelConfig(16, 1, 2, 24, patch_size=(8, 8), image_size=(160, 80), num_classes=3)
    draw = np.random.default_rng(0)
    tensors = {n: draw.normal(size=s) for n, s in config.tensor_shapes().items()}
    tensor_file.write(tmp_path / "x.safetensors", tensors, {})
    words = (tmp_path / "x.safetensors", "--grid", "14")
    assert_refused(tmp_path, *words, said="--old-grid ROWSxCOLUMNS")
    assert_refused(tmp_path, *words, "--old-grid", "19x10", said="not a grid of 19 x 10")
    assert vit(*words, "--old-grid", "20x10").exit_code == 0
    none = {name: tensor for name, tensor in tensors.items() if name != "pos_embed"}
    tensor_file.write(tmp_path / "none.safetensors", none, {})
    words = (tmp_path / "none.safetensors", "--grid", "14")
    assert_refused(tmp_path, *words, said="rotary position embeddings")


def test_a_target_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    words = (HF, "--grid", "6", "-o", tmp_path / "out")
    assert_refused(tmp_path, *words, said="exists already\nhint: --force replaces it")
    assert vit(*words, "--force").exit_code == 0
    assert (tmp_path / "out" / "mine.txt").read_text() == "mine"
    assert read_info(tmp_path / "out")[0].model.grid == (6, 6)
    assert_refused(tmp_path, TIMM, "--grid", "6", "-o", tmp_path / "x.npz", said="`vit convert`")
    assert_refused(tmp_path, TIMM, "--grid", "6", "-o", tmp_path / "a" / "x.safetensors", said="No")


@pytest.mark.parametrize("source", [TIMM, NPZ, HF], ids=["safetensors", "npz", "folder"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "fsync", full)
    out = tmp_path / f"out{source.suffix}"
    assert_refused(tmp_path, source, "--grid", "6", "-o", out, said="No space left on device")
    with pytest.raises(SystemExit, match="1"):
        app(["resize-posemb", str(source), "--grid", "6", "-o", str(out)])
    assert list(tmp_path.iterdir()) == []


def test_a_limit_in_the_middle_of_the_copy(tmp_path: Path) -> None:
    """The kernel refuses to write on: a real error, from the copy itself."""
    source = Path(shutil.copy(TIMM, tmp_path / "x.safetensors"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (source.stat().st_size // 2, old[1]))
    try:
        assert_refused(tmp_path, source, "--grid", "6", said="cannot be written: File too large")
        assert_refused(tmp_path, source, "--grid", "6", "--in-place", said="File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, previous)
    assert source.read_bytes() == TIMM.read_bytes()


def test_in_place_where_nothing_may_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(HF, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(name: str) -> Callable[..., None]:
        def stand_in(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", name)

        return stand_in

    monkeypatch.setattr(Path, "mkdir", refuse("a folder"))  # root may write anywhere
    said = f"{folder}: cannot be written: Permission denied"
    assert_refused(tmp_path, folder, "--grid", "6", "--in-place", said=said)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_killed_in_the_middle(tmp_path: Path) -> None:
    """kill -9 at twelve moments: the old file or the new one, at its place."""
    config = ModelConfig(512, 8, 8, 2048, patch_size=(16, 16), num_classes=0)
    shapes = config.tensor_shapes()
    source = tmp_path / "x.safetensors"
    tensor_file.write(source, {n: np.zeros(s, np.float32) for n, s in shapes.items()}, {})
    original = tmp_path / "original"
    os.link(source, original)
    expected = tmp_path / "expected.safetensors"
    resize_posemb(plan_resize(source, grid=(16, 16), output=expected))
    command = [sys.executable, "-m", "vitcli", "resize-posemb", str(source), "--in-place"]
    start = time.monotonic()
    done = subprocess.run([*command, "--grid", "16", "-q"], check=True)
    took = time.monotonic() - start
    assert done.returncode == 0 and source.read_bytes() == expected.read_bytes()
    for moment in range(12):
        shutil.copy(original, source)
        process = subprocess.Popen([*command, "--grid", "16", "-q"], stdout=subprocess.DEVNULL)
        time.sleep(took * (0.3 + 0.06 * moment))
        process.kill()
        process.wait()
        found = source.read_bytes()
        assert found in (original.read_bytes(), expected.read_bytes())
        assert read_info(source)[0].model.grid in ((14, 14), (16, 16))
