"""Compilation and activation checkpointing of blocks."""

import copy
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from vitcli.architectures.resnet import bit_resnet
from vitcli.config import BiTConfig, ModelConfig
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.parallel import prepare_blocks

VIT = ModelConfig(32, 4, 2, 64, (8, 8), (16, 16), num_classes=3)
BIT = BiTConfig(bit_resnet((2, 2), 0.5), (32, 32), num_classes=3)


@pytest.mark.parametrize(
    ("model", "times", "checkpointing"),
    [(ViT(VIT, drop_path=0.1), 3, True), (BiT(BIT, drop_path=0.1), 4, False)],
)
def test_every_block_is_compiled(
    model: ViT | BiT, times: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a ViT share a graph, except the first, which drops no branch, and the last,
    where only one token is read. A ResNet has a graph per block, more than Dynamo's limit."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=3):
        prepare_blocks(model, checkpointing, compiled=True)
        model.train()(torch.zeros(2, 3, *model.config.image_size)).sum().backward()
    assert counter.frame_count == times
