"""What we push is a model to timm and transformers, which fetch it from the Hub by its name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import vitcli
from hub_server import LoopbackHub
from peers.random_models import CLASSES, fill, random_config, random_preprocess
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.hub.push import Target, compare, pack, push
from vitcli.models.vit import ViT

pytestmark = pytest.mark.peers

CAT = Path(__file__).parents[1] / "images" / "cat.jpg"


def pushed(seed: int, folder: Path, repo: str) -> torch.nn.Module:
    """A model that the Hub now has, as it was before."""
    config = random_config(seed)
    model = ViT(config)
    fill(model, seed)
    preprocess = random_preprocess(seed, config.image_size)
    info = CheckpointInfo(config, preprocess, CLASSES, "sigmoid" if seed else "softmax")
    save_checkpoint(folder / "run", model.state_dict(), info)
    (folder / "package").mkdir()
    package = pack(folder / "run", folder / "package", repo)
    target = Target(repo)
    push(package, compare(package, target), target)
    return vitcli.load(folder / "run")


def level(model: torch.nn.Module) -> float:
    """A grey value in 256, where libraries round differently."""
    return 1.001 / 255 / min(model.preprocess.std)


@pytest.fixture
def cat() -> Image.Image:
    with Image.open(CAT) as image:
        return image.convert("RGB")


@pytest.mark.parametrize("seed", [0, 3])
def test_timm_loads_it(
    timm: ModuleType, hub: LoopbackHub, tmp_path: Path, cat: Image.Image, seed: int
) -> None:
    ours = pushed(seed, tmp_path, f"me/timm-{seed}")
    theirs = timm.create_model(f"hf-hub:me/timm-{seed}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=theirs))
    images = ours.transform(cat)[None]
    torch.testing.assert_close(transform(cat)[None], images, rtol=0, atol=level(ours))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 3])
def test_transformers_loads_it(
    transformers: ModuleType, hub: LoopbackHub, tmp_path: Path, cat: Image.Image, seed: int
) -> None:
    repo = f"me/transformers-{seed}"  # for each its own: transformers remembers a repo's commit
    ours = pushed(seed, tmp_path, repo)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(repo).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(repo)
    images = ours.transform(cat)[None]
    found = torch.as_tensor(processor(cat)["pixel_values"][0])
    torch.testing.assert_close(found[None], images, rtol=0, atol=level(ours))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images).logits, ours(images), rtol=0, atol=1e-5)
    names = [name.partition(" (")[0] for name in theirs.config.id2label.values()]
    assert names == [label.name for label in CLASSES]

    answers = transformers.pipeline("image-classification", model=repo)(cat, top_k=3)
    (mine,) = vitcli.predict(repo, [cat], top_k=3, device="cpu", precision="fp32")
    expected = [prediction.score for prediction in mine.predictions]
    assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=1e-4)
