"""Checkpoint metadata, read from headers alone."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from checkpoints.golden_cases import TIMM_VIT
from vitcli.checkpoints.read import open_file, read_info
from vitcli.checkpoints.tensor_file import read_header, write
from vitcli.config import ModelConfig
from vitcli.errors import CheckpointError, VitError
from vitcli.hub import registry


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of a checkpoint directory, for tests to modify."""
    return shutil.copytree(TIMM_VIT, tmp_path / "model")


def test_header_takes_precedence_over_config(model: Path) -> None:
    file = model / "model.safetensors"
    info = dataclasses.replace(read_info(model)[0], provenance={"seed": 1})
    write(file, read_header(file).tensors, info.to_metadata())
    (model / "config.json").write_text("nonsense")
    assert read_info(model)[0] == info


def test_reads_vit_block_in_config_json(model: Path) -> None:
    info = dataclasses.replace(read_info(model)[0], score="sigmoid", provenance={"seed": 1})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vit": info.to_dict()}))
    assert read_info(model)[0] == info


def test_single_safetensors_file_may_have_any_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "weights.safetensors")
    assert read_info(model)[1] == model / "weights.safetensors"
    shutil.copy(model / "weights.safetensors", model / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors, weights\.safetensors"):
        read_info(model)


def write_timm_checkpoint(config: ModelConfig, folder: Path, tag: str, **more: Any) -> Path:
    """Write zeros as a checkpoint in timm's release format, where only the tag implies classes."""
    folder.mkdir()
    tensors = {name: np.zeros(shape, "f2") for name, shape in config.tensor_shapes().items()}
    write(folder / "model.safetensors", tensors, {"format": "pt"})
    description = {
        "architecture": "test_vit",
        "num_classes": config.num_classes,
        "model_args": {"depth": 1, "embed_dim": 8, "img_size": 32},
        "pretrained_cfg": {"tag": tag, "input_size": [3, 32, 32]},
        **more,
    }
    (folder / "config.json").write_text(json.dumps(description))
    return folder


def tiny_config(num_classes: int) -> ModelConfig:
    return ModelConfig(8, 1, 2, 24, (16, 16), (32, 32), num_classes=num_classes)


def test_timm_releases_get_class_names(tmp_path: Path) -> None:
    info, _ = read_info(
        write_timm_checkpoint(tiny_config(1000), tmp_path / "1k", "augreg_in21k_ft_in1k")
    )
    assert info.classes == registry.labels("imagenet-1k") and info.score == "softmax"
    info, _ = read_info(write_timm_checkpoint(tiny_config(21843), tmp_path / "21k", "augreg_in21k"))
    assert info.classes == registry.labels("imagenet-21k") and info.score == "sigmoid"
    info, _ = read_info(write_timm_checkpoint(tiny_config(1000), tmp_path / "other", "my_birds"))
    assert info.classes == ()
    info, _ = read_info(write_timm_checkpoint(tiny_config(7), tmp_path / "few", "augreg_in1k"))
    assert info.classes == ()


def test_synsets_get_readable_names(tmp_path: Path) -> None:
    names = {"label_names": ["n01440764", "n02012849"]}
    info, _ = read_info(write_timm_checkpoint(tiny_config(2), tmp_path / "x", "mine", **names))
    assert info.classes == (("n01440764", "tench, Tinca tinca"), ("n02012849", "crane"))


def test_registry_fills_in_missing_metadata(tmp_path: Path) -> None:
    folder = write_timm_checkpoint(tiny_config(21843), tmp_path / "x", "unknown tag")
    entry = registry.entries()["vit-b16-i21k"]
    info = open_file(folder / "model.safetensors", entry).info
    assert info.classes == registry.labels("imagenet-21k") and info.score == "sigmoid"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.npz", b"PK\x03\x04" + bytes(40), "is not a zip file"),
        ("model.pth", b"\x80\x02" + bytes(40), "damaged"),
        ("model.bin", b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("model.jpg", b"\xff\xd8\xff\xe0" + bytes(40), "not a checkpoint"),
        ("model.safetensors", "Grüße".encode()[:4], "a text file"),
        ("model.safetensors", b"\n<!DOCTYPE html>", "a web page"),
        ("model.onnx", b"\x08\x0a\x12\x07pytorch", "an ONNX program"),
        ("model.safetensors", save({"": np.zeros(1)}), "in a supported layout"),
    ],
)
def test_other_files_are_rejected(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_info(tmp_path / name)


def test_pipes_are_rejected(tmp_path: Path, model: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_info(tmp_path / "pipe")
    index = {"weight_map": {"pos_embed": "pipe"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_info(tmp_path / "model.safetensors.index.json")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_info(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "not a JSON object"),
        ('{"architecture": "resnet50"}', "'resnet50' is not supported"),
        ('{"vit": 3}', "model description cannot be read"),
    ],
)
def test_unusable_configs_are_rejected(model: Path, config: str, message: str) -> None:
    (model / "config.json").write_text(config)
    with pytest.raises(VitError, match=message) as caught:
        read_info(model)
    assert caught.value.where == str(model / "config.json")
