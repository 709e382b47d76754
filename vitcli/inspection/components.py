"""Principal components of features and filters, and similarity of position embeddings."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitcli.architectures.posemb import similarity
from vitcli.errors import NOT_FINITE, CheckpointError
from vitcli.inspection.attention import Floats
from vitcli.models.vit import ViT


@torch.no_grad()
def patch_features(model: ViT, images: Tensor) -> Floats:
    """Compute patch features after the last block, (B, rows, columns, D)."""
    tokens = model.encode(images)[:, model.config.num_prefix_tokens :]
    features: Floats = tokens.reshape(len(images), *model.config.grid, -1).float().cpu().numpy()
    return features


def principal_components(rows: npt.NDArray[Any], count: int) -> Floats:
    """Compute the first principal components of rows (n, d): unit vectors (count, d), with signs
    such that the entry with the largest magnitude is positive.

    Raises:
        CheckpointError: a value is not finite.
    """
    centered = np.array(rows, np.float64)
    if not np.isfinite(centered).all():
        raise CheckpointError("some features or weights are not finite", hint=NOT_FINITE)
    centered -= centered.mean(axis=0)
    _, vectors = np.linalg.eigh(centered.T @ centered)
    components = vectors[:, ::-1][:, :count].T
    largest = np.abs(components).argmax(axis=1)
    signs = np.sign(components[np.arange(len(components)), largest])
    result: Floats = (components * signs[:, None]).astype(np.float32)
    return result


def feature_colors(features: Floats) -> Floats:
    """Map features (B, rows, columns, D) to RGB in [0, 1], (B, rows, columns, 3): their first three
    principal components over all images, each scaled between its 1st and 99th percentile (DINOv2,
    arXiv 2304.07193, Figure 1)."""
    rows = features.reshape(-1, features.shape[-1])
    projected = rows @ principal_components(rows, 3).T  # not centered: the scale is relative
    low, high = np.percentile(projected, (1, 99), axis=0)
    colors: Floats = np.clip((projected - low) / np.maximum(high - low, 1e-12), 0, 1)
    return colors.reshape(*features.shape[:-1], 3)


def filter_components(model: ViT, count: int = 28) -> Floats:
    """Compute the first principal components of the input filters (of the patch embedding, or a
    hybrid's first convolution), (n, height, width, 3), each scaled to [0, 1] (Figure 7, left). n is
    less than `count` if a filter has fewer values, or if there are fewer filters."""
    weight = model.patch_embed.proj.weight
    if model.config.stem is not None:
        convolutions = model.patch_embed.backbone.modules()
        weight = next(m for m in convolutions if isinstance(m, nn.Conv2d)).weight
    filters = weight.detach().float().cpu().numpy()
    rows = filters.transpose(0, 2, 3, 1).reshape(len(filters), -1)
    possible = min(len(rows) - 1, rows.shape[1])  # one less than the rows, as they are centered
    components = principal_components(rows, min(count, max(1, possible)))
    low, high = components.min(axis=1, keepdims=True), components.max(axis=1, keepdims=True)
    scaled: Floats = (components - low) / np.maximum(high - low, 1e-12)
    return scaled.reshape(-1, *filters.shape[2:], 3)


def posemb_similarity(model: ViT) -> npt.NDArray[np.float64]:
    """Compute the cosine similarities between the patches' position embeddings (Figure 7, center),
    as tiles, (rows * rows, columns * columns); see `posemb.similarity`.

    Raises:
        ConfigError: the model has no position embeddings.
    """
    state = model.state_dict()
    tables = {name: state[name].cpu().numpy() for name in model.config.posemb_tables}
    return similarity(tables, model.config.grid, model.config.posemb_prefix)
