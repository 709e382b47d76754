"""The accelerated encoder matches the plain one and timm."""

import copy
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from checkpoints.golden_cases import GOLDEN, TIMM_CASES, images_and_logits
from vitcli.checkpoints.load import load
from vitcli.config import ModelConfig, model_config
from vitcli.devices import multiplies_bf16
from vitcli.models import cpu
from vitcli.models.vit import ViT

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def make(**fields) -> ViT:
    sizes = {"width": 64, "depth": 2, "num_heads": 4, "mlp_dim": 96, "image_size": (32, 32)}
    model = ViT(model_config("Ti/8", num_classes=5, **{**sizes, **fields})).eval()
    generator = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.normal_(tensor, std=0.2, generator=generator)
    return model


def run(model: ViT, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(images)


@pytest.mark.parametrize("case", TIMM_CASES)
def test_logits_match_timm(case):
    images, expected = images_and_logits(case)
    model = load(GOLDEN / case)
    assert cpu.accelerate(model, len(expected))
    found = run(model, torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(found, expected, atol=3e-5)


def option_values() -> list[dict[str, Any]]:
    """Each value of each bool or Literal field of ModelConfig, so that new ones are tested."""
    found = []
    for name, kind in get_type_hints(ModelConfig).items():
        values = (True, False) if kind is bool else get_args(kind)
        found += [{name: value} for value in values if isinstance(value, bool | str)]
    return found


@pytest.mark.parametrize("fields", option_values(), ids=str)
def test_every_option_matches_the_plain_model(fields, monkeypatch):
    pool = "token" if fields.get("distill_token") else "gap"
    plain = make(**{"pool": pool, "posemb_tokens": "patches", **fields})
    expected = run(plain, IMAGES)
    for amx in (True, False):  # selects the attention
        monkeypatch.setattr(cpu, "get_capabilities", lambda amx=amx: {"amx_tile": amx})
        model = copy.deepcopy(plain)
        cpu.accelerate(model, batch_size=3)
        torch.testing.assert_close(run(model, IMAGES), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not multiplies_bf16(torch.device("cpu")), reason="this CPU multiplies no bf16")
def test_bf16_is_as_accurate_as_the_plain_model():
    model = make(width=128, mlp_dim=512, depth=4)
    exact = run(model, IMAGES)
    half = copy.deepcopy(model).bfloat16()
    plain = run(half, IMAGES.bfloat16()).float()
    assert cpu.accelerate(half, batch_size=8)
    ours = run(half, IMAGES.bfloat16()).float()
    assert (ours - exact).std() <= 1.2 * (plain - exact).std() + 1e-6
    assert not torch.equal(ours, exact)


def assert_not_accelerated(model: ViT) -> None:
    """Check that the plain model runs, unchanged."""
    blocks, expected = model.blocks, run(model, IMAGES)
    assert not cpu.accelerate(model, 8)
    assert model.blocks is blocks and torch.equal(run(model, IMAGES), expected)


def broken(*arguments):
    raise RuntimeError("no kernel for this processor")


def wrong(x, *arguments):
    return x


@pytest.mark.parametrize("linear", [None, broken, wrong], ids=["missing", "broken", "wrong"])
def test_falls_back_if_operators_are_missing_or_broken(linear, monkeypatch):
    operators = SimpleNamespace(_reorder_linear_weight=lambda weight, rows: weight)
    if linear is not None:
        operators._linear_pointwise = SimpleNamespace(default=linear, binary=linear)
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert_not_accelerated(make())


def test_falls_back_for_unsupported_blocks():
    model = make()  # an attention bias, a query norm, another layer type
    model.blocks[1].attn.register_buffer("bias", torch.zeros(4, 17, 17))
    assert_not_accelerated(model)
    model = make()
    model.blocks[0].attn.q_norm = torch.nn.LayerNorm(16)
    assert_not_accelerated(model)
    model = make()
    model.blocks[0].mlp.drop1 = torch.nn.Tanh()
    assert_not_accelerated(model)
