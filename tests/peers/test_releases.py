"""Checkpoints in the layouts of the original authors and torchvision: the real libraries read ours,
and we read theirs."""

import dataclasses
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from peers.random_models import assert_same, random_images, randomize, save_random
from peers.test_convert import TOLERANCE, VIT
from vitcli.architectures.resnet import bit_resnet
from vitcli.checkpoints.changes import Changes
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.load import load
from vitcli.config import BiTConfig, ModelConfig, ResNetConfig

pytestmark = pytest.mark.peers

FLAX = dataclasses.replace(VIT, norm_eps=1e-6, activation="gelu_tanh")
TIMM_ARGS = {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2}
TIMM_ARGS |= {"num_classes": 6, "act_layer": "gelu_tanh"}
PATCHES: dict[str, Any] = {"patch_size": 8}
GAP = {**PATCHES, "class_token": False, "global_pool": "avg", "fc_norm": False}
NO_EMBED = {**PATCHES, "no_embed_class": True}
STEM = {"img_size": 64}


def hybrid_config(depths: tuple[int, ...], cells: int) -> ModelConfig:
    stem = ResNetConfig(depths)
    patch = stem.stride * cells
    return dataclasses.replace(FLAX, stem=stem, patch_size=(patch, patch), image_size=(64, 64))


MEAN = dataclasses.replace(FLAX, class_token=False, pool="gap")
MAP = dataclasses.replace(FLAX, class_token=False, pool="map")
PATCH_POSITIONS = dataclasses.replace(FLAX, posemb_tokens="patches")
B16 = "vit_base_patch16_224"
NPZ: dict[str, tuple[ModelConfig, Any, str, dict[str, Any]]] = {
    "vit_jax": (FLAX, "vit-npz", B16, PATCHES),
    "vit_jax, mean": (MEAN, "vit-npz", B16, GAP),
    "big_vision, mean": (MEAN, "big_vision", B16, GAP),
    "big_vision, class token": (PATCH_POSITIONS, "big_vision", B16, NO_EMBED),
    "big_vision, MAP": (MAP, "big_vision", "vit_base_patch16_siglip_224", PATCHES),
    "hybrid, root alone": (hybrid_config((), 8), "vit-npz", "vit_tiny_r_s16_p8_224", STEM),
    "hybrid, R26": (hybrid_config((2, 2, 2, 2), 1), "vit-npz", "vit_small_r26_s32_224", STEM),
}


@pytest.mark.parametrize("name", NPZ)
def test_timm_reads_our_npz(timm: ModuleType, tmp_path: Path, name: str) -> None:
    config, layout, architecture, options = NPZ[name]
    source = save_random(tmp_path / "ours", config)
    path = convert(source, tmp_path / "x.npz", layout)
    theirs = timm.create_model(architecture, **{**TIMM_ARGS, **options})
    theirs.load_pretrained(str(path))
    assert_same(load(source), theirs, random_images(3, config.image_size))


def test_timm_reads_our_bit_npz(timm: ModuleType, tmp_path: Path) -> None:
    config = BiTConfig(bit_resnet((1, 2, 1, 1), 1), (64, 64), num_classes=6)
    source = save_random(tmp_path / "ours", config)
    path = convert(source, tmp_path / "x.npz")
    assert "resnet/block2/unit02/c/standardized_conv2d/kernel" in np.load(path).files
    make = timm.models.resnetv2._create_resnetv2_bit
    theirs = make("resnetv2_50x1_bit", layers=[1, 2, 1, 1], width_factor=1, num_classes=6)
    theirs.load_pretrained(str(path))
    assert_same(load(source), theirs, random_images(4, (64, 64)))
    # The file's authors add 1e-10 to the variance, timm 1e-8.
    with torch.inference_mode():
        images = random_images(4, (64, 64)).double()
        difference = (load(path).double()(images) - theirs(images)).abs().max()
    assert difference <= TOLERANCE


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("representation", [None, 24])
def test_matches_torchvision(
    timm: ModuleType, tmp_path: Path, suffix: str, representation: int | None
) -> None:
    from safetensors.torch import save_file
    from torchvision.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=128,
        mlp_dim=96,
        num_classes=5,
        representation_size=representation,
    )
    randomize(theirs, 5)
    save = torch.save if suffix == ".pth" else save_file
    save(theirs.state_dict(), tmp_path / f"x{suffix}")
    images = random_images(5, (32, 32))
    ours = load(tmp_path / f"x{suffix}")
    assert ours.config.pre_logits == (representation or 0)
    assert_same(ours, theirs, images)
    out = convert(tmp_path / f"x{suffix}", tmp_path / "four", changes=Changes(num_heads=4))
    assert load(out).config.num_heads == 4
