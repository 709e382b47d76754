"""The image tower of a CLIP under OpenAI's names, which open_clip uses too; or a timm model that is
the image tower of an open_clip model, such as SigLIP.

Sources: clip/model.py, open_clip/transformer.py, open_clip/timm_model.py.
"""

import dataclasses
import re
from typing import Any

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Preprocess
from vitcli.layouts import timm
from vitcli.layouts.foreign_json import ForeignJson, read_json
from vitcli.layouts.layout import CLIP, Layout, Match, find_prefix, tensors_under
from vitcli.layouts.table import identity, rows

CONFIG = "open_clip_config.json"

_TABLE = """
cls_token                class_embedding                           vector
patch_embed.proj.*       conv1.*
pos_embed                positional_embedding                      table
norm_pre.*               ln_pre.*
blocks.{i}.norm1.*       {layer}.ln_1.*
blocks.{i}.attn.qkv.weight  {layer}.attn.in_proj_weight
blocks.{i}.attn.qkv.bias    {layer}.attn.in_proj_bias
blocks.{i}.attn.proj.*   {layer}.attn.out_proj.*
blocks.{i}.norm2.*       {layer}.ln_2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.c_fc.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.c_proj.*
blocks.{i}.ls1.gamma     {layer}.ls_1.gamma
blocks.{i}.ls2.gamma     {layer}.ls_2.gamma
norm.*                   ln_post.*
"""
_CROP_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}
_INTERPOLATIONS = {"bicubic": "bicubic", "bilinear": "bilinear", "nearest": "nearest"}


class OpenClip(Layout):
    """OpenAI's own archives are recognized by an extra scalar; all of them use quick GELU."""

    name = "open_clip"
    library = "timm"
    config_files = (CONFIG,)
    projections = r"(^|\.)proj$"

    def find(self, store: Store) -> Match | None:
        prefix = find_prefix(store.tensors, "conv1.weight", "class_embedding")
        if prefix is None:
            return _find_timm_tower(store)
        tensors = tensors_under(store, prefix)
        fields: dict[str, Any] = {"norm_eps": 1e-5}
        preprocess = None
        config = read_json(store.path.parent / CONFIG)
        if config is not None:
            fields |= _model_fields(config.nested("model_cfg"))
            preprocess = _preprocess(config.nested("preprocess_cfg"))
        if "input_resolution" in store.tensors:
            width = tensors["class_embedding"].shape[-1:] or (64,)
            fields |= {"activation": "quick_gelu", "num_heads": max(width[0] // 64, 1)}
        return Match(
            rows(_TABLE, layer="transformer.resblocks.{i}"),
            tensors,
            droppable=r"^proj$",  # to the space shared with text
            fields=fields,
            preprocess=preprocess,
            default=Preprocess(mean=CLIP[0], std=CLIP[1]),
        )

    def resized_config(
        self, name: str, config: ForeignJson, info: CheckpointInfo
    ) -> dict[str, Any] | None:
        if name != CONFIG:
            return None
        model = config.nested("model_cfg")
        vision = {**model.nested("vision_cfg").values, "image_size": list(info.model.image_size)}
        return {**config.values, "model_cfg": {**model.values, "vision_cfg": vision}}


def _find_timm_tower(store: Store) -> Match | None:
    """Match a file whose image tower is a timm model, named by the configuration."""
    prefix = find_prefix(store.tensors, "trunk.patch_embed.proj.weight")
    config = read_json(store.path.parent / CONFIG) if prefix is not None else None
    if config is None:
        return None  # timm's layout reads it, but has to assume more
    vision = config.nested("model_cfg").nested("vision_cfg")
    if not (name := vision.get("timm_model_name", str, "")):
        return None
    size = {"img_size": list(vision.size("image_size", (224, 224)))}
    model = timm.architecture_from_args(name, size)
    if vision.choice("timm_pool", _POOLS, "") not in ("", getattr(model, "pool", "")):
        vision.refuse("timm_pool", f"that of {name}")
    tensors = tensors_under(store, f"{prefix}trunk.")
    return Match(
        identity(tensors),
        tensors,
        fields={key: value for key, value in vars(model).items() if key in _NOT_IN_SHAPES},
        preprocess=_preprocess(config.nested("preprocess_cfg")),
        default=Preprocess(mean=CLIP[0], std=CLIP[1]),
    )


_POOLS = {"": "", "map": "map", "avg": "gap", "token": "token"}
_NOT_IN_SHAPES = ("num_heads", "activation", "norm_eps", "pool", "image_size")
"""Fields of a timm model that its tensor shapes do not determine."""
_IGNORED = r"layers|(head_)?width|mlp_ratio|(patch|image)_size|ls_init_value|patch_dropout|timm_.*"
"""A regex for keys that tensor shapes determine, or that have no effect here."""


def _model_fields(model: ForeignJson) -> dict[str, Any]:
    """Return `ModelConfig` fields that tensor shapes do not determine."""
    vision = model.nested("vision_cfg")
    for key, value in vision.values.items():
        if value and not re.fullmatch(_IGNORED, key) and (key, value) != ("pool_type", "tok"):
            vision.refuse(key, "supported")
    heads = vision.integer("width") // vision.integer("head_width", 64)
    return {
        "num_heads": max(heads, 1),
        "activation": "quick_gelu" if model.get("quick_gelu", bool, False) else "gelu",
        "image_size": vision.size("image_size", (224, 224)),
    }


def _preprocess(config: ForeignJson) -> Preprocess | None:
    if not config.values:
        return None
    fields: dict[str, Any] = {
        "interpolation": config.choice("interpolation", _INTERPOLATIONS, "bicubic"),
        "crop_mode": config.choice("resize_mode", _CROP_MODES, "shortest"),
    }
    base = Preprocess(mean=config.triple("mean", CLIP[0]), std=config.triple("std", CLIP[1], 1e-6))
    return dataclasses.replace(base, **fields)
