"""Blocks that are compiled and checkpointed."""

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from vitcli.config import ModelConfig
from vitcli.models.vit import ViT
from vitcli.train.parallel import blocks, prepare_blocks


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_block_is_compiled(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those with drop rates of their own, of which there are more than Dynamo's limit."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    model = ViT(ModelConfig(32, 12, 2, 64, (8, 8), (16, 16), num_classes=3), drop_path=0.1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        prepare_blocks(model, checkpointing, compiled=True)
        model.train()(torch.zeros(2, 3, 16, 16)).sum().backward()
    assert counter.frame_count == len(blocks(model)) == 12
