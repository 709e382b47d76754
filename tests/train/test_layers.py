"""What is frozen, and how fast each layer learns."""

from __future__ import annotations

import pytest
import torch

from vitcli.config import BiTConfig, DataConfig, model_config
from vitcli.errors import ConfigError
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.resnets import bit_resnet
from vitcli.train.optim import Layers, build_optimizer, freeze, set_training
from vitcli.train_config import TrainConfig

SIZES = {"width": 24, "depth": 3, "num_heads": 2, "mlp_dim": 32, "image_size": (16, 16)}


def vit(dropout: float = 0.0, **fields) -> ViT:
    model = ViT(model_config("Ti/8", num_classes=3, **SIZES, **fields), dropout, drop_path=0.2)
    model.init_weights(0)
    return model


def test_the_layers_of_a_vit_are_beits():
    layers = Layers(vit(pool="gap", final_norm=False, fc_norm=True))
    stem = ("cls_token", "pos_embed", "patch_embed.proj.weight")
    assert [layers(name) for name in stem] == [0, 0, 0]
    assert [layers(f"blocks.{i}.mlp.fc1.bias") for i in range(3)] == [1, 2, 3]
    assert layers("fc_norm.weight") == layers("head.bias") == 4
    assert layers.scale("head.bias", 0.75) == 1.0
    assert layers.scale("blocks.2.norm1.weight", 0.75) == 0.75
    assert layers.scale("pos_embed", 0.75) == 0.75**4


def test_a_resnets_bottlenecks_are_its_layers():
    layers = Layers(BiT(BiTConfig(bit_resnet((2, 1), 0.5), (32, 32), num_classes=2)))
    names = ("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.1.norm1.bias")
    assert [layers(name) for name in names] == [0, 1, 2]
    assert layers("stages.1.blocks.0.downsample.conv.weight") == layers("norm.weight") == 3
    assert layers("head.fc.weight") == layers("drop") == 4


def test_the_optimizer_scales_rates_and_decays_as_before():
    model = vit()
    run = TrainConfig(DataConfig("x"), "y", optimizer="adamw", lr=0.1, weight_decay=0.5)
    plain = build_optimizer(model, run)
    assert len(plain.param_groups) == 2 and {g["lr_scale"] for g in plain.param_groups} == {1.0}
    scaled = build_optimizer(model, TrainConfig(**{**vars(run), "layer_decay": 0.5}))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: g for g in scaled.param_groups for p in g["params"]}
    assert len(found) == len(names)
    assert found["blocks.0.mlp.fc1.weight"]["lr_scale"] == 0.5**3
    for group in plain.param_groups:
        for p in group["params"]:
            assert found[names[id(p)]]["weight_decay"] == group["weight_decay"]


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("backbone", {"head"}),
        (3, {"norm", "head"}),
        (1, {"blocks.1", "blocks.2", "norm", "head"}),
        (0, {"blocks.0", "blocks.1", "blocks.2", "norm", "head"}),
    ],
)
def test_what_is_frozen_has_no_gradient_and_no_dropout(what, trained):
    model = vit(dropout=0.5)
    freeze(model, what)
    set_training(model, what)
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {".".join(n.split(".")[: 2 if n.startswith("blocks") else 1]) for n in moved} == trained
    noisy = {n for n, m in model.named_modules() if "drop" in n and m.training}
    assert {n.split(".attn")[0].split(".mlp")[0].removesuffix(".drop_path") for n in noisy} == {
        name for name in trained if name.startswith("blocks")
    }
    assert not model.pos_drop.training


def test_frozen_blocks_are_not_differentiated():
    model = vit()
    freeze(model, 2)
    kept = []
    model.blocks[1].register_forward_hook(lambda m, args, out: kept.append(out.requires_grad))
    model.blocks[2].register_forward_hook(lambda m, args, out: kept.append(out.requires_grad))
    model(torch.rand(2, 3, 16, 16))
    assert kept == [False, True]


def test_more_blocks_than_there_are():
    with pytest.raises(ConfigError, match="cannot freeze 4 blocks: the model has 3"):
        freeze(vit(), 4)
