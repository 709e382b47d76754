"""Hybrids and BiT ResNets in timm's layout, their authors' and big_vision's. (For their tensors,
see tests/test_roundtrips.py; for outputs, tests/models/test_resnet.py and tests/golden.)
"""

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from checkpoints.golden_cases import GOLDEN
from layouts.released_names import Arrays, bit, bit_paper
from vitcli.architectures.resnet import bit_resnet
from vitcli.architectures.variants import model_config
from vitcli.checkpoints.changes import Changes, with_architecture
from vitcli.checkpoints.convert import convert, plan_convert
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint
from vitcli.config import BiTConfig, Preprocess, architecture
from vitcli.errors import CheckpointError, ConfigError
from vitcli.layouts.catalog import layout_of
from vitcli.layouts.foreign_json import ForeignJson
from vitcli.layouts.timm import from_config

HYBRID, RESNET = GOLDEN / "timm_hybrid_r50_s16", GOLDEN / "timm_bit_resnetv2"


@pytest.mark.parametrize(
    "case, changes, message",
    [
        (RESNET, {"model_args": {"bottle_ratio": 0.5}}, "bottle_ratio is 0.5"),
        (RESNET, {"model_args": {"layers": [1, 0]}}, "up to 4 stages"),
        (
            HYBRID,
            {"resnet_backbone": {"layers": [1], "channels": [64], "stem_chs": 32}},
            "channels is [64]",
        ),
    ],
)
def test_rejects_unsupported_resnets(case: Path, changes: dict[str, object], message: str) -> None:
    config = json.loads((case / "config.json").read_text()) | changes
    with pytest.raises(CheckpointError) as caught:
        from_config(ForeignJson(config, "config.json"))
    assert message in caught.value.what and "\n" not in caught.value.what


@pytest.fixture(scope="module")
def weights() -> Arrays:
    """The golden case's weights under timm's names."""
    packed = (GOLDEN / "timm_bit_resnetv2" / "model.safetensors.gz").read_bytes()
    return safetensors.numpy.load(gzip.decompress(packed))


@pytest.mark.parametrize(
    "rename, layout, border",
    [
        (lambda arrays: bit(arrays, "standardized_conv2d_7"), "bit-npz", "zeros"),
        (lambda arrays: bit_paper(arrays, flat=True), "big_vision", "-inf"),
    ],
)
def test_reads_original_bit_checkpoints(
    weights: Arrays,
    tmp_path: Path,
    rename: Callable[[Arrays], Arrays],
    layout: str,
    border: Any,
) -> None:
    arrays, slots = rename(weights), {"step": np.array(3), "opt/mu/conv": np.zeros(3)}
    np.savez(tmp_path / "x.npz", **arrays, **slots)
    opened = open_checkpoint(tmp_path / "x.npz")
    assert opened.layout == layout and set(opened.dropped) == set(slots)
    assert {n for tensor in opened.tensors.values() for n in tensor.sources} == set(arrays)
    timms = bit_resnet((1, 1, 1, 1), 0.5)
    expected = dataclasses.replace(timms, std_eps=1e-10, pool_padding=border)
    assert isinstance(opened.info.model, BiTConfig) and opened.info.model.resnet == expected


def test_timm_arch_sets_timm_epsilons() -> None:
    """The original add 1e-10 to the variance, timm 1e-8; a variant of the paper implies neither."""
    config = architecture("R50x1", num_classes=0)
    original = dataclasses.replace(config.resnet, std_eps=1e-10, pool_padding="-inf")
    info = CheckpointInfo(dataclasses.replace(config, resnet=original), Preprocess())
    assert with_architecture(info, Changes(arch="resnetv2_50x1_bit")).model == config
    assert with_architecture(info, Changes(arch="R50x1")).model == info.model
    with pytest.raises(ConfigError, match="depths"):
        with_architecture(info, Changes(arch="R101x1"))


def test_convert_applies_changes(weights: Arrays, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **bit(weights))
    changes = Changes(num_classes=3, dtype="float16", preprocess={"size": [96, 128]})
    model = load(convert(tmp_path / "x.npz", tmp_path / "y", changes=changes))
    assert model.config.image_size == (96, 128) == model.preprocess.size
    assert model.config.num_classes == 3 and not model.head.fc.weight.any()
    for wrong in (Changes(num_heads=2), Changes(patch_size=8)):
        with pytest.raises(ConfigError):
            plan_convert(tmp_path / "x.npz", tmp_path / "w", changes=wrong)


def test_vit_npz_rejects_symmetric_stem_padding() -> None:
    model = model_config("R50+B/16", image_size=(64, 64))
    assert model.stem is not None
    symmetric = dataclasses.replace(
        model, stem=dataclasses.replace(model.stem, padding="symmetric", pool_padding="-inf")
    )
    assert layout_of("vit-npz").unsupported(model) == []
    assert layout_of("vit-npz").unsupported(symmetric) == ["padding=symmetric"]
