"""What is particular about DINOv3, which timm builds as `Eva` and not as `VisionTransformer`: names
of arguments and of tensors, and biases of queries and values alone.

Sources: timm/models/eva.py, dinov3/hub/backbones.py, dinov3/layers/attention.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.tensor_file import LazyTensor, zeros_like
from vitcli.config import ModelConfig, Preprocess
from vitcli.layouts.foreign_json import ForeignJson
from vitcli.layouts.layout import IMAGENET
from vitcli.layouts.table import Row, rows

Args = dict[str, Any]

NAMES = {
    **{name: name for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")},
    **{name: name for name in ("mlp_ratio", "qkv_bias", "class_token", "no_embed_class")},
    "global_pool": "global_pool",
    "reg_tokens": "num_reg_tokens",
    "fc_norm": "use_fc_norm",
    "pre_norm": "use_pre_transformer_norm",
}
"""Arguments of `VisionTransformer`, and their names in timm's `Eva`, which has rotary position
embeddings; it has no others."""


def not_in_eva(model: ModelConfig, departures: Args) -> list[str]:
    """What of a model with rotary position embeddings timm cannot express."""
    checks = {
        "biases of keys": model.qkv_bias,
        "an attention pool": model.pool == "map",
        f"a gated MLP of {model.mlp_dim}": model.swiglu and model.mlp_dim % 128 > 0,
        **dict.fromkeys(sorted(departures.keys() - NAMES), True),
    }
    wrong = (what for what, impossible in checks.items() if impossible)
    return [f"{what} with rotary position embeddings" for what in wrong]


def to_eva(departures: Args, swiglu: bool) -> Args:
    """Arguments under the names of `Eva`, of whose gated MLP the ratio is of the gate alone."""
    args = {NAMES[key]: value for key, value in departures.items()}
    if swiglu and "mlp_ratio" in args:
        args["mlp_ratio"] /= 2
    return args


def from_eva(given: ForeignJson, swiglu: bool) -> ForeignJson:
    """The way back."""
    names = {theirs: ours for ours, theirs in NAMES.items()}
    args = {names.get(key, key): value for key, value in given.values.items()}
    if swiglu and "mlp_ratio" in given:
        args["mlp_ratio"] = 2 * given.get("mlp_ratio", float)
    return ForeignJson(args, given.where, given.path)


_SCALES = """
blocks.{i}.ls1.gamma     blocks.{i}.gamma_1
blocks.{i}.ls2.gamma     blocks.{i}.gamma_2
"""
_GATED = "blocks.{i}.mlp.fc1.*  blocks.{i}.mlp.fc1_g.*,blocks.{i}.mlp.fc1_x.*"


def renamed(swiglu: bool) -> tuple[Row, ...]:
    """The rows of tensors that have another name in `Eva` than in `VisionTransformer`, which is
    ours."""
    return rows(_SCALES) + (rows(_GATED) if swiglu else ())


PERIODS = "rope_embed.periods"
"""In DINOv3's own files: the periods of its rotary position embeddings, a quarter of a head."""


def of_dinov3(tensors: Mapping[str, LazyTensor]) -> Args:
    """What DINOv3's own code takes for granted, as fields of `Match`. (dinov3/hub/backbones.py)"""
    width = math.prod(tensors["patch_embed.proj.weight"].shape[:1])
    quarter = math.prod(tensors[PERIODS].shape)
    fields = {"posemb": "rope", "posemb_tokens": "patches", "pool": "token", "activation": "gelu"}
    sizes = {"num_heads": width // max(4 * quarter, 1), "norm_eps": 1e-5, "image_size": (256, 256)}
    default = Preprocess((256, 256), *IMAGENET, "bilinear", crop_mode="squash")
    return {"fields": {**fields, **sizes}, "default": default}


def without_key_bias(tensors: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
    """With the zeros that biases of keys are in DINOv3: timm leaves them out, and DINOv3's own code
    multiplies them by a mask."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("attn.q_bias"):
            found[name.replace("q_bias", "k_bias")] = zeros_like(tensor)
        if f"{name}_mask" in tensors:
            found[name] = tensor._replace(read=functools.partial(_masked, tensor))
    return found


def _masked(bias: LazyTensor) -> Any:
    array = bias.read().copy()
    array[len(array) // 3 : 2 * len(array) // 3] = 0
    return array
