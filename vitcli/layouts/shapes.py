"""Inferring a model from the shapes of its tensors under timm's names, and what that assumes."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitcli.architectures.resnet import Shape, bit_resnet
from vitcli.architectures.vit import RELATIVE, STEM, num_offsets
from vitcli.config import Architecture, BiTConfig, ModelConfig, Preprocess, ResNetConfig, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.words import format_setting, pluralize

Shapes = Mapping[str, Shape]

HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Number of heads of so400m, H, g and G, by width; others have 64 channels per head."""


def infer_architecture(
    shapes: Shapes, grid: Size | None = None, posemb_tokens: tuple[str, ...] = ()
) -> tuple[Architecture, set[str]]:
    """Infer a model from tensor shapes; return it with the facts that shapes do not show and that
    are assumed: `ModelConfig` fields, "grid", "resnet" (its epsilons and padding).

    Args:
        grid: rows and columns of the position embeddings; default: a square.
        posemb_tokens: which tokens may have a position embedding, most likely first.

    Raises:
        ConfigError: they are not the shapes of a model under timm's names.
    """
    resnet = _infer_resnet(shapes, "")
    if resnet is not None and resnet.preact:
        classes = shapes.get("head.fc.weight", (0,))[0]
        return BiTConfig(resnet, num_classes=classes), {"resnet", "image_size"}
    return _infer_vit(shapes, grid, posemb_tokens)


def _infer_resnet(shapes: Shapes, prefix: str) -> ResNetConfig | None:
    """Infer the ResNet under a prefix; None if there is none."""
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
    factory = ResNetConfig if f"{root}norm.weight" in shapes else bit_resnet
    return factory(depths, width[0] / 64)


def _infer_vit(
    shapes: Shapes, grid: Size | None, posemb_tokens: tuple[str, ...]
) -> tuple[ModelConfig, set[str]]:
    # What any block has, all have: if block 0 lacks a tensor, it is missing, not an option off.
    shapes = {re.sub(r"^blocks\.\d+\.", "blocks.0.", n): s for n, s in shapes.items()} | {**shapes}

    def size(name: str, axis: int = 0) -> int:
        return shapes[name][axis] if len(shapes.get(name, ())) > axis else 0

    def has_norm(name: str) -> bool:
        return f"{name}.weight" in shapes or f"{name}.bias" in shapes

    patch = shapes.get("patch_embed.proj.weight", ())
    blocks = {int(m[1]) for name in shapes if (m := re.match(r"blocks\.(\d+)\.", name))}
    required = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight", "blocks.0.attn.qkv.weight")
    if len(patch) != 4 or min(patch) < 1 or any(len(shapes.get(n, ())) != 2 for n in required):
        raise ConfigError(
            "not a Vision Transformer in a supported layout",
            hint="put its config.json next to the file",
        )
    width, assumed = patch[0], {"num_heads", "activation", "norm_eps"}
    has_class, has_fc_norm = "cls_token" in shapes, has_norm("fc_norm")
    heads = HEADS.get(width, max(width // 64, 1))
    if width == 1536 and "attn_pool.latent" in shapes:  # SigLIP 2's giant-opt; DINOv2-g has 24
        heads = 16
    stem = _infer_resnet(shapes, STEM)
    if stem:
        assumed.add("resnet")
    stride = stem.stride if stem else 1
    fields: dict[str, Any] = {
        "width": width,
        "depth": max(blocks) + 1,
        "num_heads": heads if width % heads == 0 else 1,
        "mlp_dim": size("blocks.0.mlp.fc1.weight"),
        "patch_size": (patch[2] * stride, patch[3] * stride),
        "num_classes": size("head.weight"),
        "class_token": has_class,
        "distill_token": "dist_token" in shapes,
        "num_registers": size("reg_token", 1),
        "pre_norm": has_norm("norm_pre"),
        "final_norm": has_norm("norm"),
        "fc_norm": has_fc_norm,
        "pre_logits": size("pre_logits.fc.weight"),
        "layer_scale": "blocks.0.ls1.gamma" in shapes,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "patch_bias": "patch_embed.proj.bias" in shapes,
        "swiglu": size("blocks.0.mlp.fc1.weight") == 2 * size("blocks.0.mlp.fc2.weight", 1),
        "norm_eps": 1e-5 if has_norm("norm_pre") else 1e-6,
        "stem": stem,
    }
    if "attn_pool.latent" in shapes:
        fields["pool"] = "map"
    elif size("head.weight", 1) == 2 * width and not fields["pre_logits"]:
        fields["pool"] = "token+gap"
    else:
        fields["pool"] = "token" if has_class and not has_fc_norm else "gap"
        assumed |= {"pool"} if has_class else set()
    posemb, (rows, columns) = _infer_posemb(shapes, fields, grid, posemb_tokens)
    assumed |= {"image_size"} if posemb["posemb"] == "none" else {"grid"} if grid is None else set()
    image_size = (rows * fields["patch_size"][0], columns * fields["patch_size"][1])
    return ModelConfig(**fields, **posemb, image_size=image_size), assumed


def _infer_posemb(
    shapes: Shapes, fields: Mapping[str, Any], grid: Size | None, posemb_tokens: tuple[str, ...]
) -> tuple[dict[str, Any], Size]:
    """Infer the kind of position embeddings, and their grid of patches."""
    if "pos_embed_row" in shapes and "pos_embed_column" in shapes:
        size = tuple(shapes[f"pos_embed_{axis}"][1:2] for axis in ("row", "column"))
        if all(size):
            return {"posemb": "learn2d", "posemb_tokens": "patches"}, (size[0][0], size[1][0])
    if len(table := shapes.get(f"blocks.0.attn.{RELATIVE}", ())) == 2:
        side = (math.isqrt(max(table[0] - 3, 0)) + 1) // 2
        rows, columns = grid or (side, side)
        if num_offsets((rows, columns)) == table[0]:
            return {"posemb": "relative"}, (rows, columns)
        raise ConfigError(
            f"{table[0]} relative position biases do not fit a grid of {rows} x {columns}",
            hint="specify the grid with --old-grid RxC (`vit convert`, `vit resize-posemb`)",
        )
    if len(shapes.get("pos_embed", ())) != 3:
        rows, columns = (max(224 // side, 1) for side in fields["patch_size"])
        return {"posemb": "none"}, (rows, columns)
    tokens = shapes["pos_embed"][1]
    registers = fields["num_registers"]
    num_prefix = int(fields["class_token"]) + int(fields["distill_token"]) + registers
    num_embedded = {"all": num_prefix, "patches": 0, "class": int(fields["class_token"])}
    for name in posemb_tokens or tuple(num_embedded):
        side = math.isqrt(max(tokens - num_embedded[name], 0))
        rows, columns = grid or (side, side)
        if not rows or rows * columns != tokens - num_embedded[name]:
            continue
        # 25 embeddings may be 5 x 5 patches, or the class token and 4 x 6 patches. Without evidence
        # of the former (layer scale, registers: DeiT III and DINOv2), neither is assumed.
        evidence = fields["layer_scale"] or registers or grid or posemb_tokens
        if num_embedded[name] == num_prefix or evidence:
            return {"posemb": "learn", "posemb_tokens": name}, (rows, columns)
    raise ConfigError(
        f"{tokens} position embeddings do not form a "
        + (f"grid of {grid[0]} x {grid[1]}" if grid else "square grid")
        + f" with {pluralize(num_prefix, 'prefix token')}",
        hint="specify the grid with --old-grid RxC (`vit convert`, `vit resize-posemb`)",
    )


def format_assumption(fact: str, model: Architecture, preprocess: Preprocess) -> str:
    """Format an assumed fact, as in "num_heads=12"."""
    if fact == "preprocess":
        names = ("interpolation", "crop_mode", "crop_pct", "mean", "std")
        return f"preprocessing ({_format_fields(preprocess, *names)})"
    if fact == "resnet":
        resnet = model.resnet if isinstance(model, BiTConfig) else model.stem
        return f"ResNet ({_format_fields(resnet, 'norm_eps', 'std_eps', 'pool_padding')})"
    return _format_fields(model, fact)


def _format_fields(config: object, *names: str) -> str:
    return ", ".join(format_setting(name, getattr(config, name)) for name in names)


# ---------------------------------------------------------------------------------------------
# Comparison


def check_keys(expected: Shapes, actual: Shapes, where: object, config: Path | None = None) -> None:
    """Raise a CheckpointError that lists missing, unexpected and wrongly shaped tensors.

    Args:
        config: the file next to the weights that describes the model; None: their header.
    """
    mismatches = {
        "missing": [f"{n} {_format_shape(s)}" for n, s in expected.items() if n not in actual],
        "unexpected": [f"{n} {_format_shape(s)}" for n, s in actual.items() if n not in expected],
        "with a wrong shape": [
            f"{name} {_format_shape(actual[name])} instead of {_format_shape(shape)}"
            for name, shape in expected.items()
            if name in actual and tuple(actual[name]) != tuple(shape)
        ],
    }
    problems = [f"{len(n)} {problem}: {join_names(n)}" for problem, n in mismatches.items() if n]
    if problems:
        source = "the model's description" if config is None else config
        hint = f"if {config} belongs to another checkpoint, move the weights to another directory"
        raise CheckpointError(
            f"the tensors do not match {source}: {'; '.join(problems)}",
            where=where,
            hint=None if config is None else hint,
        )


def _format_shape(shape: Iterable[int]) -> str:
    return "(" + ", ".join(str(n) for n in shape) + ")"


def join_names(items: list[str]) -> str:
    """Join names; of many, only the first 20."""
    num_omitted = len(items) - 20
    return ", ".join(items[:20]) + (f" and {num_omitted} more" if num_omitted > 0 else "")
