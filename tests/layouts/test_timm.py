"""Reading and writing timm's config.json. (tests/peers compares with timm itself.)"""

import dataclasses
import json
from typing import Any

import pytest

from checkpoints.golden_cases import GOLDEN
from layouts.test_shapes import RESNETS, VITS, small_config
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import ModelConfig, Preprocess, model_config
from vitcli.errors import CheckpointError, VitWarning
from vitcli.layouts.foreign_json import ForeignJson
from vitcli.layouts.timm import (
    architecture_from_args,
    architectures,
    best_architecture,
    from_config,
    not_in_timm,
    to_config,
)


def golden_config(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def test_best_architecture_needs_no_arguments() -> None:
    for name in architectures():
        found, overrides = best_architecture(architecture_from_args(name, {}))
        assert overrides == {}, name
        assert best_architecture(architecture_from_args(found, {})) == (found, {}), name


MODELS = {
    **{k: v for k, v in VITS.items() if k not in ("registers", "pre_logits", "learn2d")},
    "oblong patches and images": small_config(patch_size=(8, 16), image_size=(32, 48)),
    "registers with positions": small_config(num_registers=3),
    "mean beside a class token": small_config(pool="gap"),
    "mean, patches' positions": small_config(
        class_token=False, pool="gap", posemb_tokens="patches"
    ),
    "token and fc_norm": small_config(final_norm=False, fc_norm=True),
    "no norm": small_config(final_norm=False),
    "map and class token": small_config(pool="map"),
    "pre-norm": small_config(pre_norm=True, patch_bias=False),
    "epsilon": small_config(norm_eps=1e-5),
    "tanh": small_config(activation="gelu_tanh"),
    "quick": small_config(activation="quick_gelu"),
    "odd mlp": small_config(mlp_dim=173),
}
DINOV3 = {"rope": "dinov3", "posemb": "none", "num_registers": 4, "layer_scale": True}
DINOV3 |= {"qkv_bias": False, "norm_eps": 1e-5}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_config_round_trip(model: ModelConfig) -> None:
    assert not_in_timm(model) == []
    config = to_config(CheckpointInfo(model, Preprocess(size=model.image_size)))
    del config["vit"]  # as timm sees it
    assert None not in config["model_args"].values()
    found = from_config(ForeignJson(json.loads(json.dumps(config)))).model
    same = dataclasses.replace(found, posemb_tokens=model.posemb_tokens)
    assert same == model and found.posemb_prefix == model.posemb_prefix


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pre_logits": 32}, "pre_logits=32"),
        ({"posemb": "learn2d", "posemb_tokens": "patches"}, "posemb=learn2d"),
        ({"num_registers": 2, "posemb_tokens": "class"}, "posemb_tokens=class"),
        ({"fc_norm": True}, "final_norm=true"),
        ({"norm_eps": 1e-3}, "norm_eps=0.001"),
        ({"distill_token": True, "num_registers": 1}, "a distillation token with these options"),
        ({"swiglu": True, "norm_eps": 1e-5}, "swiglu=true"),
        ({"swiglu": True, "key_bias": False, "width": 30}, "this combination of options"),
        (RESNETS["root alone"], "width factor 0.5"),
        (RESNETS["three stages"], "a ResNet stem of (2, 1, 1) blocks"),
        (RESNETS["the authors' epsilons"], "std_eps_in=deviation"),
        (RESNETS["a BiT ResNet"], "a BiT ResNet of (1, 2) blocks, width factor 0.5"),
        (DINOV3 | {"qkv_bias": True}, "key_bias=true"),
        (DINOV3 | {"layer_scale": False}, "no layer_scale with rope=dinov3"),
        (DINOV3 | {"pool": "map"}, "an attention pool with rope=dinov3"),
        # Even if the image is smaller than the stride of timm's closest model.
        (model_config("R26+B/16", image_size=(16, 16)), "a ResNet stem"),
    ],
)
def test_architecture_omitted_if_not_in_timm(changes: Any, why: str) -> None:
    plain = model_config("Ti/16", num_classes=3)
    model = dataclasses.replace(plain, **changes) if isinstance(changes, dict) else changes
    assert any(why in reason for reason in not_in_timm(model))
    config = to_config(CheckpointInfo(model, Preprocess(size=model.image_size)))
    assert config.keys() == {"model_type", "vit"}  # with "pretrained_cfg", transformers loads it
    assert CheckpointInfo.from_dict(json.loads(json.dumps(config["vit"]))).model == model


def test_keys_that_timm_and_transformers_need() -> None:
    """timm replaces the classifier and the first layer by their names."""
    info = CheckpointInfo(model_config("Ti/16", num_classes=3), Preprocess())
    fields = {"fixed_input_size": True, "first_conv": "patch_embed.proj", "classifier": "head"}
    assert to_config(info)["pretrained_cfg"].items() >= fields.items()
    scores = {"sigmoid": "multi_label_classification", "none": "regression"}
    for score, kind in scores.items():
        assert to_config(dataclasses.replace(info, score=score))["problem_type"] == kind


def test_label_names_and_descriptions() -> None:
    config = golden_config("timm_vit_reg4_dinov2") | {
        "label_names": [f"n0000000{i}" for i in range(6)]
    }
    config["label_descriptions"] = {"n00000002": "two"}
    classes = from_config(ForeignJson(config)).classes
    assert classes[2] == ("n00000002", "two") and classes[3] == ("n00000003", "n00000003")
    config["label_names"] = ["too", "few"]
    assert from_config(ForeignJson(config)).classes == ()


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ({"drop_rate": 0.1, "drop_path_rate": 0.1, "patch_drop_rate": 0.5}, {}),
        ({"init_values": 0, "pos_embed": ""}, {"layer_scale": False, "posemb": "none"}),
    ],
)
def test_arguments_that_turn_parts_off(arguments: dict[str, Any], fields: dict[str, Any]) -> None:
    name = "deit3_small_patch16_224"
    expected = dataclasses.replace(architecture_from_args(name, {}), **fields)
    assert architecture_from_args(name, arguments) == expected


def test_gated_mlp_has_a_fixed_activation() -> None:
    giant = "vit_giant_patch14_dinov2"
    with pytest.raises(CheckpointError, match="act_layer is 'gelu', not supported in a gated MLP"):
        architecture_from_args(giant, {"act_layer": "gelu"})
    model = architecture_from_args(giant, {})
    assert isinstance(model, ModelConfig)
    other = dataclasses.replace(model, activation="quick_gelu")
    assert not_in_timm(other) == [] and best_architecture(other) == (giant, {})


@pytest.mark.parametrize("name", ["vit_giant_patch14_dinov2", "vit_small_patch16_dinov3"])
def test_pools_that_timm_computes_differently_are_rejected(name: str) -> None:
    with pytest.raises(CheckpointError, match="global_pool is 'map'"):
        architecture_from_args(name, {"global_pool": "map"})
    gated = model_config("Ti/16", width=48, mlp_dim=96, num_heads=3, swiglu=True, pool="map")
    gated = dataclasses.replace(gated, class_token=False, qkv_bias=False, norm_eps=1e-5)
    assert not_in_timm(gated) == ["an attention pool beside a gated MLP"]


def test_preprocessing_defaults() -> None:
    config = golden_config("timm_vit_default")
    for key in ("mean", "std", "crop_pct", "crop_mode", "interpolation"):
        config["pretrained_cfg"][key] = None
    expected = Preprocess((64, 64), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), crop_pct=0.875)
    assert from_config(ForeignJson(config)).preprocess == expected


def test_warns_about_other_input_size() -> None:
    config = golden_config("timm_vit_default")
    config["pretrained_cfg"]["input_size"] = [3, 96, 80]
    assert from_config(ForeignJson(config)).model.image_size == (64, 64)  # fixed by timm
    config["model_args"]["dynamic_img_size"] = True
    with pytest.warns(VitWarning, match="images of 96x80 pixels, but 64x64 is used"):
        assert from_config(ForeignJson(config)).model.image_size == (64, 64)


def test_reads_old_flat_config() -> None:
    config = golden_config("timm_vit_default")
    flat = {**config["pretrained_cfg"], "architecture": "vit_base_patch32_384"}
    flat["input_size"] = [3, 384, 384]
    info = from_config(ForeignJson(flat))
    assert info.model == model_config("B/32", image_size=(384, 384), num_classes=10)


INVALID = {
    "architecture": "resnet50",
    "model_args": [1],
    "model_args.qk_norm": True,
    "model_args.global_pool": "max",
    "model_args.act_layer": "relu",
    "model_args.num_heads": 5,
    "model_args.depth": 10**9,
    "model_args.mlp_ratio": 1e308,
    "pretrained_cfg.std": [0, 0, 0],
    "pretrained_cfg.input_size": [3, 64, "64"],
    "num_classes": -1,
}


@pytest.mark.parametrize(("key", "value"), INVALID.items())
def test_rejects_invalid_config_values(key: str, value: Any) -> None:
    config = golden_config("timm_vit_default")
    part, _, last = key.rpartition(".")
    (config[part] if part else config)[last] = value
    with pytest.raises(CheckpointError) as caught:
        from_config(ForeignJson(config, "config.json"))
    assert caught.value.where == "config.json"
