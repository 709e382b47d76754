"""Hybrids and BiT ResNets: what timm writes is read by us, and what we write by timm."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

import vitcli
from peers.random_models import CLASSES, fill, random_images, random_preprocess
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import Architecture, ModelConfig, architecture
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT

pytestmark = pytest.mark.peers

SMALL = {"width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 6}
MODELS: dict[str, Architecture] = {
    "R+Ti/16": architecture("R+Ti/16", **SMALL, image_size=(64, 96)),
    "R26+S/32": architecture("R26+S/32", **SMALL, image_size=(64, 96)),
    "R50+B/16": architecture("R50+B/16", **SMALL, image_size=(64, 64)),
    "R50x1": architecture("R50x1", image_size=(50, 66), num_classes=6),
}


def build(config: Architecture) -> ViT | BiT:
    model = ViT(config) if isinstance(config, ModelConfig) else BiT(config)
    fill(model, 0)
    return model.eval()


def assert_same(ours: torch.nn.Module, theirs: torch.nn.Module, size: tuple[int, int]) -> None:
    """In float64: the rounding errors of fifty layers of random weights are no difference."""
    images = random_images(0, size).double()
    with torch.inference_mode():
        found, expected = ours.double()(images), theirs.double()(images)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_timm_reads_what_we_write(timm: ModuleType, tmp_path: Path, config: Architecture) -> None:
    ours = build(config)
    info = CheckpointInfo(config, random_preprocess(0, config.image_size), CLASSES)
    save_checkpoint(tmp_path, ours.state_dict(), info)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_same(ours, theirs, config.image_size)
    resolved = timm.data.resolve_data_config({}, model=theirs)
    assert tuple(resolved["input_size"]) == (3, *config.image_size)


def test_we_read_what_timm_writes(timm: ModuleType, tmp_path: Path) -> None:
    theirs = timm.create_model("resnetv2_50x1_bit", num_classes=4).eval()
    fill(theirs, 1)
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)
    ours = vitcli.load(tmp_path)
    for size in ((64, 64), (45, 70)):
        assert_same(ours, theirs, size)
