"""Saved checkpoints, as the safetensors library reads them, with a config.json for timm."""

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import rewrite_info, save_checkpoint
from vitcli.checkpoints.tensor_file import read_header
from vitcli.config import ClassLabel, ModelConfig, Preprocess, SaveDtype
from vitcli.errors import CheckpointError, ConfigError, OutputError
from vitcli.models.vit import ViT

MODEL = ModelConfig(16, 1, 2, 24, (8, 8), (16, 16), num_classes=2)
INFO = CheckpointInfo(
    MODEL, Preprocess(size=(16, 16)), (ClassLabel("n1", "a"), ClassLabel("n2", "ö"))
)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    model = ViT(MODEL)
    model.init_weights(seed=0)
    return model.state_dict()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_rounded_as_by_torch(
    tmp_path: Path, state: dict[str, torch.Tensor], dtype: SaveDtype
) -> None:
    save_checkpoint(tmp_path / "new" / "folder", state, INFO, dtype)
    stored = load_file(tmp_path / "new" / "folder" / "model.safetensors")
    assert set(stored) == set(state)
    for name, tensor in state.items():
        assert torch.equal(stored[name], tensor.to(getattr(torch, dtype))), name


def test_other_tensors_are_refused(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(OutputError, match="cannot store mask_token"):
        save_checkpoint(tmp_path, {**state, "mask_token": torch.zeros(1, 1, 8)}, INFO)
    with pytest.raises(CheckpointError, match=r"missing: .*head.bias \(2\)"):
        save_checkpoint(tmp_path, {}, INFO)
    with pytest.raises(CheckpointError, match=r"head.bias \(9\) instead of"):
        save_checkpoint(tmp_path, {**state, "head.bias": torch.zeros(9)}, INFO)
    ensemble = {f"module.{i}.{name}": state[name] for i in range(2) for name in state}
    with pytest.raises(OutputError, match=r"cannot store module.0.blocks.* and \d+ more$"):
        save_checkpoint(tmp_path, ensemble, INFO)
    with pytest.raises(ConfigError, match="dtype: 'fp16' is not one of float32, float16"):
        save_checkpoint(tmp_path, state, INFO, cast(SaveDtype, "fp16"))
    assert not any(tmp_path.iterdir())


def test_config_json_contents(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    save_checkpoint(tmp_path, state, INFO, train={"steps": 7})
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config["architecture"].startswith("vit_") and config["label_names"] == ["a", "ö"]
    assert CheckpointInfo.from_dict(config["vit"]) == INFO
    assert config["vit"]["train"] == {"steps": 7}
    assert config["dtype"] == "float32"  # for computing in transformers, whatever is stored
    assert "train" not in json.loads(read_header(tmp_path / "model.safetensors").metadata["vit"])
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert file.metadata()["format"] == "pt"  # required by transformers


def test_rewrite_info_keeps_tensors(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    save_checkpoint(tmp_path, state, INFO, "bfloat16")
    before = load_file(tmp_path / "model.safetensors")
    info = CheckpointInfo(
        MODEL, Preprocess(size=(16, 16)), INFO.classes, provenance={"metrics": {"val_top1": 0.9}}
    )
    rewrite_info(tmp_path, info, train={"steps": 8})
    assert read_info(tmp_path)[0] == info
    after = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert json.loads((tmp_path / "config.json").read_text())["vit"]["train"] == {"steps": 8}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError):
        rewrite_info(tmp_path / "missing", info)
