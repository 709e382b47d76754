"""The files beside a model's weights, for images of another size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vitcli.atomic import write_text
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import Size
from vitcli.errors import CheckpointError, OutputError
from vitcli.hub import card

WEIGHTS = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".tar", ".ckpt", ".h5", ".msgpack")
"""Suffixes of weights, which do not go along with resized ones."""
CARD = "README.md"
OPEN_CLIP = "open_clip_config.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Where transformers keeps how an image is prepared."""


def copy_companions(source: Path, folder: Path) -> None:
    """The other files of a model's folder: its card, its curves. Not other weights.

    Raises:
        OutputError: they cannot be written.
    """
    try:
        for path in sorted(source.iterdir()):
            weights = path.suffix in WEIGHTS or path.name.endswith(".index.json")
            if path.is_file() and not weights and path.name[0] != ".":
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=folder) from error


def resize_configs(source: Path, folder: Path, old: Size, info: CheckpointInfo) -> None:
    """Writes the folder's configurations with the new size, all else as it stands in the source's,
    and its card with a word of it.

    Raises:
        CheckpointError: one of the source's cannot be read.
        OutputError: one cannot be written.
    """
    new = info.model.image_size
    if (source / CARD).is_file():
        text = (source / CARD).read_text("utf-8", errors="replace")
        write_text(folder / CARD, card.resized(text, old, new))
    for name in ("config.json", OPEN_CLIP, *PROCESSORS):
        path = source / name
        if not path.is_file():
            continue
        try:
            config: Any = json.loads(path.read_text("utf-8"))
            if name in PROCESSORS:
                config = _processor(config, old, new)
            elif name == OPEN_CLIP:
                config["model_cfg"]["vision_cfg"]["image_size"] = list(new)
            elif "model_type" in config and "architecture" not in config:
                config = _transformers(config, new)
            else:
                config = _timm(config, info)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot be read: {error!r}", where=path) from error
        write_text(folder / name, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _timm(config: dict[str, Any], info: CheckpointInfo) -> dict[str, Any]:
    """A config.json of timm's or ours."""
    size = list(info.model.image_size)
    pretrained = config.get("pretrained_cfg", config)
    pretrained["input_size"] = [3, *size]
    if "architecture" in config:
        config["model_args"] = {**(config.get("model_args") or {}), "img_size": size}
    if "vit" in config:
        config["vit"] = {**config["vit"], **info.to_dict()}
    return config


def _transformers(config: dict[str, Any], size: Size) -> dict[str, Any]:
    """A config.json of transformers; of a two-tower model the half that sees images."""
    part = config.get("vision_config")
    part = part if isinstance(part, dict) else config
    part["image_size"] = size[0] if size[0] == size[1] else list(size)
    return config


def _processor(config: dict[str, Any], old: Size, new: Size) -> dict[str, Any]:
    """How transformers prepares images: the crop is the model's size, and where there is one,
    images are resized beyond it by as much as before."""
    part = config.get("image_processor", config)
    size, sides = part.get("size"), {"height": new[0], "width": new[1]}
    crops = part.get("crop_size") is not None and part.get("do_center_crop", True)
    if crops:
        part["crop_size"] = sides
    edge = size.get("shortest_edge") if isinstance(size, dict) else size
    if crops and isinstance(edge, int):
        part["size"] = {"shortest_edge": round(edge * min(new) / min(old))}
    elif crops and isinstance(size, dict) and "height" in size:
        part["size"] = {k: round(size[k] * new[i] / old[i]) for i, k in enumerate(sides)}
    else:
        part["size"] = sides
    return config
