"""LoRA: low-rank updates (peers/test_training.py compares them with peft)."""

import pytest
import torch

from train.runs import SIZES
from vitcli.config import BiTConfig, model_config
from vitcli.errors import ConfigError
from vitcli.models.lora import add_lora, merge_lora
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.resnets import bit_resnet


def test_updates_start_at_zero_and_change_only_block_matrices() -> None:
    """Also in a model whose pooling has its own MLP."""
    fields = {"pool": "map", "class_token": False, "num_classes": 3}
    model = ViT(model_config("Ti/8", **SIZES, **fields)).double()
    model.init_weights(0)
    torch.nn.init.normal_(model.head.weight)
    before, images = model.state_dict(), torch.randn(2, 3, 16, 16, dtype=torch.double)
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
    after = merge_lora(model.state_dict())
    plain = ViT(model.config).double()
    plain.load_state_dict(after)
    torch.testing.assert_close(plain(images), model(images))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{matrix}.weight" for matrix in matrices}
    assert all(torch.linalg.matrix_rank(after[n] - before[n]) == 4 for n in changed)


def test_updates_depend_on_the_seed_only() -> None:
    states = []
    for seed, torchs in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(torchs)
        model = ViT(model_config("Ti/8", **SIZES))
        add_lora(model, 4, seed)
        states.append(model.state_dict()["blocks.1.mlp.fc2.lora.down.weight"])
    assert torch.equal(states[0], states[1]) and not torch.equal(states[0], states[2])


def test_unsupported_models_and_ranks_are_rejected() -> None:
    with pytest.raises(ConfigError, match="not a BiT ResNet"):
        add_lora(BiT(BiTConfig(bit_resnet((1,), 0.5), (32, 32), num_classes=2)), 4, 0)
    with pytest.raises(ConfigError, match="--lora 24"):
        add_lora(ViT(model_config("Ti/8", **SIZES)), 24, 0)
