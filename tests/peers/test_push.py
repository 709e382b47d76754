"""What we push is a model to timm and transformers, which fetch it from the Hub by its name."""

from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

import vitcli
from hub_server import LoopbackHub
from peers.random_models import random_config, random_preprocess, saved
from vitcli.hub.push import Target, compare, pack, push

pytestmark = pytest.mark.peers

CAT = Path(__file__).parents[1] / "images" / "cat.jpg"


@pytest.mark.parametrize("seed", [0, 3])
def test_both_load_it_and_give_our_answers(
    timm: ModuleType, transformers: ModuleType, hub: LoopbackHub, tmp_path: Path, seed: int
) -> None:
    repo = f"me/model-{seed}"  # for each its own: transformers remembers a repo's commit
    config = random_config(seed)
    run = saved(tmp_path / "run", config, seed, random_preprocess(seed, config.image_size))
    (tmp_path / "package").mkdir()
    package, target = pack(run, tmp_path / "package", repo), Target(repo)
    push(package, compare(package, target), target)
    with Image.open(CAT) as image:
        cat = image.convert("RGB")
    (ours,) = vitcli.predict(run, [cat], top_k=6, device="cpu", precision="fp32")
    expected = [prediction.score for prediction in ours.predictions]

    model = timm.create_model(f"hf-hub:{repo}", pretrained=True).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    with torch.inference_mode():
        scores = model(transform(cat)[None])[0].softmax(0).sort(descending=True)
    assert scores.values.tolist() == pytest.approx(expected, abs=1e-3)
    assert scores.indices.tolist() == [prediction.index for prediction in ours.predictions]

    answers = transformers.pipeline("image-classification", model=repo)(cat, top_k=6)
    assert [answer["score"] for answer in answers] == pytest.approx(expected, abs=1e-3)
    assert [answer["label"] for answer in answers] == [
        prediction.label for prediction in ours.predictions
    ]
