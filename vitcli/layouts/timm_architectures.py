"""Models in timm's words: an architecture's name and the arguments that depart from it.

Argument names are those of timm's `VisionTransformer`; ours are the paper's. What timm has no words
for, or computes a little otherwise, is said here too.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from vitcli.config import Architecture, BiTConfig, ModelConfig, ResNetConfig, Size, nearest
from vitcli.errors import CheckpointError, ConfigError
from vitcli.layouts import timm_resnet
from vitcli.layouts.timm_names import DEFAULTS, FIXED, Args, architectures
from vitcli.layouts.timm_resnet import (
    bit_from_args,
    bit_name,
    bit_not_in_timm,
    resnet_not_in_timm,
    stem_from_backbone,
)

NEUTRAL: Args = {
    "in_chans": 3,
    "proj_bias": True,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "pool_include_prefix": False,
    "dynamic_img_pad": False,
    "embed_norm_layer": None,
}
"""Arguments with the one value that our model has."""

IGNORED = re.compile(r"num_classes|.*drop_rate|weight_init|fix_init|(dynamic|strict)_img_size")
"""Arguments that change nothing once the weights are loaded, or are read elsewhere."""

POOLS = {"token": "token", "avg": "gap", "map": "map"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}


def architecture_from_args(
    name: str, args: Args, backbone: dict[str, Any] | None = None
) -> Architecture:
    """The model of that name, of any kind; see `model_from_args`.

    Args:
        backbone: a hybrid's ResNet, where it is not the one that the name says.
    """
    return bit_from_args(name, args) or model_from_args(name, args, backbone)


def model_from_args(name: str, args: Args, backbone: dict[str, Any] | None = None) -> ModelConfig:
    """The ViT or hybrid of that name with some of its arguments replaced.

    Raises:
        CheckpointError: the name or an argument is not known to us.
        ConfigError: the arguments contradict each other.
    """
    known = architectures()
    if name not in known:
        like = nearest(name, list(known))
        raise CheckpointError(
            f"timm's architecture '{name}' is not one that vit knows",
            hint=f"the nearest are {', '.join(like)}" if like else None,
        )
    for key, value in args.items():
        if key in DEFAULTS or IGNORED.fullmatch(key) or (key in NEUTRAL and value == NEUTRAL[key]):
            continue
        raise CheckpointError(f"timm's option {key}={value!r} is not one that vit knows")
    args = {**known[name], **{k: v for k, v in args.items() if k in DEFAULTS}}
    stem = stem_from_backbone(backbone) if backbone and args["stem"] is not None else None
    return _to_model(args, stem)


def _to_model(args: Args, stem: ResNetConfig | None = None) -> ModelConfig:
    """timm's arguments in the paper's words; `stem` in place of the one that they say."""
    if stem is None and args["stem"] is not None:
        stem = ResNetConfig(args["stem"])
    stride = stem.stride if stem else 1
    rows, columns = _pair(args["patch_size"])
    pool, act = args["global_pool"], args["act_layer"] or "gelu"
    if pool not in POOLS or act not in ACTIVATIONS:
        raise CheckpointError(f"timm's global_pool={pool!r}, act_layer={act!r} is not known to vit")
    fc_norm = pool == "avg" if args["fc_norm"] is None else bool(args["fc_norm"])
    fields: dict[str, Any] = {"pool": POOLS[pool], "activation": ACTIVATIONS[act]}
    return ModelConfig(
        width=args["embed_dim"],
        depth=args["depth"],
        num_heads=args["num_heads"],
        mlp_dim=int(args["embed_dim"] * args["mlp_ratio"]),
        patch_size=(rows * stride, columns * stride),
        image_size=_pair(args["img_size"]),
        class_token=args["class_token"],
        distill_token=args["distilled"],
        num_registers=args["reg_tokens"],
        posemb="learn" if args["pos_embed"] == "learn" else "none",
        posemb_tokens="patches" if args["no_embed_class"] else "all",
        pre_norm=args["pre_norm"],
        final_norm=args["final_norm"] and not fc_norm,
        fc_norm=args["final_norm"] and fc_norm,
        layer_scale=args["init_values"] is not None,
        qkv_bias=args["qkv_bias"],
        patch_bias=not args["pre_norm"],
        swiglu=args["swiglu"],
        norm_eps=args["norm_eps"],
        stem=stem,
        **fields,
    )


def _pair(size: Any) -> Size:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def not_in_timm(model: Architecture) -> list[str]:
    """What of a model timm has no way to say; empty if it can be said (but for what
    `_with_timms_norm` says)."""
    if isinstance(model, BiTConfig):
        return bit_not_in_timm(model)
    model = _with_timms_norm(model)
    prefix = model.num_prefix_tokens
    checks = {
        f"pre_logits of size {model.pre_logits}": model.pre_logits > 0,
        "the class token and the mean side by side": model.pool == "token+gap",
        "2-D learned position embeddings": model.posemb == "learn2d",
        "position embeddings on some prefix tokens": (
            model.posemb != "none" and model.posemb_prefix not in (0, prefix)
        ),
        "a norm both before and after pooling": model.final_norm and model.fc_norm,
        "this patch embedding bias": model.patch_bias == model.pre_norm,
        f"LayerNorm epsilon {model.norm_eps}": model.norm_eps not in (1e-6, 1e-5),
        "a distillation token with these options": model.distill_token
        and not (
            model.pool == "token"
            and model.posemb == "learn"
            and model.posemb_tokens == "all"
            and model.num_registers == 0
            and model.norm_eps == 1e-6
        ),
        "SwiGLU with these options": model.swiglu
        and (model.distill_token or model.norm_eps != 1e-6 or model.pool == "map"),
    }
    reasons = [what for what, impossible in checks.items() if impossible]
    return reasons + (_stem_not_in_timm(model, model.stem) if model.stem else [])


def _stem_not_in_timm(model: ModelConfig, stem: ResNetConfig) -> list[str]:
    """timm builds a hybrid's ResNet by the architecture's name alone."""
    known = {args["stem"] for args in architectures().values() if args["stem"] is not None}
    named = stem.depths in known and stem.width_factor == 1
    reasons = resnet_not_in_timm(stem)
    if not named:
        reasons.append(f"a stem of {stem.depths} blocks, width factor {stem.width_factor:g}")
    if model.distill_token or model.swiglu or model.norm_eps != 1e-6:
        reasons.append("a hybrid with these options")
    return reasons


def with_timms_epsilons(model: Architecture) -> Architecture:
    """The model with timm's constants: those of its ResNet, if it has one, and LayerNorm's."""
    if isinstance(model, BiTConfig):
        return dataclasses.replace(model, resnet=timm_resnet.with_timms_epsilons(model.resnet))
    stem = timm_resnet.with_timms_epsilons(model.stem) if model.stem else None
    return dataclasses.replace(_with_timms_norm(model), stem=stem)


def _with_timms_norm(model: ModelConfig) -> ModelConfig:
    """LayerNorm with timm's epsilon in place of a smaller one (transformers' ViT has 1e-12):
    logits differ where a token is near zero."""
    return dataclasses.replace(model, norm_eps=max(model.norm_eps, 1e-6))


def otherwise_in_timm(model: Architecture) -> list[str]:
    """What timm computes a little otherwise of a model that it can load."""
    if isinstance(model, BiTConfig) or model.norm_eps >= 1e-6:
        return []
    return [
        f"timm takes 1e-6 as LayerNorm's epsilon, not {model.norm_eps}: its logits differ where a "
        "token is near zero"
    ]


def name_with_timms_epsilons(model: Architecture) -> str | None:
    """timm's name of a model that nothing but these constants keeps out of timm, if it has one of
    these sizes."""
    same = with_timms_epsilons(model)
    if not not_in_timm(model) or not_in_timm(same):
        return None
    name, departures = best_architecture(same)
    sizes = {"embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size"}
    return None if sizes & set(departures) else name


def best_architecture(model: Architecture) -> tuple[str, Args]:
    """timm's name with the fewest departures, and those; the model must not be `not_in_timm`."""
    if isinstance(model, BiTConfig):
        return bit_name(model.resnet) or "", {}
    model = _with_timms_norm(model)
    wanted = _to_args(model)
    fixed = {
        "distilled": model.distill_token,
        "swiglu": model.swiglu,
        "norm_eps": model.norm_eps,
        "stem": model.stem.depths if model.stem else None,
    }
    best: tuple[str, Args] | None = None
    for name, args in architectures().items():
        if {key: args[key] for key in FIXED} != fixed:
            continue
        base = _to_args(_to_model(args))
        if args["fc_norm"] is None:  # timm's rule, which follows the pooling that is asked for
            base["fc_norm"] = wanted["global_pool"] == "avg"
        departures = {key: value for key, value in wanted.items() if base[key] != value}
        if best is None or len(departures) < len(best[1]):
            best = name, departures
    if best is None:
        raise ConfigError("no architecture of timm's has this model's norm, MLP and tokens")
    return best


def _to_args(model: ModelConfig) -> Args:
    """Our words in timm's arguments, each written in one way so that they can be compared."""
    ratio = model.mlp_dim / model.width
    if int(ratio * model.width) != model.mlp_dim:  # timm truncates, so a rounding error costs one
        ratio = math.nextafter(ratio, math.inf)
    pools = {ours: theirs for theirs, ours in POOLS.items()}
    return {
        "img_size": list(model.image_size),
        "patch_size": _square(model.patch_kernel),
        "embed_dim": model.width,
        "depth": model.depth,
        "num_heads": model.num_heads,
        "mlp_ratio": ratio,
        "qkv_bias": model.qkv_bias,
        "init_values": 1e-5 if model.layer_scale else None,
        "class_token": model.class_token,
        "no_embed_class": model.num_prefix_tokens > 0 and model.posemb_prefix == 0,
        "reg_tokens": model.num_registers,
        "pos_embed": "none" if model.posemb == "none" else "learn",
        "pre_norm": model.pre_norm,
        "final_norm": model.final_norm or model.fc_norm,
        "fc_norm": model.fc_norm,
        "global_pool": pools[model.pool],
        "act_layer": model.activation,
    }


def _square(size: Size) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)
