"""Tensor names and shapes without torch are those of the torch module, and tell the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from safetensors import safe_open

from checkpoints.golden_cases import CASES, Case
from vitcli.config import ModelConfig
from vitcli.errors import CheckpointError
from vitcli.layouts.shapes import infer_architecture
from vitcli.layouts.timm import architecture_from_args, architectures
from vitcli.models.vit import ViT

SMALL: dict[str, Any] = {
    "width": 64,
    "depth": 2,
    "num_heads": 1,
    "mlp_dim": 96,
    "patch_size": (8, 8),
    "image_size": (32, 32),
    "num_classes": 3,
}
MODELS = {
    "plain": ModelConfig(**SMALL),
    "no head": ModelConfig(**{**SMALL, "num_classes": 0}),
    "distilled": ModelConfig(**SMALL, distill_token=True),
    "registers": ModelConfig(**SMALL, num_registers=4, posemb_tokens="class"),
    "registers off": ModelConfig(**SMALL, num_registers=4, posemb_tokens="patches"),
    "gap": ModelConfig(**SMALL, class_token=False, pool="gap"),
    "fc_norm": ModelConfig(**SMALL, pool="gap", final_norm=False, fc_norm=True),
    "map": ModelConfig(**SMALL, class_token=False, pool="map", activation="gelu"),
    "clip": ModelConfig(**SMALL, pre_norm=True, patch_bias=False, norm_eps=1e-5),
    "pre_logits": ModelConfig(**SMALL, pre_logits=20),
    "scaled": ModelConfig(**SMALL, layer_scale=True, qkv_bias=False),
    "swiglu": ModelConfig(**SMALL, swiglu=True),
    "learn2d": ModelConfig(**SMALL, posemb="learn2d", posemb_tokens="patches"),
    "none": ModelConfig(**{**SMALL, "image_size": (224, 224)}, posemb="none"),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_shapes_are_the_modules(model: ModelConfig) -> None:
    with torch.device("meta"):
        state = ViT(model).state_dict()
    assert model.tensor_shapes() == {name: tuple(t.shape) for name, t in state.items()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_shapes_tell_the_model(model: ModelConfig) -> None:
    found, assumed = infer_architecture(model.tensor_shapes())
    assert found.tensor_shapes() == model.tensor_shapes()
    assert isinstance(found, ModelConfig)
    assert found.num_heads == 1 and {"num_heads", "activation", "norm_eps"} <= assumed
    same = ("pool", "num_registers", "posemb", "norm_eps", "swiglu", "image_size", "class_token")
    assert all(getattr(found, name) == getattr(model, name) for name in same)
    assert found.posemb_prefix == model.posemb_prefix


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_files_without_a_config_are_understood_but_for_the_heads(case: Case) -> None:
    from vitcli.checkpoints.read import read_info

    with safe_open(case.folder / "model.safetensors", framework="np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    true = read_info(case.folder)[0].model
    found, _ = infer_architecture(shapes)
    assert dataclasses.replace(found, num_heads=true.num_heads) == true


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_224", "vit_large_patch14_dinov2", "deit3_huge_patch14_224"]
)
def test_a_released_model_is_inferred_whole(name: str) -> None:
    model = architecture_from_args(name, {})
    found, _ = infer_architecture(model.tensor_shapes())
    assert found == model and name in architectures()


def test_the_heads_of_what_was_released_are_known_by_the_width() -> None:
    wrong = []
    for name in architectures():
        model = architecture_from_args(name, {})
        found, _ = infer_architecture(model.tensor_shapes(), grid=model.grid)
        wrong += [name] if found.num_heads != model.num_heads else []
    # 16 heads at 768, where all others have 12; at 1536, where DINOv2's g has 24; and a toy.
    odd = ("vit_base_patch16_gap_224", "vit_giantopt_", "test_vit")
    assert all(name.startswith(odd) for name in wrong)


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"patch_embed.proj.weight": (8, 3, 4, 4)},
        {"vit.embeddings.cls_token": (1, 1, 8)},
        {
            "patch_embed.proj.weight": (8, 3, 4, 4),
            "blocks.0.attn.qkv.weight": (24, 8),
            "blocks.0.mlp.fc1.weight": (32,),
            "blocks.0.mlp.fc2.weight": (8, 32),
        },
    ],
)
def test_other_tensors_are_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(CheckpointError, match="not a Vision Transformer"):
        infer_architecture(shapes)


def test_a_grid_that_is_no_square_has_to_be_told() -> None:
    shapes = ModelConfig(**{**SMALL, "image_size": (32, 40)}).tensor_shapes()
    with pytest.raises(CheckpointError, match="21 position embeddings are not a square grid"):
        infer_architecture(shapes)
