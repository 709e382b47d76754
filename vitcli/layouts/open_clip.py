"""open_clip's `open_clip_config.json`, which stands beside the weights in its Hub repos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitcli.config import Preprocess, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.layouts.transformers_config import CLIP

CROPS: dict[str, Any] = {"shortest": "center", "squash": "squash", "longest": "border"}
"""open_clip's `resize_mode` in timm's words."""


def read_config(folder: Path) -> dict[str, Any]:
    """The file in a folder; empty where there is none. Raises CheckpointError."""
    path = folder / "open_clip_config.json"
    if not path.is_file():
        return {}
    try:
        config: Any = json.loads(path.read_text("utf-8"))
        model_fields(config), preprocess(config, (1, 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"cannot be read: {error!r}", where=path) from error
    return dict(config)


def model_fields(config: dict[str, Any]) -> dict[str, Any]:
    """What of a ModelConfig the tensors do not show and the config says."""
    if not config:
        return {}
    model = config["model_cfg"]
    vision = model["vision_cfg"]
    size = vision.get("image_size", 224)
    return {
        "num_heads": int(vision["width"]) // int(vision.get("head_width", 64)),
        "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "image_size": (size, size) if isinstance(size, int) else (int(size[0]), int(size[1])),
    }


def preprocess(config: dict[str, Any], size: Size) -> tuple[Preprocess, bool]:
    """How images are prepared, and whether the file says so; CLIP's way where it does not."""
    said = config.get("preprocess_cfg") or {}
    mean, std = said.get("mean") or CLIP[0], said.get("std") or CLIP[1]
    filter, crop = said.get("interpolation", "bicubic"), CROPS[said.get("resize_mode", "shortest")]
    return Preprocess(size, _rgb(mean), _rgb(std), filter, crop_mode=crop), bool(said)


def _rgb(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return red, green, blue
