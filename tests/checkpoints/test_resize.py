"""Resizing position embeddings on disk: SciPy's values, and nothing else changes."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from scipy.ndimage import zoom

from checkpoints.golden_cases import TIMM_VIT
from vitcli.checkpoints import read, tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.resize import plan_resize, resize_posemb
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import ModelConfig, Preprocess, Size, model_config
from vitcli.errors import CheckpointError, OutputError

SMALL = ModelConfig(16, 1, 2, 24, patch_size=(8, 8), image_size=(32, 32), num_classes=3)


def random_tensors(config: ModelConfig, dtype: object = np.float32) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {n: draw.normal(size=s).astype(dtype) for n, s in config.tensor_shapes().items()}


def write_checkpoint(path: Path, config: ModelConfig = SMALL, dtype: object = np.float32) -> Path:
    info = CheckpointInfo(config, Preprocess(size=config.image_size), provenance={"seed": 1})
    tensor_file.write(path, random_tensors(config, dtype), {**info.to_metadata(), "note": "kept"})
    return path


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    header = tensor_file.read_header(path)
    return {name: header.tensors[name].read() for name in header.tensors}


def changed_tensors(source: Path, file: Path) -> list[str]:
    """Return the names of changed tensors; assert that none was added, removed or reordered."""
    before, after = read_tensors(source), read_tensors(file)
    assert list(before) == list(after)
    return [name for name in before if before[name].tobytes() != after[name].tobytes()]


def scipy_resize(table: np.ndarray, prefix: int, grid: Size) -> np.ndarray:
    """Resize as the authors do: `scipy.ndimage.zoom(order=1)` on each channel of the grid."""
    tokens = table.reshape(-1, table.shape[-1]).astype(np.float64)
    side = round((len(tokens) - prefix) ** 0.5)
    zoomed = zoom(
        tokens[prefix:].reshape(side, side, -1), (grid[0] / side, grid[1] / side, 1), order=1
    )
    whole = np.concatenate([tokens[:prefix], zoomed.reshape(-1, tokens.shape[1])])
    return whole.reshape(*table.shape[:-2], *whole.shape)


def resize(spec: Path, **options: object) -> Path:
    job = plan_resize(spec, **options)
    resize_posemb(job)
    return job.file


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("grid", [(6, 6), (3, 9), (1, 2)])
def test_default_matches_scipy_zoom(tmp_path: Path, dtype: type, grid: Size) -> None:
    source = write_checkpoint(tmp_path / "a.safetensors", dtype=dtype)
    file = resize(source, grid=grid)
    assert file == tmp_path / f"a-{grid[0]}x{grid[1]}.safetensors"
    before, found = read_tensors(source)["pos_embed"], read_tensors(file)["pos_embed"]
    assert found.dtype == dtype and (found[0, 0] == before[0, 0]).all()
    tolerance = 1e-6 if dtype is np.float32 else 2e-2
    expected = scipy_resize(before, 1, grid).astype(dtype).astype(float)
    np.testing.assert_allclose(found.astype(float), expected, rtol=0, atol=tolerance)


def test_other_tensors_and_metadata_are_unchanged(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a.safetensors")
    file = resize(source, grid=(10, 20), method="bicubic-hf")
    assert changed_tensors(source, file) == ["pos_embed"]
    header = tensor_file.read_header(file)
    assert header.metadata["note"] == "kept" and header.metadata["format"] == "pt"
    info, _ = read.read_info(file)
    assert info.model == SMALL.with_image_size((80, 160)) and info.preprocess.size == (80, 160)
    assert info.provenance == {
        "seed": 1,
        "posemb_resize": {"method": "bicubic-hf", "from": [4, 4], "to": [10, 20]},
    }


def test_directory_is_copied_with_updated_config(tmp_path: Path) -> None:
    folder = shutil.copytree(TIMM_VIT, tmp_path / "model")
    (folder / "README.md").write_text("# A card\n")
    (folder / "link").symlink_to(__file__)
    file = resize(folder, grid=(3, 5))
    assert file == tmp_path / "model-3x5" / "model.safetensors"
    assert not (file.parent / "link").exists()
    card = (file.parent / "README.md").read_text()
    assert card.endswith("# A card\n") and "images of 48 x 80 pixels" in card
    old = json.loads((folder / "config.json").read_text())
    new = json.loads((file.parent / "config.json").read_text())
    assert new["pretrained_cfg"].pop("input_size") == [3, 48, 80]
    assert new["model_args"].pop("img_size") == [48, 80]
    del old["pretrained_cfg"]["input_size"], old["model_args"]["img_size"]
    assert new == old
    by_config = shutil.copytree(file.parent, tmp_path / "bare")
    bare = {n: np.array(t) for n, t in read_tensors(file).items()}
    tensor_file.write(by_config / "model.safetensors", bare, {})  # nothing but timm's config.json
    assert read.read_info(by_config)[0].model == read.read_info(file)[0].model


@pytest.mark.parametrize(
    "fields",
    [
        {"posemb": "learn2d", "posemb_tokens": "patches"},
        {"posemb": "sincos2d", "posemb_tokens": "patches"},
        {"num_registers": 4, "posemb_tokens": "class"},
        {"num_registers": 2},
        {"class_token": False, "pool": "gap"},
    ],
    ids=str,
)
def test_every_kind_of_prefix_and_posemb(tmp_path: Path, fields: dict[str, object]) -> None:
    config = dataclasses.replace(SMALL, **fields)
    file = resize(write_checkpoint(tmp_path / "a.safetensors", config), grid=(2, 6))
    info = read.read_info(file)[0]
    assert info.model.grid == (2, 6)
    tables = {n: t for n, t in read_tensors(file).items() if n.startswith("pos_embed")}
    assert {len(table[0]) for table in tables.values()} <= {2, 6, 12 + info.model.posemb_prefix}


def test_non_square_grid_requires_old_grid(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensor_file.write(path, random_tensors(SMALL.with_image_size((16, 56))), {})
    with pytest.raises(CheckpointError, match="embeddings do not form a square grid") as e:
        plan_resize(path, grid=(4, 4))
    assert e.value.hint is not None and "--old-grid" in e.value.hint
    with pytest.raises(CheckpointError, match="embeddings do not form a grid of 3 x 6"):
        plan_resize(path, grid=(4, 4), old_grid=(3, 6))
    assert read.read_info(resize(path, grid=(4, 4), old_grid=(2, 7)))[0].model.grid == (4, 4)
    stated = write_checkpoint(tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="4 x 4, not 1 x 16"):
        plan_resize(stated, grid=(4, 4), old_grid=(1, 16))


def test_source_is_not_overwritten(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a.safetensors")
    before = source.read_bytes()
    with pytest.raises(OutputError, match="the same file"):
        resize(source, grid=(2, 2), output=source)
    assert source.read_bytes() == before


def test_difference_is_the_round_trip_error(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a.safetensors")
    assert plan_resize(source, grid=(4, 4)).difference() == 0
    # 7 = 2 * 3 + 1
    assert plan_resize(source, grid=(7, 7)).difference() == pytest.approx(0, abs=1e-6)
    assert plan_resize(source, grid=(2, 2)).difference() > 0.3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory(tmp_path: Path) -> None:
    """Resizing a 346 MB B/16 takes less than 120 MB and does not import torch. Not measured by
    `ru_maxrss`, which starts at the parent process's peak."""
    config = model_config("B/16", num_classes=1000)
    source = tmp_path / "b16.safetensors"
    zeros = {
        name: LazyTensor("float32", shape, functools.partial(np.zeros, shape, np.float32))
        for name, shape in config.tensor_shapes().items()
    }
    tensor_file.write(source, zeros, {})
    assert source.stat().st_size > 346e6
    program = (
        "import re, sys; from vitcli.cli.main import app; "
        "app(['resize-posemb', *sys.argv[1:]], standalone_mode=False); "
        "assert not {'torch', 'matplotlib', 'PIL'} & set(sys.modules); "
        "print(re.search(r'VmHWM:\\s*(\\d+) kB', open('/proc/self/status').read())[1])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(source), "--grid", "24"],
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(result.stdout.split()[-1]) * 1024
    assert peak < 120e6
    grown = 4 * 768 * (24 * 24 - 14 * 14)
    resized = tmp_path / "b16-24x24.safetensors"
    assert 0 < resized.stat().st_size - source.stat().st_size - grown < 4096
