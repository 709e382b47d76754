"""Specifics of DINOv3, EVA and EVA-02, which timm implements as `Eva`, and of BEiT, which it
implements as `Beit`: argument and tensor names, and biases of only queries and values.

Sources: timm/models/eva.py, timm/models/beit.py, dinov3/hub/backbones.py,
dinov3/layers/attention.py, beit/modeling_finetune.py.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from vitcli.architectures.vit import RELATIVE
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import Architecture, ModelConfig, Preprocess
from vitcli.layouts.foreign_json import ForeignJson
from vitcli.layouts.layout import IMAGENET
from vitcli.layouts.table import Row, rows

Args = dict[str, Any]
T = TypeVar("T")

BEIT_NAMES = {
    **{name: name for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")},
    **{name: name for name in ("mlp_ratio", "qkv_bias", "global_pool", "init_values")},
    "fc_norm": "use_fc_norm",
}
"""Arguments of `VisionTransformer` -> their names in `Beit`."""
EVA_NAMES = {
    **BEIT_NAMES,
    "class_token": "class_token",
    "no_embed_class": "no_embed_class",
    "reg_tokens": "num_reg_tokens",
    "pre_norm": "use_pre_transformer_norm",
    "pos_embed": "use_abs_pos_emb",
}
"""The same for `Eva`."""


def _arg_names(model: ModelConfig) -> dict[str, str]:
    return BEIT_NAMES if model.posemb == "relative" else EVA_NAMES


def has_other_class(model: Architecture) -> bool:
    """Whether timm implements such a model as `Eva` or `Beit`."""
    return model.rope != "none" or not model.key_bias or model.posemb == "relative"


def not_in_class(model: ModelConfig, overrides: Args) -> list[str]:
    """List what timm cannot express about such a model."""
    aligned = model.swiglu and model.rope == "dinov3"  # to multiples of 64
    checks = {
        "an attention pool": model.pool == "map",
        "no layer_scale": overrides.get("init_values") == 0,  # only None has this effect in `Eva`
        f"a gated MLP of {model.mlp_dim}": aligned and model.mlp_dim % 128 > 0,
        **dict.fromkeys(sorted(overrides.keys() - _arg_names(model)), True),
    }
    feature = f"rope={model.rope}" if model.rope != "none" else "key_bias=false"
    feature = "posemb=relative" if model.posemb == "relative" else feature
    return [f"{reason} with {feature}" for reason, applies in checks.items() if applies]


def to_class_args(overrides: Args, model: ModelConfig) -> Args:
    """Rename arguments to those of `Eva` or `Beit`."""
    names = _arg_names(model)
    args = {names[key]: value for key, value in overrides.items()}
    if "use_abs_pos_emb" in args:
        args["use_abs_pos_emb"] = model.posemb != "none"
    if model.sub_norm != "none":  # architectures whose q, k and v are separate
        args["qkv_fused"] = True
    return args


def from_class_args(overrides: ForeignJson, model: ModelConfig) -> ForeignJson:
    """Invert `to_class_args`; `model` is the named architecture without overrides."""
    names = {theirs: ours for ours, theirs in _arg_names(model).items()}
    args = {names.get(key, key): value for key, value in overrides.values.items()}
    if "use_abs_pos_emb" in overrides and "pos_embed" in args:
        args["pos_embed"] = "learn" if overrides.get("use_abs_pos_emb", bool) else "none"
    args.pop("qkv_fused", None)  # the tensors' names show it
    return ForeignJson(args, overrides.where, overrides.path)


SCALES = """
blocks.{i}.ls1.gamma     blocks.{i}.gamma_1
blocks.{i}.ls2.gamma     blocks.{i}.gamma_2
"""
BIASES = """
blocks.{i}.attn.qkv.bias blocks.{i}.attn.[q_bias,k_bias,v_bias]
"""
GATED = """
blocks.{i}.mlp.fc1.*     blocks.{i}.mlp.[fc1_g,fc1_x].*
"""


def renamed_rows(model: ModelConfig) -> tuple[Row, ...]:
    """Return rows for tensors that `Eva` names differently than `VisionTransformer`, whose names
    are ours; `drop_key_biases` selects those that it stores."""
    packed = model.rope != "dinov3" and model.sub_norm == "none" and model.norm == "layer"
    gated = GATED if model.swiglu and not packed else ""
    return rows(SCALES + gated + ("" if model.key_bias else BIASES))


def drop_key_biases(tensors: Mapping[str, T]) -> dict[str, T]:
    """Drop key biases, which are zeros."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("attn.k_bias")}


BEIT_TABLE = f"blocks.0.attn.{RELATIVE}"
"""The name of a tensor that only BEiT has."""


def beit_match(tensors: Mapping[str, LazyTensor]) -> Args:
    """Return the `Match` fields that BEiT's files do not show without a configuration."""
    heads = math.prod(tensors[BEIT_TABLE].shape[1:])
    fields = {"key_bias": False, "num_heads": heads, "activation": "gelu", "norm_eps": 1e-6}
    half = (0.5, 0.5, 0.5)
    return {"fields": fields, "default": Preprocess(mean=half, std=half, crop_pct=0.9)}


PERIODS = "rope_embed.periods"
"""In DINOv3's own files: the periods of its rotary position embeddings, (head channels / 4,)."""


def dinov3_match(tensors: Mapping[str, LazyTensor]) -> Args:
    """Return the `Match` fields that DINOv3's own code hard-codes (dinov3/hub/backbones.py)."""
    width = math.prod(tensors["patch_embed.proj.weight"].shape[:1])
    num_periods = math.prod(tensors[PERIODS].shape)
    fields: Args = {"rope": "dinov3", "pool": "token", "activation": "gelu", "norm_eps": 1e-5}
    fields |= {"num_heads": width // max(4 * num_periods, 1), "image_size": (256, 256)}
    fields["key_bias"] = "blocks.0.attn.qkv.bias" not in tensors
    default = Preprocess((256, 256), *IMAGENET, "bilinear", crop_mode="squash")
    return {"fields": fields, "default": default}


def apply_bias_masks(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Apply the masks of biases, as DINOv3's own code does: those of keys become zeros."""
    masked = dict(tensors)
    for name, tensor in tensors.items():
        if f"{name}_mask" in tensors:
            masked[name] = tensor._replace(read=functools.partial(_apply_bias_mask, tensor))
    return masked


def _apply_bias_mask(bias: LazyTensor) -> Any:
    array = bias.read().copy()
    array[len(array) // 3 : 2 * len(array) // 3] = 0
    return array
