"""Learning rates and optimizers against the authors' formula."""

import math

import pytest
import torch

from vitcli.config import DataConfig, model_config
from vitcli.models.vit import ViT
from vitcli.train.optim import build_optimizer, learning_rate
from vitcli.train_config import TrainConfig


def config(**fields):
    return TrainConfig(data=DataConfig("x"), output="y", **fields)


def test_cosine_after_a_linear_warm_up():
    run = config(lr=0.03, steps=500, warmup=100)
    for step in (1, 50, 100, 101, 300, 499, 500):  # vit_jax counts steps from 0
        p = max(step - 1 - 100, 0) / 400
        expected = 0.03 * 0.5 * (1 + math.cos(math.pi * p)) * min(1, step / 100)
        assert learning_rate(step, run) == pytest.approx(expected, abs=1e-12)
    assert learning_rate(100, run) == 0.03
    assert learning_rate(500, run) > 0  # every step trains
    assert learning_rate(1, config(lr=0.03, steps=1, warmup=0)) == 0.03


def test_linear_and_constant():
    assert learning_rate(31, config(lr=1.0, steps=50, warmup=10, schedule="linear")) == 0.5
    assert learning_rate(50, config(lr=1.0, steps=50, warmup=0, schedule="constant")) == 1.0


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_decay_acts_on_matrices_alone(name):
    model = ViT(model_config("Ti/16", width=24, depth=1, num_heads=2, mlp_dim=32, num_classes=3))
    model.init_weights(0)
    run = config(optimizer=name, lr=0.1, weight_decay=0.5, steps=1)
    optimizer = build_optimizer(model, run)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert names == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.attn.proj.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
    }
    everything = {id(p) for g in optimizer.param_groups for p in g["params"]}
    assert everything == {id(p) for p in model.parameters()}


def test_adamw_decays_by_lr_times_decay_times_weight():
    model = ViT(model_config("Ti/16", width=24, depth=1, num_heads=2, mlp_dim=32, num_classes=3))
    model.init_weights(0)
    before = model.blocks[0].mlp.fc1.weight.detach().clone()
    optimizer = build_optimizer(model, config(optimizer="adamw", lr=0.1, weight_decay=0.5, steps=1))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(model.blocks[0].mlp.fc1.weight, before * (1 - 0.1 * 0.5))
