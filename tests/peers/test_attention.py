"""Recomputed attention weights are those that transformers returns."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

import vitcli
from peers.random_models import random_images
from vitcli.inspection.attention import watch
from vitcli.models.vit import ViT

pytestmark = pytest.mark.peers

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8}


@pytest.mark.parametrize("kind", ["ViT", "Dinov2WithRegisters", "SiglipVision", "CLIPVision"])
def test_attention_is_that_of_transformers(
    transformers: ModuleType, tmp_path: object, kind: str
) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, attn_implementation="eager")
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0.0, 0.5)
    theirs.save_pretrained(tmp_path)
    ours = vitcli.load(str(tmp_path))
    assert isinstance(ours, ViT)
    images = random_images(0, (32, 32))
    found: dict[int, Tensor] = {}
    with torch.no_grad(), watch(ours, lambda i, layer, _: found.update({i: layer.weights()})):
        ours(images)
        expected = theirs(images, output_attentions=True).attentions
    for index, weights in enumerate(expected):
        assert weights.std() > 0.005  # far from uniform
        torch.testing.assert_close(found[index], weights, rtol=0, atol=1e-5)
