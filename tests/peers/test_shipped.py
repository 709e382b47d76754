"""The weights that ship are weights to timm and transformers too."""

from pathlib import Path
from types import ModuleType

import pytest

import vitcli
from peers.random_models import assert_same, random_images

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.parent for path in ROOT.glob("weights/*/model.safetensors"))


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_they_give_our_logits(timm: ModuleType, transformers: ModuleType, folder: Path) -> None:
    ours = vitcli.load(folder)
    images = random_images(0, ours.config.image_size)
    assert_same(ours, timm.create_model(f"local-dir:{folder}", pretrained=True), images)
    assert_same(ours, transformers.AutoModelForImageClassification.from_pretrained(folder), images)


def test_its_pipeline_sees_the_cat(transformers: ModuleType) -> None:
    (cifar,) = [folder for folder in SHIPPED if folder.name.endswith("-c10")]
    classify = transformers.pipeline("image-classification", model=str(cifar))
    assert classify(str(ROOT / "tests" / "images" / "cat.jpg"))[0]["label"] == "cat"
