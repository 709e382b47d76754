"""Checkpoint metadata: writing, reading back, and rejecting invalid values."""

import copy
import json
from typing import Any

import pytest

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import ClassLabel, ModelConfig, Preprocess, ResNetConfig
from vitcli.errors import CheckpointError

INFO = CheckpointInfo(
    ModelConfig(width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=2),
    Preprocess(mean=(0.1, 0.2, 0.3), interpolation="lanczos"),
    (ClassLabel("n02012849", "crane"), ClassLabel("n03126707", "crane")),
    "sigmoid",
    {"command": "vit pretrain", "metrics": {"val_top1": 0.5}, "umlaut": "ä"},
)


def test_default_fields_are_not_stored() -> None:
    """So that earlier versions of vit, which have fewer fields, can read the checkpoint."""
    sizes = {"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64}
    stem = ResNetConfig((1, 1), norm_eps=1e-6)
    for config, stored in (
        (ModelConfig(**sizes), sizes),
        (ModelConfig(**sizes, key_bias=False), {**sizes, "key_bias": False}),
        (ModelConfig(**sizes, stem=stem), {**sizes, "stem": {"depths": (1, 1), "norm_eps": 1e-6}}),
    ):
        info = CheckpointInfo(config, Preprocess())
        assert info.to_dict()["model"] == stored
        assert CheckpointInfo.from_metadata(info.to_metadata()) == info


def metadata_with(**changes: Any) -> str:
    """Return the metadata as JSON with values replaced; "model__width" is the model's width."""
    description = copy.deepcopy(INFO.to_dict())
    for key, value in changes.items():
        *path, last = key.split("__")
        table: Any = description
        for part in path:
            table = table[part]
        table[last] = value
    return json.dumps(description)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 100_000),
        metadata_with(version=2),
        metadata_with(model__width=True),
        metadata_with(model__width=7),
        metadata_with(model__pool="mean"),
        metadata_with(preprocess__std=[0, 1, 1]),
        metadata_with(preprocess__size=[20_000, 20_000]),
        metadata_with(classes=[["n1"]]),
        metadata_with(provenance__history=[{"seconds": "long"}]),
    ],
)
def test_invalid_metadata_is_rejected(text: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointInfo.from_metadata({"vit": text}, where="file")
    assert caught.value.where == "file" and "\n" not in caught.value.what
