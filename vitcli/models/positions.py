"""The positions of tokens in attention: angles of rotary position embeddings, or the offsets for
which BEiT's blocks have biases."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitcli.architectures.vit import num_offsets
from vitcli.config import ModelConfig, Size


class Rope(NamedTuple):
    """The angles by which queries and keys of the last P tokens are rotated."""

    cos: Tensor
    """float32 (P, d), or (B, 1, P, d) where they differ between images."""
    sin: Tensor
    """Likewise."""
    interleaved: bool
    """Whether the pairs of channels that are rotated are adjacent rather than i and i + d/2."""


def build_rope(config: ModelConfig, device: torch.device) -> Rope:
    """Return the angles for a model with rotary position embeddings, whose heads have d channels:
    d/4 frequencies times the row of each patch, then times its column.

    - dinov3: patch centers from -1 to 1; 1 to 1/100 turns (arXiv 2508.10104, section 3.2;
      dinov3/layers/rope_position_encoding.py).
    - eva02: from 0 to 16 for any grid; 1 to 1/10,000 radians (EVA-02/asuka/rope.py).
    """
    step = 4 * config.num_heads / config.width
    exponents = torch.arange(0, 1, step, dtype=torch.float32, device=device)
    indices = [torch.arange(n, dtype=torch.float32, device=device) for n in config.grid]
    is_eva = config.rope == "eva02"
    if is_eva:
        axes = [16 * i / len(i) for i in indices]
    else:
        axes = [2 * math.pi * (2 * (i + 0.5) / len(i) - 1) for i in indices]
    positions = torch.cartesian_prod(*axes)[:, :, None]  # (rows * columns, 2, 1)
    angles = (positions * (10_000.0 if is_eva else 100.0) ** -exponents).flatten(1)
    angles = angles.repeat_interleave(2, dim=1) if is_eva else angles.tile(2)
    return Rope(angles.cos(), angles.sin(), is_eva)


def relative_position_index(grid: Size, device: torch.device) -> Tensor:
    """Return the index into a block's table of biases for each query and key, class token first:
    int64 (N, N) (`RelativePositionBias` of beit/modeling_finetune.py)."""
    rows, columns = grid
    positions = torch.cartesian_prod(*(torch.arange(n, device=device) for n in grid))
    offsets = positions[:, None] - positions + positions.new_tensor([rows - 1, columns - 1])
    index = offsets[..., 0] * (2 * columns - 1) + offsets[..., 1]
    class_to_patch = num_offsets(grid) - 3
    index = F.pad(index, (1, 0, 0, 0), value=class_to_patch + 1)
    index = F.pad(index, (0, 0, 1, 0), value=class_to_patch)
    index[0, 0] = class_to_patch + 2
    return index


Positions = Rope | Tensor
"""The positions of tokens in attention: angles, or `relative_position_index`."""


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate queries or keys (B, heads, N, d), but only those of the last P tokens."""
    num_prefix = x.shape[2] - rope.cos.shape[-2]
    patches = x[:, :, num_prefix:]
    if rope.interleaved:
        first, second = patches.unflatten(-1, (-1, 2)).unbind(-1)
        rotated_half = torch.stack([-second, first], dim=-1).flatten(-2)
    else:
        first, second = patches.chunk(2, dim=-1)
        rotated_half = torch.cat([-second, first], dim=-1)
    rotated = (patches * rope.cos + rotated_half * rope.sin).to(x.dtype)
    return torch.cat([x[:, :, :num_prefix], rotated], dim=2)
