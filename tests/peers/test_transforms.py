"""The evaluation transforms beside timm's own, on photographs: equal to one uint8 level.

All but `nearest`, where a tie between two pixels is broken by the last bit of a coordinate.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

from vitcli.config import Preprocess
from vitcli.data.transforms import EvalTransform, to_float

pytestmark = pytest.mark.peers

IMAGES = Path(__file__).parents[1] / "images"
PHOTOGRAPHS = ["astronaut", "cat", "coffee", "rocket"]


@pytest.mark.parametrize("photograph", PHOTOGRAPHS)
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(
    ("size", "crop_pct"), [((224, 224), 0.9), ((224, 224), 0.95), ((384, 384), 1.0), ((96, 160), 1)]
)
def test_timm_makes_the_same_pixels(
    timm: ModuleType,
    photograph: str,
    interpolation: str,
    crop_mode: str,
    size: tuple[int, int],
    crop_pct: float,
) -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    theirs = timm.data.create_transform(
        input_size=(3, *size),
        interpolation=interpolation,
        mean=mean,
        std=std,
        crop_pct=crop_pct,
        crop_mode=crop_mode,
    )
    preprocess = Preprocess(size, mean, std, interpolation, crop_pct, crop_mode)
    with Image.open(IMAGES / f"{photograph}.jpg") as image:
        image.load()
        expected, found = theirs(image), to_float(EvalTransform(preprocess)(image), preprocess)
    assert found.shape == (3, *size)
    levels = (found - expected).abs() * torch.tensor(std).view(3, 1, 1) * 255
    assert levels.max() <= 1.001
