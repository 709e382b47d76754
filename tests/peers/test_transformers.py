"""What we write is a model, an image processor and a pipeline to transformers."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import vitcli
from peers.random_models import (
    assert_same,
    fill,
    random_config,
    random_images,
    random_preprocess,
    saved,
)

pytestmark = pytest.mark.peers

CAT = Path(__file__).parents[1] / "images" / "cat.jpg"


def written(folder: Path, seed: int) -> None:
    config = random_config(seed)
    saved(folder, config, seed, random_preprocess(seed, config.image_size))


@pytest.mark.parametrize("seed", range(6))
def test_transformers_reads_what_we_write(
    transformers: ModuleType, tmp_path: Path, seed: int
) -> None:
    written(tmp_path, seed)
    ours = vitcli.load(tmp_path)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert_same(ours, theirs, random_images(seed, ours.config.image_size))
    assert list(theirs.config.id2label.values()) == [
        "crane (n02012849)",
        "crane (n03126707)",
        "tabby",
        "cup",
        "projectile",
        "sorrel",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_its_image_processor_gives_our_pixels(
    transformers: ModuleType, tmp_path: Path, seed: int
) -> None:
    written(tmp_path, seed)
    ours = vitcli.load(tmp_path)
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    with Image.open(CAT) as image:
        image.load()
        expected = theirs(image)["pixel_values"][0]
        found = ours.transform(image)
    level = 1 / 255 / min(ours.preprocess.std)
    assert (found - torch.as_tensor(expected)).abs().max() <= level * 1.001


@pytest.mark.parametrize("name", ["Dinov2", "Dinov2WithRegisters"])
@pytest.mark.parametrize("crop", [56, 112])
def test_its_pipeline_with_images_of_another_size(
    transformers: ModuleType, tmp_path: Path, name: str, crop: int
) -> None:
    """DINOv2 was trained at 518 pixels, and is given 224 by its repos: the position embeddings are
    interpolated."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_labels": 6}
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=84, patch_size=14)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    fill(model, 1)
    model.save_pretrained(tmp_path)
    said = {"size": {"shortest_edge": 120}, "crop_size": {"height": crop, "width": crop}}
    transformers.BitImageProcessor(**said).save_pretrained(tmp_path)
    classify = transformers.pipeline("image-classification", model=str(tmp_path))
    with Image.open(CAT) as image:
        image.load()
    theirs = classify(image, top_k=6)
    (ours,) = vitcli.predict(tmp_path, [image], top_k=6, device="cpu", precision="fp32")
    assert [f"LABEL_{p.label}" for p in ours.predictions] == [a["label"] for a in theirs]
    assert [p.score for p in ours.predictions] == pytest.approx(
        [answer["score"] for answer in theirs], abs=3e-4
    )
    (other,) = vitcli.predict(tmp_path, [image], top_k=6, resolution=(84, 84), precision="fp32")
    assert [p.score for p in other.predictions] != pytest.approx(
        [answer["score"] for answer in theirs], abs=3e-3
    )
