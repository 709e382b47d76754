"""The encoder as a CPU runs it fastest in bf16: the same function, for inference alone.

Two things cost time there beside the matrix products. A weight is laid out anew at every call, and
bias, GELU and residual are passes over memory of their own: here oneDNN gets weights in the layout
it wants, once, and does all of that while it multiplies. And the fused attention, which is made for
long sequences, takes twice the time of one that is written out. Together a B/16 gains a third.

The operators are those that `torch.compile` puts in when it freezes a model. They have no public
name; the versions of torch that we admit (pyproject.toml) are tested to have them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from vitcli.models.vit import Block, ViT, _activate

LONG = 1024
"""Tokens from which on attention is fused: written out, it takes memory for every pair."""


class _Linear(nn.Module):
    """A dense layer with what follows it: an activation, or the addition of a residual."""

    def __init__(self, linear: nn.Linear, rows: int, activation: str = "none") -> None:
        super().__init__()
        operators: Any = torch.ops.mkldnn
        self.multiply, self.multiply_add = (
            operators._linear_pointwise.default,
            operators._linear_pointwise.binary,
        )
        self.weight = operators._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.activation = {"none": ("none", ""), "gelu": ("gelu", "none")}.get(
            activation, ("gelu", "tanh")
        )

    def forward(self, x: Tensor) -> Tensor:
        name, algorithm = self.activation
        result: Tensor = self.multiply(x, self.weight, self.bias, name, [], algorithm)
        return result

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The layer's output added to `residual`."""
        result: Tensor = self.multiply_add(x, residual, self.weight, self.bias, "add")
        return result


class _Block(nn.Module):
    """A block of the encoder (see `Block`)."""

    def __init__(self, block: Block, rows: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.ls1, self.ls2 = block.norm1, block.norm2, block.ls1, block.ls2
        self.num_heads = block.attn.num_heads
        self.swiglu, self.activation = block.mlp.swiglu, block.mlp.activation
        self.fused = not self.swiglu and self.activation in ("gelu", "gelu_tanh")
        self.qkv, self.proj = _Linear(block.attn.qkv, rows), _Linear(block.attn.proj, rows)
        self.fc1 = _Linear(block.mlp.fc1, rows, self.activation if self.fused else "none")
        self.fc2 = _Linear(block.mlp.fc2, rows)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        x = self._add(x, self.proj, self._attend(self.qkv(self.norm1(x))), self.ls1)
        hidden = self.fc1(self.norm2(x))
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * value
        elif not self.fused:
            hidden = _activate(hidden, self.activation)
        return self._add(x, self.fc2, hidden, self.ls2)

    def _add(self, x: Tensor, layer: _Linear, branch: Tensor, scale: nn.Module) -> Tensor:
        if isinstance(scale, nn.Identity):
            return layer.plus(branch, x)
        scaled: Tensor = scale(layer(branch))
        return x + scaled

    def _attend(self, qkv: Tensor) -> Tensor:  # (B, N, 3 D) -> (B, N, D)
        b, n, _ = qkv.shape
        size = qkv.shape[2] // (3 * self.num_heads)
        qkv = qkv.view(b, n, 3, self.num_heads, size).permute(2, 0, 3, 1, 4)
        if n > LONG:
            x = nn.functional.scaled_dot_product_attention(*qkv)
        else:
            q, k, v = qkv.reshape(3, b * self.num_heads, n, size)
            scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=size**-0.5)
            x = torch.bmm(scores.softmax(dim=-1), v).view(b, self.num_heads, n, size)
        return x.transpose(1, 2).reshape(b, n, self.num_heads * size)


def pack(model: ViT, batch_size: int) -> None:
    """Replaces a bf16 model's blocks by packed ones; its `state_dict` is of no use afterwards.

    Args:
        model: on the CPU, in bf16.
        batch_size: that most calls will have; others work, a little slower.
    """
    rows = batch_size * model.config.num_tokens
    model.blocks = nn.Sequential(*(_Block(cast(Block, block), rows) for block in model.blocks))
