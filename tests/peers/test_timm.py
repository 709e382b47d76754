"""timm reads our checkpoints and we read timm's, with the same logits: ViTs, hybrids and BiT
ResNets."""

import argparse
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import vitcli
from peers.random_models import (
    assert_same,
    random_arguments,
    random_config,
    random_images,
    random_preprocess,
    randomize,
    save_random,
)
from vitcli.config import Architecture, architecture

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("seed", range(24))
def test_reads_timm_checkpoints(timm: ModuleType, tmp_path: Path, seed: int) -> None:
    arguments = random_arguments(seed)
    overlay = {"input_size": (3, *arguments["img_size"])}
    theirs = timm.create_model(
        "vit_base_patch16_224", pretrained_cfg_overlay=overlay, **arguments
    ).eval()
    randomize(theirs, seed)
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)

    ours = vitcli.load(tmp_path)
    assert_same(ours, theirs, random_images(seed, ours.config.image_size))
    transform = timm.data.resolve_data_config({}, model=theirs)
    assert ours.preprocess.mean == pytest.approx(transform["mean"])
    assert ours.preprocess.crop_pct == transform["crop_pct"]
    assert ours.preprocess.size == transform["input_size"][1:]


SMALL = {"width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 6}
RESNETS: tuple[Architecture, ...] = (
    architecture("R+Ti/16", **SMALL, image_size=(64, 96)),
    architecture("R26+S/32", **SMALL, image_size=(64, 96)),
    architecture("R50+B/16", **SMALL, image_size=(64, 64)),
    architecture("R50x1", image_size=(50, 66), num_classes=6),
)


@pytest.mark.parametrize(
    ("seed", "config"),
    [*enumerate([*map(random_config, range(24)), *RESNETS, random_config(0).with_classes(0)])],
)
def test_timm_reads_our_checkpoints(
    timm: ModuleType, tmp_path: Path, seed: int, config: Architecture
) -> None:
    preprocess = random_preprocess(seed, config.image_size)
    ours = vitcli.load(save_random(tmp_path, config, seed, preprocess))
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_same(ours, theirs, random_images(seed, config.image_size))
    resolved = timm.data.resolve_data_config({}, model=theirs)
    assert tuple(resolved["input_size"]) == (3, *preprocess.size)
    assert tuple(resolved["mean"]) == preprocess.mean
    assert tuple(resolved["std"]) == preprocess.std
    assert resolved["interpolation"] == preprocess.interpolation
    assert resolved["crop_pct"] == preprocess.crop_pct
    assert resolved["crop_mode"] == preprocess.crop_mode


@pytest.mark.parametrize("seed", range(2))
def test_reads_timm_training_checkpoints(timm: ModuleType, tmp_path: Path, seed: int) -> None:
    """Only the arguments state the head count; preprocessing that they omit is assumed. The moving
    average is preferred to the model."""
    sizes = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": 32, "num_classes": 5}
    name = "vit_tiny_patch16_224.augreg_in21k"
    theirs = timm.create_model(name, **sizes).eval()
    randomize(theirs, seed)
    average = timm.utils.ModelEmaV3(theirs, decay=0.5) if seed else None
    if average is not None:
        randomize(theirs, 7)
    fields: dict[str, Any] = {"mean": [0.4] * 3, "std": [0.3] * 3, "crop_pct": 0.8} if seed else {}
    options = {"mean": None, "std": None, "crop_pct": None, "interpolation": "", "lr": math.nan}
    args = argparse.Namespace(model=name, model_kwargs=sizes, **(options | fields))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    saver = timm.utils.CheckpointSaver(
        theirs, optimizer, args, average, checkpoint_dir=str(tmp_path)
    )
    saver.save_checkpoint(0, metric=50.0)

    ours = vitcli.load(tmp_path / "model_best.pth.tar")
    expected = theirs if average is None else average.module
    assert_same(ours, expected, random_images(seed, ours.config.image_size))
    transform = timm.data.resolve_data_config(vars(args), model=theirs)
    for key in ("mean", "std", "crop_pct", "interpolation"):
        assert getattr(ours.preprocess, key) == pytest.approx(transform[key])
    assert ("preprocess" in ours.info.provenance["assumed"]) == (not fields)
