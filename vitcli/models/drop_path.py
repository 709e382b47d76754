"""Stochastic depth."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): leaves a branch out for some samples of a batch."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:  # (B, ...) -> (B, ...)
        if not self.training or self.rate == 0.0:
            return x
        keep = torch.empty((x.shape[0], *(1,) * (x.ndim - 1)), dtype=x.dtype, device=x.device)
        return x * keep.bernoulli_(1.0 - self.rate) / (1.0 - self.rate)
