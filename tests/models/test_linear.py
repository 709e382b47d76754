"""bf16 linear layers on a CPU match `nn.Linear`."""

import pytest
import torch
from torch import nn

from vitcli.models import linear
from vitcli.models.linear import Linear


def output_and_gradients(layer: nn.Linear, x: torch.Tensor) -> list[torch.Tensor | None]:
    """The output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    (y.float() ** 2).sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def layer_pair(**frozen: bool) -> tuple[Linear, nn.Linear]:
    torch.manual_seed(0)
    ours, theirs = Linear(48, 80), nn.Linear(48, 80)
    theirs.load_state_dict(ours.state_dict())
    for name, value in frozen.items():
        for layer in (ours, theirs):
            getattr(layer, name).requires_grad_(value)
    return ours, theirs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 65, 48), (7, 48)])
@pytest.mark.parametrize("frozen", [{}, {"weight": False}, {"bias": False}], ids=str)
def test_output_and_gradients_match_torch(dtype, shape, frozen):
    ours, theirs = layer_pair(**frozen)
    x = torch.randn(shape).to(dtype)
    for found, expected in zip(
        output_and_gradients(ours, x), output_and_gradients(theirs, x), strict=True
    ):
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.dtype is expected.dtype
            # products may be summed in another order, in bf16 with 8 bits of precision
            assert torch.allclose(found.float(), expected.float(), rtol=0.01, atol=0.01)


def test_falls_back_without_the_operator(monkeypatch):
    assert linear._operator_works() or torch.backends.cpu.get_cpu_capability() in (
        "DEFAULT",
        "AVX2",
    )
    monkeypatch.setattr(linear, "_operator_works", lambda: False)
    ours, theirs = layer_pair()
    x = torch.randn(2, 5, 48)
    for found, expected in zip(
        output_and_gradients(ours, x), output_and_gradients(theirs, x), strict=True
    ):
        assert torch.equal(found, expected)
