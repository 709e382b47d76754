"""Tensor shapes computed without torch match the torch module and identify the model; saved models
load as they were."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import vitcli
from checkpoints.golden_cases import GOLDEN, cases, unpack
from vitcli.architectures.resnet import bit_resnet
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import Architecture, BiTConfig, ClassLabel, ModelConfig, Preprocess, ResNetConfig
from vitcli.layouts.shapes import infer_architecture
from vitcli.layouts.timm import architecture_from_args, architectures
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT


def small_config(**fields: Any) -> ModelConfig:
    sizes = {"width": 64, "depth": 2, "num_heads": 1, "mlp_dim": 96, "num_classes": 3}
    return ModelConfig(**{**sizes, "patch_size": (8, 8), "image_size": (32, 32), **fields})


def hybrid_config(**stem: Any) -> ModelConfig:
    stage = {"width": 16, "depth": 1, "mlp_dim": 24, "patch_size": (16, 16), "image_size": (64, 64)}
    return small_config(**stage, stem=ResNetConfig(**stem))


VITS = {
    "plain": small_config(),
    "no head": small_config(num_classes=0),
    "distilled": small_config(distill_token=True),
    "registers": small_config(num_registers=4, posemb_tokens="class"),
    "registers off": small_config(num_registers=4, posemb_tokens="patches"),
    "gap": small_config(class_token=False, pool="gap"),
    "fc_norm": small_config(pool="gap", final_norm=False, fc_norm=True),
    "map": small_config(class_token=False, pool="map", activation="gelu"),
    "clip": small_config(pre_norm=True, patch_bias=False, norm_eps=1e-5),
    "pre_logits": small_config(pre_logits=20, activation="gelu_tanh"),
    "scaled": small_config(layer_scale=True, qkv_bias=False),
    "swiglu": small_config(swiglu=True),
    "learn2d": small_config(posemb="learn2d", posemb_tokens="patches"),
    "none": small_config(image_size=(224, 224), posemb="none"),
}
RESNETS: dict[str, Architecture] = {
    "root alone": hybrid_config(depths=(), width_factor=0.5),
    "two stages, patches of 2": hybrid_config(depths=(1, 2), width_factor=0.5),
    "three stages": hybrid_config(depths=(2, 1, 1)),
    "the authors' epsilons": hybrid_config(
        depths=(1,), width_factor=0.5, std_eps=1e-5, std_eps_in="deviation", norm_eps=1e-6
    ),
    "a BiT ResNet": BiTConfig(bit_resnet((1, 2), 0.5), (48, 64), num_classes=3),
    "-inf": BiTConfig(
        dataclasses.replace(bit_resnet((1, 1, 1, 1), 0.5), pool_padding="-inf"), (64, 64), 3
    ),
    "a headless ResNet": BiTConfig(bit_resnet((1, 1), 0.5), (64, 64)),
}
MODELS: dict[str, Architecture] = {
    **VITS,
    **RESNETS,
    "oblong": small_config(
        patch_size=(4, 8), image_size=(8, 24), num_registers=1, posemb_tokens="class"
    ),
    "registers with positions": small_config(num_registers=3, activation="quick_gelu"),
}


def random_model(config: Architecture, std: float = 0.5) -> ViT | BiT:
    model = ViT(config) if isinstance(config, ModelConfig) else BiT(config)
    model.init_weights(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std, generator=generator)  # at 1, attention is one-hot
    return model.eval()


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_save_load_round_trip(config: Architecture, tmp_path: Path) -> None:
    model = random_model(config)
    state = model.state_dict()
    assert config.tensor_shapes() == {name: tuple(t.shape) for name, t in state.items()}
    assert sum(tensor.numel() for tensor in state.values()) == config.num_params()
    classes = (ClassLabel("n1", "crane"), ClassLabel("n2", "crane"), ClassLabel("x", "Straße"))
    info = CheckpointInfo(
        config,
        Preprocess(size=config.image_size, crop_mode="squash"),
        classes[: config.num_classes],
        "sigmoid",
        {"seed": 7},
    )
    save_checkpoint(tmp_path, state, info)
    again = vitcli.load(tmp_path)
    assert again.info == info and again.config == config
    images = torch.randn(2, 3, *config.image_size)
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
    (tmp_path / "config.json").unlink()  # the file is self-contained
    assert read_info(tmp_path / "model.safetensors")[0] == info


@pytest.mark.parametrize("model", VITS.values(), ids=VITS)
def test_infers_vit_from_shapes(model: ModelConfig) -> None:
    found, assumed = infer_architecture(model.tensor_shapes())
    assert found.tensor_shapes() == model.tensor_shapes()
    assert found.num_heads == 1 and {"num_heads", "activation", "norm_eps"} <= assumed
    same = ("pool", "num_registers", "posemb", "norm_eps", "swiglu", "image_size", "class_token")
    assert all(getattr(found, name) == getattr(model, name) for name in same)
    assert found.posemb_prefix == model.posemb_prefix


@pytest.mark.parametrize("config", RESNETS.values(), ids=RESNETS)
def test_infers_resnet_from_shapes(config: Architecture) -> None:
    assert infer_architecture(config.tensor_shapes())[0].tensor_shapes() == config.tensor_shapes()


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith("timm_")])
def test_timm_checkpoints_with_and_without_config(name: str, tmp_path: Path) -> None:
    whole = unpack(cases()[name], tmp_path).parent
    (bare := tmp_path / "bare").mkdir()
    info = read_info(shutil.copy(whole / "model.safetensors", bare))[0]
    found, assumed = info.model, set(info.provenance["assumed"])
    stated, _ = read_info(whole)
    expected = stated.model
    pretrained = json.loads((whole / "config.json").read_text())["pretrained_cfg"]
    case = json.loads((GOLDEN / name / "case.json").read_text())
    assert expected.num_params() == case["n_params"]
    assert stated.preprocess.size == expected.image_size
    assert stated.preprocess.mean == tuple(pretrained["mean"])
    assert stated.preprocess.crop_pct == pretrained["crop_pct"]
    if isinstance(expected, ModelConfig) and isinstance(found, ModelConfig):
        found = dataclasses.replace(found, num_heads=expected.num_heads)
        assert ("resnet" in assumed) == (expected.stem is not None)
    else:  # no heads, no class token, no GELU
        assert assumed == {"resnet", "image_size", "preprocess"}
    assert found == expected


def test_infers_released_models() -> None:
    wrong, heads = [], []
    for name in architectures():
        model = architecture_from_args(name, {})
        found, _ = infer_architecture(model.tensor_shapes(), grid=model.grid)
        heads += [name] if found.num_heads != model.num_heads else []
        wrong += [name] if found != model else []
    # Exceptions: 16 heads at width 768, where all others have 12; 16 at 1536 without attention
    # pooling, where DINOv2's g has 24; DINOv3's largest, whose files state the head dimension;
    # AIMv2, whose files are not read without their configuration; and a toy model.
    odd = ("vit_base_patch16_gap_224", "vit_giantopt_", "vit_huge_plus_", "vit_7b_", "test_vit")
    odd += ("aimv2_",)
    assert all(name.startswith(odd) for name in heads)
    assert all("_gap_" in name for name in heads if name.startswith("vit_giantopt_"))
    known = {"vit_base_patch16_224", "vit_large_patch14_dinov2", "deit3_huge_patch14_224"}
    assert not known & set(wrong)
