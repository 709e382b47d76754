"""Models written by `vit convert` compute the same in transformers and timm."""

import dataclasses
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from peers.random_models import assert_same, random_images, randomize, save_random
from vitcli.checkpoints.convert import convert, plan_convert
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.resize import plan_resize, resize_posemb
from vitcli.checkpoints.verify import verify
from vitcli.config import ModelConfig, Preprocess

pytestmark = pytest.mark.peers

TOLERANCE = 1e-5
VIT = ModelConfig(48, 2, 3, 96, (8, 8), (32, 32), 6, norm_eps=1e-12)
DINO = dataclasses.replace(VIT, layer_scale=True, pool="token+gap", norm_eps=1e-6)
REGISTERS = dataclasses.replace(DINO, num_registers=3, posemb_tokens="class")
GATED: dict[str, Any] = {"swiglu": True, "mlp_dim": 256}
NO_HEAD: dict[str, Any] = {"num_classes": 0, "pool": "token"}
EXPRESSIBLE = {
    "vit": VIT,
    "vit, tanh": dataclasses.replace(VIT, activation="gelu_tanh", norm_eps=1e-6),
    "vit, no qkv bias": dataclasses.replace(VIT, qkv_bias=False),
    "vit, not square": dataclasses.replace(VIT, image_size=(32, 48)),
    "vit, no head": dataclasses.replace(VIT, num_classes=0, pre_logits=48),
    "dinov2": DINO,
    "dinov2, no qkv bias": dataclasses.replace(DINO, qkv_bias=False, **NO_HEAD),
    "dinov2, swiglu": dataclasses.replace(DINO, **GATED),
    "dinov2, registers": REGISTERS,
    "dinov2, registers, swiglu, no head": dataclasses.replace(REGISTERS, **GATED, **NO_HEAD),
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_transformers_reads_converted_models(
    transformers: ModuleType, tmp_path: Path, name: str
) -> None:
    config = EXPRESSIBLE[name]
    preprocess = Preprocess(size=config.image_size, mean=(0.1, 0.2, 0.3))
    source = save_random(tmp_path / "ours", config, preprocess=preprocess)
    folder = convert(source, tmp_path / "theirs", "transformers")
    auto = (
        transformers.AutoModelForImageClassification
        if config.num_classes
        else transformers.AutoModel
    )
    theirs, loading_info = auto.from_pretrained(folder, output_loading_info=True)
    kind = "Dinov2WithRegisters" if config.num_registers else "Dinov2"
    kind += "ForImageClassification" if config.num_classes else "Model"
    assert type(theirs).__name__ == (kind if config.layer_scale else kind.replace("Dinov2", "ViT"))
    assert not loading_info["missing_keys"] and not loading_info["unexpected_keys"]
    assert_same(load(source), theirs, random_images(0, config.image_size))
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    assert list(processor.image_mean) == [0.1, 0.2, 0.3]


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
SIZES |= {"intermediate_size": 96, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize("kind", ["ViT", "DeiT"])
def test_timm_reads_models_converted_from_transformers(
    transformers: ModuleType, timm: ModuleType, tmp_path: Path, kind: str
) -> None:
    """Their LayerNorm epsilon is 1e-12, timm's 1e-6; only tokens near zero show the difference."""
    config = getattr(transformers, f"{kind}Config")(**SIZES, num_labels=5)
    name = "ViTForImageClassification"
    name = name if kind == "ViT" else "DeiTForImageClassificationWithTeacher"
    theirs = getattr(transformers, name)(config).eval()
    randomize(theirs, 4)
    theirs.save_pretrained(tmp_path / "theirs")
    folder = convert(tmp_path / "theirs", tmp_path / "ours")
    timms = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = random_images(5, (32, 32))
    with torch.inference_mode():
        expected = theirs(images).logits
        torch.testing.assert_close(load(folder)(images), expected, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(timms(images), expected, rtol=0, atol=1e-4)
    assert expected.abs().max() > 0.1
    assert load(folder).config.norm_eps == 1e-12 and "token is near zero" in str(
        plan_convert(folder, tmp_path / "again").warnings
    )
    assert verify(open_checkpoint(folder / "model.safetensors")).note == "with timm's epsilons"


MODELS = [
    ("ViTConfig", "ViTForImageClassification", {}),
    ("ViTConfig", "ViTModel", {}),
    ("DeiTConfig", "DeiTModel", {}),
    ("DeiTConfig", "DeiTForImageClassification", {}),
    ("DeiTConfig", "DeiTForImageClassificationWithTeacher", {}),
    ("Dinov2Config", "Dinov2ForImageClassification", {"use_swiglu_ffn": True}),
    ("Dinov2Config", "Dinov2Model", {}),
    ("Dinov2WithRegistersConfig", "Dinov2WithRegistersForImageClassification", {}),
    ("Dinov2WithRegistersConfig", "Dinov2WithRegistersModel", {"use_swiglu_ffn": True}),
    ("SiglipVisionConfig", "SiglipVisionModel", {}),
    ("CLIPVisionConfig", "CLIPVisionModel", {"hidden_act": "gelu"}),
]
TEXT = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "vocab_size": 50}
TEXT |= {"intermediate_size": 96, "bos_token_id": 1, "eos_token_id": 2, "projection_size": 48}


@pytest.mark.parametrize("family", ["Siglip", "CLIP"])
def test_clip_and_siglip_image_classifiers(
    transformers: ModuleType, tmp_path: Path, family: str
) -> None:
    """They use the mean of the patches: CLIP's without the last norm, SigLIP's without the pool."""
    labels = {0: "cat", 1: "dog", 2: "eel"}
    config = getattr(transformers, f"{family}Config")(
        vision_config=SIZES, text_config=TEXT, id2label=labels, num_labels=3
    )
    theirs = getattr(transformers, f"{family}ForImageClassification")(config).eval()
    randomize(theirs, 3)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    assert [label.name for label in ours.classes] == ["cat", "dog", "eel"]
    assert_same(ours, theirs, random_images(3, (32, 32)))
    assert verify(open_checkpoint(tmp_path / "theirs" / "model.safetensors")).difference < 1e-10


@pytest.mark.parametrize(("config", "kind", "more"), MODELS, ids=[row[1] for row in MODELS])
def test_reads_transformers_checkpoints(
    transformers: ModuleType, tmp_path: Path, config: str, kind: str, more: dict[str, object]
) -> None:
    """In one file, in shards, and under the parameter names that its models have in memory."""
    described = getattr(transformers, config)(**SIZES, num_labels=5, **more)
    theirs = getattr(transformers, kind)(described).eval()
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    state = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    for folder, save in (("memory", save_file), ("pickle", torch.save)):
        (tmp_path / folder).mkdir()
        shutil.copy(tmp_path / "whole" / "config.json", tmp_path / folder)
        name = "pytorch_model.bin" if folder == "pickle" else "model.safetensors"
        save(state, tmp_path / folder / name)
    for folder in ("whole", "shards", "memory", "pickle"):
        assert_same(load(tmp_path / folder), theirs, random_images(1, (32, 32)))


def test_timm_reads_resized_models(timm: ModuleType, tmp_path: Path) -> None:
    source = save_random(tmp_path / "ours", dataclasses.replace(VIT, norm_eps=1e-6))
    job = plan_resize(source, grid=(6, 9), method="bicubic")
    resize_posemb(job)
    ours, images = load(job.output), random_images(2, (48, 72))
    assert_same(ours, timm.create_model(f"local-dir:{job.output}", pretrained=True), images)
    same = timm.create_model(f"local-dir:{source}", pretrained=True, img_size=(48, 72))
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.float()(images), same.eval()(images), rtol=0, atol=TOLERANCE
        )
