"""Learning-rate schedules, optimizers, weight decay, moving averages, layer decay, freezing."""

import math
from typing import get_args

import pytest
import torch

from train.runs import SIZES, make_config
from vitcli.architectures.resnet import bit_resnet
from vitcli.config import BiTConfig, model_config
from vitcli.fields import field_types
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train import optim
from vitcli.train.config import TrainConfig
from vitcli.train.optim import (
    Layers,
    build_optimizer,
    build_scaler,
    freeze,
    learning_rate,
    set_training,
)


def make_vit(dropout: float = 0.0, **fields) -> ViT:
    sizes = {**SIZES, "depth": 3}
    model = ViT(model_config("Ti/8", num_classes=3, **sizes, **fields), dropout, drop_path=0.2)
    model.init_weights(0)
    return model


def test_learning_rate_schedules_match_vit_jax():
    run = make_config(lr=0.03, steps=500, warmup=100)
    for step in (1, 50, 100, 101, 300, 499, 500):  # vit_jax counts steps from 0
        p = max(step - 1 - 100, 0) / 400
        expected = 0.03 * 0.5 * (1 + math.cos(math.pi * p)) * min(1, step / 100)
        assert learning_rate(step, run) == pytest.approx(expected, abs=1e-12)
    assert learning_rate(100, run) == 0.03 and learning_rate(500, run) > 0
    assert learning_rate(1, make_config(lr=0.03, steps=1, warmup=0)) == 0.03
    assert learning_rate(31, make_config(lr=1.0, steps=50, warmup=10, schedule="linear")) == 0.5
    assert learning_rate(50, make_config(lr=1.0, steps=50, warmup=0, schedule="constant")) == 1.0


@pytest.mark.parametrize("name", get_args(field_types(TrainConfig)["optimizer"]))
def test_weight_decay_applies_to_matrices_only(name):
    model = make_vit()
    run = make_config(optimizer=name, lr=0.1, weight_decay=0.5, steps=1)
    groups = build_optimizer(model, run).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    inner = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    blocks = {f"blocks.{i}.{part}.weight" for i in range(3) for part in inner}
    assert names == {"patch_embed.proj.weight", "head.weight", *blocks}
    everything = {id(p) for group in groups for p in group["params"]}
    assert everything == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("lr", [1e-3, 4e-3])
@pytest.mark.parametrize("decay_by", ["lr", "schedule"])
def test_adamw_weight_decay_scaling(lr, decay_by):
    """big_vision: w -= schedule(t) * decay * w, independent of the peak rate."""
    model = make_vit()
    before = model.blocks[0].mlp.fc1.weight.detach().clone()
    fields = {"lr": lr, "weight_decay": 0.25, "decay_by": decay_by, "steps": 10, "warmup": 4}
    run = make_config(optimizer="adamw", **fields)
    optimizer = build_optimizer(model, run)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(1, run)
    optimizer.step()
    rate = 1 / 4 if decay_by == "schedule" else lr / 4
    assert torch.allclose(model.blocks[0].mlp.fc1.weight, before * (1 - 0.25 * rate))


def test_momentum_and_betas_are_passed_to_optimizer():
    sgd = build_optimizer(make_vit(), make_config(lr=0.1, momentum=0.5))
    adam = build_optimizer(make_vit(), make_config(optimizer="adam", lr=0.1, betas=(0.8, 0.99)))
    assert sgd.defaults["momentum"] == 0.5 and adam.defaults["betas"] == (0.8, 0.99)


def test_vit_layers_match_beit():
    layers = Layers(make_vit(pool="gap", final_norm=False, fc_norm=True))
    stem = ("cls_token", "pos_embed", "patch_embed.proj.weight")
    assert [layers(name) for name in stem] == [0, 0, 0]
    assert [layers(f"blocks.{i}.mlp.fc1.bias") for i in range(3)] == [1, 2, 3]
    assert layers("fc_norm.weight") == layers("head.bias") == 4
    rates = ("head.bias", "blocks.2.norm1.weight", "pos_embed")
    assert [layers.scale(name, 0.75) for name in rates] == [1.0, 0.75, 0.75**4]


def test_resnet_layers_are_bottlenecks():
    layers = Layers(BiT(BiTConfig(bit_resnet((2, 1), 0.5), (32, 32), num_classes=2)))
    names = ("stem.conv.weight", "stages.0.blocks.0.conv1.weight", "stages.0.blocks.1.norm1.bias")
    assert [layers(name) for name in names] == [0, 1, 2]
    assert layers("stages.1.blocks.0.downsample.conv.weight") == layers("norm.weight") == 3
    assert layers("head.fc.weight") == layers("drop") == 4


@pytest.mark.parametrize(
    ("what", "trained"),
    [
        ("backbone", {"head"}),
        (3, {"norm", "head"}),
        (1, {"blocks.1", "blocks.2", "norm", "head"}),
        (0, {"blocks.0", "blocks.1", "blocks.2", "norm", "head"}),
    ],
)
def test_frozen_layers_have_no_gradient_or_dropout(what, trained):
    model = make_vit(dropout=0.5)
    freeze(model, what)
    set_training(model, what)
    model(torch.rand(2, 3, 16, 16)).sum().backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None}
    assert {".".join(n.split(".")[: 2 if n.startswith("blocks") else 1]) for n in moved} == trained
    noisy = {n for n, m in model.named_modules() if "drop" in n and m.training}
    assert {".".join(n.split(".")[:2]) for n in noisy} == {
        name for name in trained if name.startswith("blocks")
    }


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_step_that_overflows_is_skipped_on_mps(monkeypatch, name):
    fused = getattr(torch, f"_fused_{name}_")
    ignore = {"grad_scale": None, "found_inf": None}  # as the kernels of MPS do
    monkeypatch.setattr(torch, f"_fused_{name}_", lambda *args, **kw: fused(*args, **kw | ignore))
    model = torch.nn.Linear(3, 2)
    before = model.weight.detach().clone()
    optimizer = build_optimizer(model, make_config(optimizer=name, lr=0.1))
    scaler = build_scaler(optimizer, torch.device("mps"), torch.float16)
    for factor in (math.inf, 1.0):
        scaler.scale(factor * model(torch.ones(1, 3)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(model.weight, before) == (factor == math.inf)


@pytest.mark.parametrize("has_bf16", [True, False])
def test_muon_uses_bf16_only_if_supported(monkeypatch, has_bf16):
    monkeypatch.setattr(optim, "multiplies_bf16", lambda device: has_bf16)
    weight = torch.nn.Parameter(torch.zeros(48, 32))
    weight.grad = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    group = {"params": [weight], "muon": True, "weight_decay": 0.0}
    optim.MuonAdamW([group], lr=1.0, betas=(0.9, 0.999)).step()
    exact = weight.grad.double() / weight.grad.double().norm()
    for _ in range(5):  # the quintic of https://kellerjordan.github.io/posts/muon/
        gram = exact @ exact.T
        exact = 3.4445 * exact + (-4.775 * gram + 2.0315 * gram @ gram) @ exact
    error = (weight / (-0.2 * 48**0.5) - exact).abs().max()
    assert (1e-3 < error < 1e-1) if has_bf16 else error < 1e-5
