"""Attention maps and attention distances of a Vision Transformer (Figures 6 and 7).

The model keeps its fused attention: `AttentionHook` intercepts its queries and keys, from which the
weights are recomputed. Only one layer of one batch is in memory at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitcli.config import MapMethod
from vitcli.errors import ConfigError
from vitcli.models.vit import ViT

Floats = npt.NDArray[np.float32]


class AttentionInputs(NamedTuple):
    """Inputs of one attention layer, detached: (B, heads, queries or keys, d)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    """(heads, queries, keys), added to the scores."""

    def weights(self) -> Tensor:
        """Attention weights (B, heads, queries, keys), a softmax over keys."""
        scores: Tensor = self.q @ self.k.mT * self.q.shape[-1] ** -0.5
        scores = scores if self.bias is None else scores + self.bias
        return scores.softmax(dim=-1)


class AttentionHook(TorchFunctionMode):
    """Context manager that calls `visit(index, layer, output)` for each attention layer in order
    while the model runs. An attention pool comes last, with index -1. `output` is what torch's
    fused attention returned, (B, heads, queries, d)."""

    def __init__(self, model: ViT, visit: Callable[[int, AttentionInputs, Tensor], None]) -> None:
        super().__init__()
        self.indices, self.visit = iter([*range(model.config.depth), -1]), visit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is nn.functional.scaled_dot_product_attention:
            q, k, v = (tensor.detach() for tensor in args)
            bias = (kwargs or {}).get("attn_mask")
            bias = None if bias is None else bias.detach()
            self.visit(next(self.indices), AttentionInputs(q, k, v, bias), result)
        return result


def check_layer(model: ViT, layer: int | None, head: int | None = None) -> None:
    """Raise ConfigError if the model has no such block or head (both zero-based)."""
    for option, name, value, count in (
        ("--layer", "block", layer, model.config.depth),
        ("--head", "head", head, model.config.num_heads),
    ):
        if value is not None and not 0 <= value < count:
            raise ConfigError(
                f"{option} {value}: the model has no such {name}",
                hint=f"its {name}s are 0 to {count - 1}",
            )


# ---------------------------------------------------------------------------------------------
# Attention maps


def readout(model: ViT) -> Tensor:
    """Weight of each token in the head's input, (N,) with sum 1: the class (and distillation) token
    or the mean of the patches, also if an attention pool computes its own weights."""
    config = model.config
    weights = torch.zeros(config.num_tokens, dtype=torch.float32, device="cpu")
    prefix = config.num_prefix_tokens
    if config.pool != "token":
        weights[prefix:] = 1.0 / (config.num_tokens - prefix)
    if config.pool == "token+gap":
        weights = weights / 2
        weights[0] = 0.5
    elif config.num_head_tokens:
        weights[: config.num_head_tokens] = 1.0 / config.num_head_tokens
    return weights


def attention_maps(
    model: ViT,
    images: Tensor,
    method: MapMethod = "rollout",
    layer: int | None = None,
    head: int | None = None,
    target: Tensor | None = None,
) -> Floats:
    """Compute the contribution of each patch to the head's input, for images (B, 3, H, W).

    Args:
        method: "rollout": heads averaged, identity added, rows renormalized, multiplied through
            the blocks (Abnar & Zuidema, arXiv 2005.00928; the paper's Figure 6). "block": the
            attention of one block. "gradient": each block's attention times its gradient, positive
            part, accumulated through the blocks (Chefer et al., arXiv 2103.15679).
        layer: zero-based index of the last block to include ("rollout", "gradient"), or of the
            block to show ("block"). None for all blocks, or the last one.
        head: index of a single head, for "block"; None for the mean over heads.
        target: (B,) classes whose logits to explain, for "gradient".

    Returns:
        (B, rows, columns) float32.
    """
    if method == "gradient":
        assert target is not None
        return _to_grid(model, _gradient(model, images, target, layer))
    if method == "block":
        maps = head_maps(model, images, layer)
        return maps.mean(axis=1) if head is None else maps[:, head]
    return _to_grid(model, _rollout(model, images, layer))


def _to_grid(model: ViT, tokens: Tensor) -> Floats:
    """Reshape token weights (B, N) or (B, heads, N) to the patch grid, (..., rows, columns)."""
    patches = tokens[..., model.config.num_prefix_tokens :]
    grid: Floats = patches.reshape(*tokens.shape[:-1], *model.config.grid).float().cpu().numpy()
    return grid


@torch.no_grad()
def _rollout(model: ViT, images: Tensor, layer: int | None) -> Tensor:
    last = model.config.depth - 1 if layer is None else layer
    prefix, n = model.config.num_prefix_tokens, model.config.num_tokens
    results: dict[str, Tensor] = {}

    def visit(index: int, layer: AttentionInputs, _: Tensor) -> None:
        if index > last:
            return
        mean = layer.weights().mean(dim=1)
        if index < 0:  # (B, 1, patches): the pool attends only to patches
            results["pool"] = nn.functional.pad(mean[:, 0], (prefix, 0))
        else:
            step = (mean + torch.eye(n, dtype=mean.dtype, device=mean.device)) / 2
            results["tokens"] = step @ results["tokens"] if index else step

    with AttentionHook(model, visit):
        model(images)
    weights = results.get("pool", readout(model).to(images.device).expand(len(images), -1))
    return torch.einsum("bn,bnm->bm", weights, results["tokens"])


def _gradient(model: ViT, images: Tensor, target: Tensor, layer: int | None) -> Tensor:
    """Compute r (I + A_L) ... (I + A_1) from the last layer to the first, as gradients arrive."""
    last = model.config.depth - 1 if layer is None else layer
    prefix = model.config.num_prefix_tokens
    initial = relevance = readout(model).to(images.device).expand(len(images), -1)

    def visit(index: int, attention: AttentionInputs, output: Tensor) -> None:
        def on_gradient(gradient: Tensor) -> None:
            nonlocal relevance
            weighted = attention.weights() * (gradient @ attention.v.mT)
            update = weighted.clamp(min=0).mean(dim=1)
            if index < 0:
                relevance = nn.functional.pad(update[:, 0], (prefix, 0))
            elif index <= last:
                relevance = relevance + torch.einsum("bn,bnm->bm", relevance, update)

        output.register_hook(torch.no_grad()(on_gradient))

    images = images.detach().requires_grad_()
    with torch.enable_grad(), AttentionHook(model, visit):
        model(images).gather(1, target[:, None]).sum().backward()
    model.zero_grad(set_to_none=True)
    # The readout's own weights carry no explanation.
    return relevance if model.config.pool == "map" else relevance - initial


@torch.no_grad()
def head_maps(model: ViT, images: Tensor, layer: int | None = None) -> Floats:
    """Compute each head's attention in one block (default: the attention pool, or else the last
    block), (B, heads, rows, columns): of the class token if it is the head's input, else the mean
    over the patches."""
    pool = layer is None and model.config.pool == "map"
    block = -1 if pool else model.config.depth - 1 if layer is None else layer
    prefix, query_weights = model.config.num_prefix_tokens, readout(model).to(images.device)
    maps: list[Tensor] = []

    def visit(index: int, attention: AttentionInputs, _: Tensor) -> None:
        if index == block and pool:  # (B, heads, 1, patches)
            maps.append(nn.functional.pad(attention.weights()[:, :, 0], (prefix, 0)))
        elif index == block:
            maps.append(torch.einsum("n,bhnm->bhm", query_weights, attention.weights()))

    with AttentionHook(model, visit):
        model(images)
    return _to_grid(model, maps[0])


# ---------------------------------------------------------------------------------------------
# Attention distance


@torch.no_grad()
def attention_distance(model: ViT, images: Tensor) -> npt.NDArray[np.float64]:
    """Compute the mean attention distance of each block and head over images (B, 3, H, W): an array
    (blocks, heads), in pixels (Figure 7, right).

    For an image, a head and a query patch, it is the attention-weighted mean distance from the
    center of the query patch to those of the key patches. Prefix tokens are excluded as queries and
    keys, and the remaining weights of each query are renormalized.
    """
    config, by_block = model.config, list[npt.NDArray[np.float64]]()
    y, x = np.indices(config.grid).reshape(2, -1) * np.array(config.patch_size)[:, None]
    pixels = np.hypot(y[:, None] - y[None], x[:, None] - x[None]).astype(np.float32)
    distances = torch.from_numpy(pixels).to(images.device)

    def visit(index: int, layer: AttentionInputs, _: Tensor) -> None:
        if index >= 0:
            by_block.append(patch_distance(layer.weights(), distances, config.num_prefix_tokens))

    with AttentionHook(model, visit):
        model(images)
    return np.stack(by_block)


def patch_distance(weights: Tensor, pixels: Tensor, num_prefix: int) -> npt.NDArray[np.float64]:
    """Compute the mean distance of each head over the batch, (heads,).

    Args:
        weights: (B, heads, N, N) attention, prefix tokens first.
        pixels: (P, P) distances between patches, in pixels.
        num_prefix: number of prefix tokens.
    """
    patches = weights[..., num_prefix:, num_prefix:]
    weighted = torch.einsum("bhij,ij->bhi", patches, pixels)
    distances = (weighted / patches.sum(dim=-1)).cpu().double()  # MPS has no float64
    mean: npt.NDArray[np.float64] = distances.mean(dim=(0, -1)).numpy()
    return mean
