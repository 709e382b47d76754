"""The encoder as a CPU runs it fastest in bf16: the same function, for inference alone.

- A weight is laid out anew at every call, and bias, GELU and residual are passes over memory of
  their own. Here oneDNN gets weights in the layout it wants, once, and does the rest while it
  multiplies.
- The fused attention is made for long sequences, or for AMX; elsewhere, written out, it takes half
  of its time.
- Of the last block only the class token is read: nothing else is computed there.

The operators are those that `torch.compile` puts in when it freezes a model. They have no public
name: where a torch lacks them, the plain model runs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.models.vit import Block, ViT, _activate

LONG = 512
"""Tokens from which on fused attention is as fast everywhere; it takes no memory for pairs."""


class _Linear(nn.Module):
    """A dense layer with what follows it: an activation, or the addition of a residual."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, rows: int, activation: str = "none"
    ) -> None:
        super().__init__()
        operators: Any = torch.ops.mkldnn
        self.multiply = operators._linear_pointwise.default
        self.multiply_add = operators._linear_pointwise.binary
        self.weight = operators._reorder_linear_weight(weight.detach(), rows)
        self.bias = None if bias is None else bias.detach()
        known = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
        self.activation = known[activation]

    def forward(self, x: Tensor) -> Tensor:
        name, algorithm = self.activation
        result: Tensor = self.multiply(x, self.weight, self.bias, name, [], algorithm)
        return result

    def plus(self, x: Tensor, residual: Tensor) -> Tensor:
        """The layer's output added to `residual`."""
        result: Tensor = self.multiply_add(x, residual, self.weight, self.bias, "add")
        return result


class _Block(nn.Module):
    """A block of the encoder (see `Block`).

    Args:
        rows: of the matrices that most calls multiply, B * N.
        wanted: how many tokens, from the first on, are read of the result; None: all.
    """

    def __init__(self, block: Block, rows: int, wanted: int | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2, self.ls1, self.ls2 = block.norm1, block.norm2, block.ls1, block.ls2
        self.num_heads, self.wanted = block.attn.num_heads, wanted
        self.swiglu, self.activation = block.mlp.swiglu, block.mlp.activation
        fused = not self.swiglu and self.activation in ("gelu", "gelu_tanh")
        self.finish_fc1 = not fused
        qkv, width = block.attn.qkv, block.attn.proj.out_features
        # Queries stand in front; where few are wanted, they are a matrix of their own.
        split = 0 if wanted is None else width
        bias = (None, None) if qkv.bias is None else (qkv.bias[:split], qkv.bias[split:])
        self.q = _Linear(qkv.weight[:split], bias[0], rows) if split else None
        self.kv = _Linear(qkv.weight[split:], bias[1], rows)
        self.proj, self.fc2 = (
            _Linear(layer.weight, layer.bias, rows) for layer in (block.attn.proj, block.mlp.fc2)
        )
        fc1 = block.mlp.fc1
        self.fc1 = _Linear(fc1.weight, fc1.bias, rows, self.activation if fused else "none")

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N or wanted, D)
        y = self.norm1(x)
        if self.q is None:
            q, k, v = self._heads(self.kv(y), 3)
        else:
            k, v = self._heads(self.kv(y), 2)
            x = x[:, : self.wanted].contiguous()
            (q,) = self._heads(self.q(y[:, : self.wanted]), 1)
        x = self._add(x, self.proj, self._attend(q, k, v), self.ls1)
        hidden = self.fc1(self.norm2(x))
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        elif self.finish_fc1:
            hidden = _activate(hidden, self.activation)
        return self._add(x, self.fc2, hidden, self.ls2)

    def _add(self, x: Tensor, layer: _Linear, branch: Tensor, scale: nn.Module) -> Tensor:
        if isinstance(scale, nn.Identity):
            return layer.plus(branch, x)
        scaled: Tensor = scale(layer(branch))
        return x + scaled

    def _heads(self, x: Tensor, parts: int) -> Tensor:  # (B, N, parts D) -> (parts, B, H, N, d)
        b, n, d = x.shape
        x = x.view(b, n, parts, self.num_heads, d // (parts * self.num_heads))
        return x.permute(2, 0, 3, 1, 4)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, N, d) -> (B, N, D)
        b, heads, n, size = q.shape
        if _fuses(k.shape[2]):
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            q, k, v = (part.flatten(0, 1) for part in (q, k, v))
            scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=size**-0.5)
            x = torch.bmm(scores.softmax(dim=-1), v).view(b, heads, n, size)
        return x.transpose(1, 2).reshape(b, n, heads * size)


def _fuses(tokens: int) -> bool:
    return tokens > LONG or bool(torch.cpu._is_amx_tile_supported())


def can_pack() -> bool:
    """Whether this torch has the operators."""
    operators: Any = torch.ops.mkldnn
    names = ("_linear_pointwise", "_reorder_linear_weight")
    return torch.backends.mkldnn.is_available() and all(hasattr(operators, n) for n in names)


def pack(model: ViT, batch_size: int) -> None:
    """Replaces a model's blocks by packed ones. `model(images)` and `model.features(images)` stay
    what they are; `model.encode` and `model.state_dict` are of no use any more.

    Args:
        model: on the CPU, in bf16 (or float32, which gains little).
        batch_size: that most calls will have; others work, a little slower.
    """
    config = model.config
    rows = batch_size * config.num_tokens
    read = 1 + int(config.distill_token) if config.pool == "token" else None
    wanted = [None] * (config.depth - 1) + [read]
    blocks = zip(model.blocks, wanted, strict=True)
    model.blocks = nn.Sequential(
        *(_Block(cast(Block, block), rows, wanted) for block, wanted in blocks)
    )
