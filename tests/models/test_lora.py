"""LoRA: low-rank updates (peers/test_training.py compares them with peft)."""

import pytest
import torch

from train.runs import SIZES
from vitcli.architectures.resnet import bit_resnet
from vitcli.config import BiTConfig, model_config
from vitcli.errors import ConfigError
from vitcli.models.lora import add_lora, merge_lora
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT


def test_updates_start_at_zero_and_change_only_block_matrices() -> None:
    """Also in a model whose pooling has its own MLP."""
    fields = {"pool": "map", "class_token": False, "num_classes": 3}
    model = ViT(model_config("Ti/8", **SIZES, **fields)).double()
    model.init_weights(0)
    torch.nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 16, 16, dtype=torch.double)
    expected = model(images)
    add_lora(model, 4, seed=0)
    model.double()
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-12)
    model(images).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    matrices = [f"blocks.{i}.{m}" for i in (0, 1) for m in ("attn.qkv", "attn.proj", "mlp.fc1")]
    matrices += [f"blocks.{i}.mlp.fc2" for i in (0, 1)]
    updates = {f"{m}.lora.{part}.weight" for m in matrices for part in ("down", "up")}
    assert trained == updates | {"head.weight", "head.bias"}
    for name in updates:
        torch.nn.init.normal_(model.get_parameter(name), std=0.1)
    plain = ViT(model.config).double()
    plain.load_state_dict(merge_lora(model.state_dict()))
    torch.testing.assert_close(plain(images), model(images))


def test_unsupported_models_and_ranks_are_rejected() -> None:
    with pytest.raises(ConfigError, match="not a BiT ResNet"):
        add_lora(BiT(BiTConfig(bit_resnet((1,), 0.5), (32, 32), num_classes=2)), 4, 0)
    with pytest.raises(ConfigError, match="--lora 24"):
        add_lora(ViT(model_config("Ti/8", **SIZES)), 24, 0)
