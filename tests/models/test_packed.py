"""The packed encoder computes what the plain one does, and what timm does."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from vitcli.checkpoints.load import load
from vitcli.config import model_config
from vitcli.devices import multiplies_bf16
from vitcli.models import packed
from vitcli.models.packed import pack
from vitcli.models.vit import ViT

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("timm_*/model.safetensors"))
CHOICES = [
    {"activation": "gelu_tanh"},
    {"activation": "quick_gelu", "qkv_bias": False},
    {"layer_scale": True, "swiglu": True},
    {"num_registers": 3, "pool": "gap"},
]


def make(**fields) -> ViT:
    sizes = {"width": 64, "depth": 2, "num_heads": 4, "mlp_dim": 96, "image_size": (32, 32)}
    model = ViT(model_config("Ti/8", num_classes=5, **{**sizes, **fields})).eval()
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2, generator=generator)
    return model


def run(model: ViT, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(images)


@pytest.mark.parametrize("case", CASES)
def test_timms_numbers(case):
    arrays = np.load(GOLDEN / case / "io.npz")
    expected = arrays["logits"] if "logits" in arrays else arrays["pre_logits"]
    model = load(GOLDEN / case)
    pack(model, len(expected))
    with torch.inference_mode():
        found = model(torch.from_numpy(arrays["input"])).numpy()
    np.testing.assert_allclose(found, expected, atol=3e-5)


@pytest.mark.parametrize("fields", CHOICES, ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_every_choice_of_a_block(fields, fused, monkeypatch):
    monkeypatch.setattr(packed, "_fuses", lambda tokens: fused)
    model = make(**fields)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    expected = run(model, images)
    pack(model, batch_size=8)
    torch.testing.assert_close(run(model, images), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(run(model, images[:1]), expected[:1], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not multiplies_bf16(torch.device("cpu")), reason="no bf16 here")
def test_bf16_is_as_close_to_float32_as_without():
    model = make(width=128, mlp_dim=512, depth=4)
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    exact = run(model, images)
    half = copy.deepcopy(model).bfloat16()
    plain = run(half, images.bfloat16()).float()
    pack(half, batch_size=8)
    ours = run(half, images.bfloat16()).float()
    assert (ours - exact).std() <= 1.2 * (plain - exact).std() + 1e-6
    assert ours.dtype == torch.float32 and not torch.equal(ours, exact)
