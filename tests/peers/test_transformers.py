"""Checkpoints that we write, ship and push work as transformers' models and pipelines."""

import itertools
import json
import shutil
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

import vitcli
from checkpoints.golden_cases import GOLDEN
from hub_server import LoopbackHub
from peers.random_models import (
    CLASSES,
    assert_same,
    random_config,
    random_images,
    random_preprocess,
    randomize,
    save_random,
)
from vitcli.data.transforms import EvalTransform, to_float
from vitcli.errors import VitWarning
from vitcli.hub.push import Target, compare, pack, push
from vitcli.layouts.transformers import MODEL_TYPES, _read_preprocess

pytestmark = pytest.mark.peers

CAT = Path(__file__).parents[1] / "images" / "cat.jpg"
SHIPPED = sorted(path.parent for path in CAT.parents[2].glob("weights/*/model.safetensors"))


def save_random_model(folder: Path, seed: int) -> Path:
    config = random_config(seed)
    return save_random(folder, config, seed, random_preprocess(seed, config.image_size))


@pytest.mark.parametrize("seed", range(6))
def test_transformers_reads_our_checkpoints(
    transformers: ModuleType, tmp_path: Path, seed: int
) -> None:
    ours = vitcli.load(save_random_model(tmp_path, seed))
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert_same(ours, theirs, random_images(seed, ours.config.image_size))
    cranes = ["crane (n02012849)", "crane (n03126707)"]
    names = [*cranes, *(label.name for label in CLASSES[2:])]
    assert list(theirs.config.id2label.values()) == names


PROCESSORS = ("ViTFeatureExtractor", "DeiTFeatureExtractor", "DeiTImageProcessorFast")
PROCESSORS += ("BitImageProcessor", "CLIPFeatureExtractor", "CLIPImageProcessor")
PROCESSORS += ("ChineseCLIPImageProcessor", "SiglipImageProcessor", "ViTImageProcessorFast")
INCOMPLETE: list[dict[str, Any]] = [
    {"size": 36, "crop_size": 32},
    {"size": {"shortest_edge": 36}, "crop_size": 32},
    {"size": {"height": 36, "width": 36}, "crop_size": 32},
    {"size": {"shortest_edge": 36}, "crop_size": 32, "do_center_crop": True},
    {},
]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *itertools.product(PROCESSORS, INCOMPLETE),
        ("ViTImageProcessor", {"size": 32}),
        (
            "ViTImageProcessor",
            {"size": {"height": 39, "width": 39}, "crop_size": 32, "do_center_crop": True},
        ),
        ("DeiTImageProcessor", {"size": 32, "do_center_crop": False, "resample": 2}),
        (
            "BitImageProcessor",
            {"size": {"shortest_edge": 36}, "crop_size": 32, "image_std": [0.2, 0.3, 0.4]},
        ),
        ("", {"size": 32}),
        ("ViTImageProcessor", {"size": 32, "rescale_factor": 1 / 127.5}),
        ("ViTImageProcessor", {"size": 32, "do_rescale": False}),
        ("ViTImageProcessor", {"size": 32, "do_normalize": False}),
    ],
    ids=str,
)
def test_our_transform_matches_image_processors(
    transformers: ModuleType, tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    """The same pixels, or a warning if the processor returns images of another size. Files from
    before 2023, such as DeiT's, give sizes as one number."""
    shutil.copytree(GOLDEN / "hf_vit", tmp_path, dirs_exist_ok=True)
    if name:  # otherwise from the model_type
        kind = "feature_extractor" if "Extractor" in name else "image_processor"
        config = {f"{kind}_type": name, **config}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    side = 32 if "size" in config else 224
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preprocess = _read_preprocess(tmp_path, MODEL_TYPES["vit"], (side, side))
    assert preprocess is not None
    for size in ((36, 43), (61, 50), (224, 99)):
        with Image.open(CAT) as image:
            image = image.convert("RGB").resize(size)
        expected = torch.as_tensor(theirs(image)["pixel_values"][0])
        if expected.shape == (3, side, side):
            assert not caught
            found = to_float(EvalTransform(preprocess)(image), preprocess)
            torch.testing.assert_close(found, expected)
        else:
            assert [warning.category for warning in caught] == [VitWarning]


@pytest.mark.parametrize("name", ["Dinov2", "Dinov2WithRegisters"])
@pytest.mark.parametrize("crop", [56, 112])
def test_dinov2_pipeline_with_other_image_size(
    transformers: ModuleType, tmp_path: Path, name: str, crop: int
) -> None:
    """DINOv2 was trained at 518 pixels, but its repos preprocess images to 224, so that position
    embeddings are interpolated."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "num_labels": 6}
    config = getattr(transformers, f"{name}Config")(**sizes, image_size=84, patch_size=14)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    randomize(model, 1)
    model.save_pretrained(tmp_path)
    processor = {"size": {"shortest_edge": 120}, "crop_size": {"height": crop, "width": crop}}
    transformers.BitImageProcessor(**processor).save_pretrained(tmp_path)
    classify = transformers.pipeline("image-classification", model=str(tmp_path))
    with Image.open(CAT) as image:
        image.load()
    results = classify(image, top_k=6)
    expected = [result["score"] for result in results]
    (ours,) = vitcli.predict(tmp_path, [image], top_k=6, device="cpu", precision="fp32")
    assert [f"LABEL_{p.label}" for p in ours.predictions] == [result["label"] for result in results]
    assert [p.score for p in ours.predictions] == pytest.approx(expected, abs=3e-4)
    (other,) = vitcli.predict(tmp_path, [image], top_k=6, resolution=(84, 84), precision="fp32")
    assert [p.score for p in other.predictions] != pytest.approx(expected, abs=3e-3)


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_shipped_weights_match_timm_and_transformers(
    timm: ModuleType, transformers: ModuleType, folder: Path
) -> None:
    ours = vitcli.load(folder)
    images = random_images(0, ours.config.image_size)
    assert_same(ours, timm.create_model(f"local-dir:{folder}", pretrained=True), images)
    assert_same(ours, transformers.AutoModelForImageClassification.from_pretrained(folder), images)


@pytest.mark.parametrize("seed", [0, 3])
def test_pushed_model_gives_our_predictions(
    timm: ModuleType, transformers: ModuleType, hub: LoopbackHub, tmp_path: Path, seed: int
) -> None:
    repo = f"me/model-{seed}"  # one per seed: transformers caches a repo's commit
    run = save_random_model(tmp_path / "run", seed)
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

    results = transformers.pipeline("image-classification", model=repo)(cat, top_k=6)
    assert [result["score"] for result in results] == pytest.approx(expected, abs=1e-3)
    assert [result["label"] for result in results] == [p.label for p in ours.predictions]
