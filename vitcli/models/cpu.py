"""A faster encoder for CPUs: the same function as in `vit.py`, for inference only.

- `nn.Linear` reorders its weights on every call, and bias, GELU and residual are separate passes
  over memory. Here each weight is reordered once, to the layout that oneDNN prefers, and the rest
  is fused into the matrix multiplication.
- Fused attention is designed for long sequences, or for AMX; otherwise, unfused attention takes
  half the time.
- The last block computes only the tokens that the head reads.

The operators are those that `torch.compile` inserts when it freezes a model. They are private to
torch and used only in this module and in `linear.py`. If they are missing or fail, or if a block
contains anything that is not implemented here, `accelerate` leaves the model unchanged.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.cpu import get_capabilities

from vitcli.models.linear import Linear, QueryKeyValue
from vitcli.models.positions import Positions, Rope, apply_rope
from vitcli.models.resnet import DropPath
from vitcli.models.vit import Attention, Block, LayerScale, Mlp, RMSNorm, ViT, activate

MAX_UNFUSED_TOKENS = 512
"""Number of tokens above which fused attention, without O(N^2) memory, is as fast on every CPU."""
FUSED = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}
"""Activations that oneDNN fuses into the multiplication, by its names."""
MODULES = {Block, Attention, Mlp, LayerScale, DropPath}
MODULES |= {nn.LayerNorm, RMSNorm, Linear, QueryKeyValue, nn.Dropout, nn.Identity}
TENSORS = {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1.gamma", "ls2.gamma"}
TENSORS |= {"attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias"}
TENSORS |= {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"}
"""The modules and tensors that a block may contain to be accelerated."""


def accelerate(model: ViT, batch_size: int) -> bool:
    """Replace a model's blocks with faster ones if possible. `model(images)` and
    `model.features(images)` compute the same as before; `encode` and `state_dict` do not.

    Args:
        model: on the CPU; bf16 gains much, float32 little.
        batch_size: that of most calls; others work, but a little slower.

    Returns:
        Whether the blocks were replaced.
    """
    config, blocks = model.config, [cast(Block, block) for block in model.blocks]
    if not all(map(_is_implemented, blocks)) or not _operators_work(model.patch_embed.proj.weight):
        return False
    rows = batch_size * config.num_tokens
    last = _Block(blocks[-1], rows, config.num_head_tokens)
    model.blocks = nn.Sequential(*(_Block(block, rows) for block in blocks[:-1]), last)
    return True


def _is_implemented(block: Block) -> bool:
    tensors = {name for name, _ in (*block.named_parameters(), *block.named_buffers())}
    return tensors <= TENSORS and all(type(module) in MODULES for module in block.modules())


def _operators_work(like: Tensor) -> bool:
    """Whether the operators work in the dtype of a tensor."""
    x = like.new_ones(1, 4, 16)
    try:
        layer = _Linear(torch.eye(16, dtype=like.dtype), None, 4, "gelu")
        return torch.allclose(layer(x), F.gelu(x), rtol=0.02) and torch.equal(layer(x, x), x + x)
    except (AttributeError, RuntimeError, TypeError):
        return False


class _Linear(nn.Module):
    """A linear layer fused with an activation, or with the addition of a residual."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, rows: int, activation: str = "none"
    ) -> None:
        super().__init__()
        operators: Any = torch.ops.mkldnn
        self.multiply = operators._linear_pointwise.default
        self.multiply_add = operators._linear_pointwise.binary
        self.weight = operators._reorder_linear_weight(weight.detach(), rows)
        self.bias = None if bias is None else bias.detach()
        self.activation, self.algorithm = FUSED[activation]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self.multiply_add(x, residual, self.weight, self.bias, "add")
        return self.multiply(x, self.weight, self.bias, self.activation, [], self.algorithm)


class _Block(nn.Module):
    """A block of the encoder (`vit.Block`).

    Args:
        rows: rows of the input matrix in most calls, B * N.
        num_outputs: number of leading tokens of the output to compute; None: all.
    """

    def __init__(self, block: Block, rows: int, num_outputs: int | None = None) -> None:
        super().__init__()
        attn, mlp = block.attn, block.mlp
        self.norm1, self.norm2, self.ls1, self.ls2 = block.norm1, block.norm2, block.ls1, block.ls2
        self.num_heads, self.num_outputs = attn.num_heads, num_outputs
        self.swiglu, self.activation = mlp.swiglu, mlp.activation
        self.fuses_activation = not mlp.swiglu and mlp.activation in FUSED
        # Queries come first in qkv; if only a few are needed, they get their own matrix.
        split = 0 if num_outputs is None else attn.proj.out_features
        weight, bias = attn.qkv.weight, attn.qkv.effective_bias()
        q_bias, kv_bias = (None, None) if bias is None else (bias[:split], bias[split:])
        self.q = _Linear(weight[:split], q_bias, rows) if split else None
        self.kv = _Linear(weight[split:], kv_bias, rows)
        self.proj = _Linear(attn.proj.weight, attn.proj.bias, rows)
        activation = mlp.activation if self.fuses_activation else "none"
        self.fc1 = _Linear(mlp.fc1.weight, mlp.fc1.bias, rows, activation)
        self.fc2 = _Linear(mlp.fc2.weight, mlp.fc2.bias, rows)

    def forward(
        self, x: Tensor, num_outputs: int | None, positions: Positions | None, factors: None = None
    ) -> Tensor:
        """(B, N, D) -> (B, N or num_outputs, D), in evaluation mode, without dropout."""
        y = self.norm1(x)
        rope = positions if isinstance(positions, Rope) else None  # others are not supported here
        if self.q is None:
            q, k, v = self._to_heads(self.kv(y), 3)
            q = q if rope is None else apply_rope(q, rope)
        else:
            k, v = self._to_heads(self.kv(y), 2)
            x = x[:, : self.num_outputs].contiguous()
            (q,) = self._to_heads(self.q(y[:, : self.num_outputs]), 1)  # not rotated: no patches
        k = k if rope is None else apply_rope(k, rope)
        x = _add_residual(x, self.proj, self._attend(q, k, v), self.ls1)
        hidden = self.fc1(self.norm2(x))
        if self.swiglu:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        elif not self.fuses_activation:
            hidden = activate(hidden, self.activation)
        return _add_residual(x, self.fc2, hidden, self.ls2)

    def _to_heads(self, x: Tensor, count: int) -> Tensor:  # (B, N, count D) -> (count, B, H, N, d)
        b, n, d = x.shape
        x = x.view(b, n, count, self.num_heads, d // (count * self.num_heads))
        return x.permute(2, 0, 3, 1, 4)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, N, d) -> (B, N, D)
        b, heads, n, head_dim = q.shape
        if k.shape[2] > MAX_UNFUSED_TOKENS or get_capabilities().get("amx_tile"):
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=head_dim**-0.5)
            x = torch.bmm(scores.softmax(dim=-1), v).view(b, heads, n, head_dim)
        return x.transpose(1, 2).reshape(b, n, heads * head_dim)


def _add_residual(x: Tensor, layer: _Linear, branch: Tensor, scale: nn.Module) -> Tensor:
    """Return x + scale(layer(branch)), in one operation if there is no scale."""
    return layer(branch, x) if isinstance(scale, nn.Identity) else x + scale(layer(branch))
