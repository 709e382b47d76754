"""timm's Hub layout: a `config.json` beside `model.safetensors`, read and written.

The file names an architecture of timm's and the arguments that depart from it (`model_args`; see
`timm_architectures.py`). What both timm and transformers need in it was found by trying, and is
listed at `to_timm`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import (
    Architecture,
    BiTConfig,
    ClassLabel,
    ModelConfig,
    Preprocess,
    Size,
)
from vitcli.errors import CheckpointError, ConfigError
from vitcli.layouts.timm_architectures import (
    architecture_from_args,
    best_architecture,
    not_in_timm,
)
from vitcli.layouts.timm_resnet import bit_from_args
from vitcli.typed_json import from_json

# ---------------------------------------------------------------------------------------------
# In


def from_timm(config: dict[str, Any], where: object = None) -> CheckpointInfo:
    """What a `config.json` in timm's Hub layout says.

    Raises:
        CheckpointError: it is not one, or names an architecture or an option that is not ours.
    """
    try:
        pretrained: dict[str, Any] = config.get("pretrained_cfg") or config  # old files: one table
        name = str(config["architecture"]).partition(".")[0]
        args = dict(config.get("model_args") or {})
        classes = _first(config, args, pretrained, key="num_classes", default=1000)
        size = pretrained.get("input_size")
        resnet = bit_from_args(name, {}) is not None
        if "img_size" not in args and size and (pretrained.get("fixed_input_size", True) or resnet):
            args["img_size"] = list(size[1:])
        model = architecture_from_args(name, args, config.get("resnet_backbone"))
        model = model.with_classes(classes)
        model = from_json(type(model), json.loads(json.dumps(dataclasses.asdict(model))))  # types
        return CheckpointInfo(
            model,
            _preprocess(pretrained, model.image_size),
            _labels(config, pretrained, model.num_classes),
            provenance={"timm": {"architecture": name, "tag": pretrained.get("tag")}},
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(f"is not a config.json of timm's: {reason}", where=where) from error
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(error.what, where=where, hint=error.hint) from error


def _first(*tables: dict[str, Any], key: str, default: Any) -> Any:
    return next((table[key] for table in tables if table.get(key) is not None), default)


def _preprocess(pretrained: dict[str, Any], size: Size) -> Preprocess:
    """timm's defaults for what is absent are those of its `_cfg` for ViTs."""
    named: dict[str, Any] = {
        "interpolation": pretrained.get("interpolation") or "bicubic",
        "crop_mode": pretrained.get("crop_mode") or "center",
    }
    if named["interpolation"] not in ("nearest", "bilinear", "bicubic", "box", "lanczos"):
        raise ValueError(f"unknown interpolation {named['interpolation']!r}")
    if named["crop_mode"] not in ("center", "squash", "border"):
        raise ValueError(f"unknown crop_mode {named['crop_mode']!r}")
    return Preprocess(
        size=size,
        mean=_rgb(pretrained.get("mean") or (0.5, 0.5, 0.5)),
        std=_rgb(pretrained.get("std") or (0.5, 0.5, 0.5)),
        crop_pct=float(pretrained.get("crop_pct") or 0.9),
        **named,
    )


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = (float(value) for value in values)
    return red, green, blue


def _labels(
    config: dict[str, Any], pretrained: dict[str, Any], num_classes: int
) -> tuple[ClassLabel, ...]:
    """Classes named in the file, in index order; none where it names another number of them."""
    names = _first(config, pretrained, key="label_names", default=[])
    if isinstance(names, dict):
        names = [names[str(index)] for index in range(len(names))]
    described = _first(config, pretrained, key="label_descriptions", default={})
    if len(names) != num_classes:
        return ()
    return tuple(ClassLabel(str(name), str(described.get(name, name))) for name in names)


# ---------------------------------------------------------------------------------------------
# Out


def to_timm(info: CheckpointInfo) -> dict[str, Any]:
    """A `config.json` that timm, transformers and we read; ours is the block under "vit".

    transformers takes the classes' names from a list `label_names` at the root and fails on a
    `num_classes` inside `model_args`; both need a `pretrained_cfg`. A model that timm cannot
    express gets no "architecture", so that nothing loads it as something else.
    """
    model, preprocess = info.model, info.preprocess
    config: dict[str, Any] = {}
    if not not_in_timm(model):
        name, args = best_architecture(model)
        config = {"architecture": name, "model_args": args}
    config |= {
        "num_classes": model.num_classes,
        "num_features": model.feature_dim,
        "global_pool": _global_pool(model),
    }
    if info.classes:
        config["label_names"] = unique_names(info.classes)
    if info.score == "sigmoid":
        config["problem_type"] = "multi_label_classification"  # so that transformers scores alike
    config["pretrained_cfg"] = {
        "tag": "vit",
        "custom_load": False,
        "input_size": [3, *preprocess.size],
        "fixed_input_size": isinstance(model, ModelConfig),
        "interpolation": preprocess.interpolation,
        "crop_pct": preprocess.crop_pct,
        "crop_mode": preprocess.crop_mode,
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "num_classes": model.num_classes,
        "pool_size": None if isinstance(model, ModelConfig) else list(model.grid),
        "first_conv": _first_conv(model),
        "classifier": _classifier(model),
    }
    return {**config, "vit": info.to_dict()}


def _global_pool(model: Architecture) -> str:
    names = {"token": "token", "gap": "avg", "map": "map", "token+gap": "token"}
    return names[model.pool] if isinstance(model, ModelConfig) else "avg"


def _first_conv(model: Architecture) -> str:
    """Which convolution sees the image."""
    if isinstance(model, BiTConfig):
        return "stem.conv"
    if model.stem is None:
        return "patch_embed.proj"
    return f"patch_embed.backbone.{next(model.stem.layers()).name}"


def _classifier(model: Architecture) -> str | list[str]:
    if isinstance(model, BiTConfig):
        return "head.fc"
    return ["head", "head_dist"] if model.distill_token else "head"


def unique_names(classes: tuple[ClassLabel, ...]) -> list[str]:
    """Names to show; those that several classes share are followed by the class's id."""
    count = Counter(label.name for label in classes)
    return [
        label.name if count[label.name] == 1 else f"{label.name} ({label.id})" for label in classes
    ]
