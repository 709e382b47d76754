"""The weights that ship are weights to timm and transformers too: same pixels, same logits."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import vitcli

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
CAT = ROOT / "tests" / "images" / "cat.jpg"
SHIPPED = sorted(path.parent for path in ROOT.glob("weights/*/model.safetensors"))


def cat_pixels(model: torch.nn.Module) -> torch.Tensor:
    with Image.open(CAT) as image:
        image.load()
        return model.transform(image)


def test_two_checkpoints_ship() -> None:
    assert len(SHIPPED) == 2


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_timm_gives_our_logits(timm: ModuleType, folder: Path) -> None:
    ours = vitcli.load(folder)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=theirs))
    pixels = cat_pixels(ours)
    with Image.open(CAT) as image, torch.inference_mode():
        torch.testing.assert_close(transform(image), pixels, rtol=0, atol=1.001 / 255 / 0.2)
        found, expected = ours(pixels[None]), theirs(pixels[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_transformers_gives_our_logits(transformers: ModuleType, folder: Path) -> None:
    ours = vitcli.load(folder)
    auto = transformers.AutoModelForImageClassification
    theirs = auto.from_pretrained(folder, dtype=torch.float32).eval()
    pixels = cat_pixels(ours)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(pixels), theirs(pixels).logits, rtol=0, atol=1e-5)
    names = list(theirs.config.id2label.values())
    assert [name.partition(" (")[0] for name in names] == [c.name for c in ours.classes]


def test_its_pipeline_sees_the_cat(transformers: ModuleType) -> None:
    (cifar,) = [folder for folder in SHIPPED if folder.name.endswith("-c10")]
    classify = transformers.pipeline("image-classification", model=str(cifar))
    assert classify(str(CAT))[0]["label"] == "cat"
