"""Which tensors a model has, and what a model must be that has these tensors. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vitcli.architectures import STEM
from vitcli.config import Architecture, BiTConfig, ModelConfig, ResNetConfig, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.resnets import bit_resnet

Shapes = Mapping[str, tuple[int, ...]]


def infer_architecture(
    shapes: Shapes, where: object = None, grid: Size | None = None, tokens: str | None = None
) -> tuple[Architecture, list[str]]:
    """The model of any kind that these tensors make; see `infer_model`.

    Raises:
        CheckpointError: they are not those of a model under timm's names.
    """
    resnet = _infer_resnet(shapes, "", where)
    if resnet is None or not resnet.preact:
        return infer_model(shapes, where, grid, tokens)
    classes = shapes["head.fc.weight"][0] if "head.fc.weight" in shapes else 0
    assumed = ["zeros around the root's max-pool", *RESNET_ASSUMED, "images of 224 pixels"]
    return BiTConfig(resnet, num_classes=classes), assumed


RESNET_ASSUMED = ["timm's epsilons of GroupNorm and weight standardisation"]


def _infer_resnet(shapes: Shapes, prefix: str, where: object) -> ResNetConfig | None:
    """The ResNet whose names begin so; None if there is none."""
    pattern = re.compile(re.escape(prefix) + r"stages\.([0-3])\.blocks\.(\d{1,3})\.")
    stages: dict[int, int] = {}
    for name in shapes:
        if match := pattern.match(name):
            stage, block = int(match[1]), int(match[2])
            stages[stage] = max(stages.get(stage, 0), block + 1)
    root = prefix + ("stem." if stages else "")
    width = shapes.get(f"{root}conv.weight", ())[:1]
    if not width:
        return None
    depths = tuple(stages.get(i, 0) for i in range(max(stages, default=-1) + 1))
    preact = f"{root}norm.weight" not in shapes
    try:
        if preact:
            return bit_resnet(depths, width[0] / 64)
        return ResNetConfig(depths, width[0] / 64)
    except ConfigError as error:
        raise CheckpointError(f"its shapes make no model: {error.what}", where=where) from error


HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Attention heads of so400m, H, g and G by their width; others' have 64 channels each."""


def infer_model(
    shapes: Shapes, where: object = None, grid: Size | None = None, tokens: str | None = None
) -> tuple[ModelConfig, list[str]]:
    """The model that these tensors make, and what had to be assumed because no shape says it.

    Args:
        grid: rows and columns of the position embeddings; by default a square.
        tokens: which tokens have one, where that is known; as in ModelConfig.posemb_tokens.

    Raises:
        CheckpointError: they are not the tensors of a ViT under timm's names.
    """

    def size(name: str, axis: int = 0) -> int:
        return shapes[name][axis] if name in shapes else 0

    patch = shapes.get("patch_embed.proj.weight", ())
    blocks = {int(m[1]) for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))}
    needed = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "blocks.0.attn.qkv.weight")
    if len(patch) != 4 or any(len(shapes.get(name, ())) != 2 for name in needed):
        raise CheckpointError(
            "does not hold a Vision Transformer under names that vit knows",
            where=where,
            hint="a config.json beside it, or `vit convert`, may tell what it is",
        )
    width, pooled_by_map = patch[0], "attn_pool.latent" in shapes
    has_class, has_fc_norm = "cls_token" in shapes, "fc_norm.weight" in shapes
    prefix = int(has_class) + int("dist_token" in shapes) + size("reg_token", 1)
    heads = HEADS.get(width, max(width // 64, 1))
    heads = heads if width % heads == 0 else 1
    pre_norm = "norm_pre.weight" in shapes
    assumed = [
        f"{heads} attention heads ({width // heads} channels each)",
        "exact GELU",
        f"LayerNorm epsilon {1e-5 if pre_norm else 1e-6}",
    ]
    stem = _infer_resnet(shapes, STEM, where)
    stride = stem.stride if stem else 1
    patch_size = (patch[2] * stride, patch[3] * stride)
    assumed += RESNET_ASSUMED if stem else []
    fields: dict[str, Any] = _posemb_fields(
        shapes, prefix, patch_size, assumed, where, grid, tokens
    )
    if not pooled_by_map and has_class:
        fields["pool"] = "gap" if has_fc_norm else "token"
        assumed.append("the mean of the patch tokens" if has_fc_norm else "the class token's head")
    else:
        fields["pool"] = "map" if pooled_by_map else "gap"
    if size("head.weight", 1) == 2 * width and "pre_logits.fc.weight" not in shapes:
        fields["pool"] = "token+gap"
    try:
        return ModelConfig(
            width=width,
            depth=max(blocks) + 1,
            num_heads=heads,
            mlp_dim=size("blocks.0.mlp.fc1.weight"),
            patch_size=patch_size,
            stem=stem,
            num_classes=size("head.weight"),
            class_token=has_class,
            distill_token="dist_token" in shapes,
            num_registers=size("reg_token", 1),
            pre_norm=pre_norm,
            final_norm="norm.weight" in shapes,
            fc_norm=has_fc_norm,
            pre_logits=size("pre_logits.fc.weight"),
            layer_scale="blocks.0.ls1.gamma" in shapes,
            qkv_bias="blocks.0.attn.qkv.bias" in shapes,
            patch_bias="patch_embed.proj.bias" in shapes,
            swiglu=size("blocks.0.mlp.fc1.weight") == 2 * size("blocks.0.mlp.fc2.weight", 1),
            norm_eps=1e-5 if pre_norm else 1e-6,
            **fields,
        ), assumed
    except ConfigError as error:
        raise CheckpointError(f"its shapes make no model: {error.what}", where=where) from error


def _posemb_fields(
    shapes: Shapes,
    prefix: int,
    patch: Size,
    assumed: list[str],
    where: object,
    grid: Size | None,
    known: str | None,
) -> dict[str, Any]:
    """Fields of ModelConfig that the position embeddings tell: their kind and the grid."""
    if "pos_embed_row" in shapes and "pos_embed_column" in shapes:
        rows, columns = shapes["pos_embed_row"][1], shapes["pos_embed_column"][1]
        fields: dict[str, Any] = {"posemb": "learn2d", "posemb_tokens": "patches"}
    elif len(shapes.get("pos_embed", ())) == 3:
        tokens, covered = shapes["pos_embed"][1], None
        for covered, name in ((prefix, "all"), (0, "patches"), (1, "class")):  # the likely first
            side = math.isqrt(max(tokens - covered, 0))
            rows, columns = grid or (side, side)
            if known in (None, name) and rows and rows * columns == tokens - covered:
                fields = {"posemb_tokens": name}
                break
        else:
            raise CheckpointError(
                f"{tokens} position embeddings are not a "
                + (f"grid of {grid[0]} x {grid[1]}" if grid else "square grid")
                + f" with {prefix} prefix tokens",
                where=where,
                hint="a config.json beside the file can tell the image size; `vit convert` and "
                "`vit resize-posemb` take --old-grid ROWSxCOLUMNS",
            )
        if grid is None:
            assumed.append(f"a square grid of {rows} x {columns} patches")
    else:
        rows, columns = max(224 // patch[0], 1), max(224 // patch[1], 1)
        fields = {"posemb": "none"}
        assumed.append("no position embeddings, images of about 224 pixels")
    return {**fields, "image_size": (rows * patch[0], columns * patch[1])}


def compare_keys(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Sentences on the tensors that are missing, unexpected or of another shape; empty if none."""
    missing = [f"{name} {_shape(shape)}" for name, shape in expected.items() if name not in found]
    unexpected = [
        f"{name} {_shape(shape)}" for name, shape in found.items() if name not in expected
    ]
    misshapen = [
        f"{name} is {_shape(found[name])}, not {_shape(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
    return [f"{len(items)} {kind}: {_listed(items)}" for kind, items in kinds if items]


def check_keys(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], where: object
) -> None:
    """Raises CheckpointError listing every tensor that is missing, unexpected or misshapen."""
    problems = compare_keys(expected, found)
    if problems:
        raise CheckpointError(
            "its tensors are not those of the model it describes: " + "; ".join(problems),
            where=where,
        )


def _shape(shape: Iterable[int]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"


def _listed(items: list[str], most: int = 20) -> str:
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")
