"""timm's layout: its tensor names, which are also ours, its `config.json`, its architectures.

The config names an architecture and the arguments of `VisionTransformer` (or `ResNetV2`) that
differ from it. DeiT, DINO, DINOv2 and MAE released their weights under timm's names too.
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal, cast

from vitcli.architectures.resnet import DEPTHS, bit_resnet
from vitcli.checkpoints.info import CheckpointInfo, unique_names
from vitcli.checkpoints.tensor_file import LazyTensor, Store
from vitcli.config import (
    Activation,
    Architecture,
    BiTConfig,
    ClassLabel,
    ModelConfig,
    Preprocess,
    ResNetConfig,
    Size,
)
from vitcli.errors import CheckpointError, ConfigError, warn
from vitcli.layouts import layout, timm_classes
from vitcli.layouts.foreign_json import ForeignJson, read_json
from vitcli.layouts.layout import (
    HALF,
    IMAGENET,
    Layout,
    Match,
    find_prefix,
    tensors_under,
    unsupported_fields,
    with_key_biases,
)
from vitcli.layouts.table import Row, expand_choices, identity, rows
from vitcli.typed_json import parse
from vitcli.words import nearest

Args = dict[str, Any]
"""Keyword arguments of timm's `VisionTransformer`."""

# ---------------------------------------------------------------------------------------------
# Architectures by name

SIZES: dict[str, Args] = {
    name: {"embed_dim": width, "depth": depth, "num_heads": heads, "mlp_ratio": ratio}
    for name, width, depth, heads, ratio in (
        ("tiny", 192, 12, 3, 4),
        ("xsmall", 256, 10, 4, 4),
        ("wee", 256, 14, 4, 5),
        ("little", 320, 14, 5, 5.6),
        ("small", 384, 12, 6, 4),
        ("medium", 512, 12, 8, 4),
        ("mediumd", 512, 20, 8, 4),
        ("betwixt", 640, 12, 10, 4),
        ("base", 768, 12, 12, 4),
        ("plus", 896, 12, 14, 4),
        ("so150m", 896, 18, 14, 2.572),
        ("so150m2", 832, 21, 13, 34 / 13),
        ("large", 1024, 24, 16, 4),
        ("so400m", 1152, 27, 16, 3.7362),
        ("huge", 1280, 32, 16, 4),
        ("giant", 1408, 40, 16, 48 / 11),
        ("giantopt", 1536, 40, 16, 4),
        ("gigantic", 1664, 48, 16, 64 / 13),
    )
}
"""Arguments implied by the size in an architecture's name."""

GAP: Args = {"class_token": False, "global_pool": "avg", "fc_norm": False}
REG_GAP = {"fc_norm": None, "no_embed_class": True, "init_values": 1e-5}
MAP = {"class_token": False, "global_pool": "map"}
WORDS = {**SIZES, "siglip": MAP, "map": MAP, "gap": GAP}
"""Arguments implied by a word in an architecture's name, of which the last takes precedence."""
TANH = {"act_layer": "gelu_tanh"}
CLIP = {"pre_norm": True, "norm_eps": 1e-5}
QUICK = {**CLIP, "act_layer": "quick_gelu"}
SCALED = {"init_values": 1e-5}
DINOV2 = {**SCALED, "img_size": 518}
WIDE_GIANT = {"embed_dim": 1536, "num_heads": 24}
# SwiGLU's gate and value are one matrix, so the ratio is twice the usual 8/3.
GIANT2 = {**DINOV2, **WIDE_GIANT, "mlp_ratio": 5.33334, "swiglu": True}
RADIO = {"img_size": 512, "no_embed_class": True, "final_norm": False}
TIPS = {"img_size": 448, "no_embed_class": True, "init_values": 1.0}
INTERN = {"embed_dim": 1024, "depth": 24, "num_heads": 16}
DEIT3 = {"init_values": 1e-6, "no_embed_class": True}
DINOV3: Args = {"img_size": 256, "reg_tokens": 4, "no_embed_class": True, "init_values": 1e-5}
DINOV3 |= {"global_pool": "avg", "fc_norm": False, "norm_eps": 1e-5}
DINOV3 |= {"pos_embed": "none", "rope": "dinov3", "key_bias": False}
DINOV3_GATED = {**DINOV3, "swiglu": True, "mlp_ratio": 8}  # 4 for the gate, 4 for the value
S_PLUS, H_PLUS = {**SIZES["small"], **DINOV3_GATED}, {**SIZES["huge"], **DINOV3_GATED}
H_PLUS["num_heads"] = 20
SEVEN_B: Args = {"embed_dim": 4096, "depth": 40, "num_heads": 32, "mlp_ratio": 4}
NO_BIAS: Args = {"qkv_bias": False}
# Gate and value are one matrix, so the ratio is twice timm's here and below.
AIMV2: Args = {**GAP, **NO_BIAS, "norm": "rms", "norm_eps": 1e-5, "swiglu": True, "num_heads": 8}
BEIT: Args = {"global_pool": "avg", "pos_embed": "none", "relative": True, "key_bias": False}
BEIT["init_values"] = 1e-5
AIMV2_HUGE: Args = {**AIMV2, "embed_dim": 1536, "depth": 24, "num_heads": 12, "mlp_ratio": 5.3334}
AIMV2_1B = {**AIMV2_HUGE, "embed_dim": 2048, "num_heads": 16, "mlp_ratio": 5.5}
AIMV2_3B = {**AIMV2_HUGE, "embed_dim": 3072, "num_heads": 24}
EVA: Args = {"global_pool": "avg", "key_bias": False}
EVA02 = {**EVA, "rope": "eva02", "swiglu": True, "mlp_ratio": 16 / 3}
EVA02_CLIP = {**EVA02, "sub_norm": "both", "global_pool": "token"}
ROPE_GAP = {**REG_GAP, "pos_embed": "none", "rope": "eva02", "key_bias": False}
TEST = {"embed_dim": 64, "depth": 6, "num_heads": 2, "mlp_ratio": 3, "img_size": 160}

ARCHITECTURES: tuple[tuple[str, Args], ...] = (
    ("vit_tiny_patch16_[224,384] vit_small_patch[16,32]_[224,384] vit_small_patch8_224", {}),
    ("vit_base_patch[16,32]_[224,384] vit_base_patch8_224 vit_large_patch[16,32]_[224,384]", {}),
    ("vit_large_patch14_224 vit_huge_patch14_224 vit_[giant,gigantic]_patch14_224", {}),
    ("vit_base_patch16_224_miil", NO_BIAS),
    ("vit_small_patch16_36x1_224", {"depth": 36, **SCALED}),
    ("vit_base_patch[32_plus_256,16_plus_240]", SCALED),
    ("vit_medium_patch16_gap_[240,256,384] vit_betwixt_patch16_gap_256", {**NO_BIAS, **SCALED}),
    ("vit_base_patch16_gap_224", {"num_heads": 16}),
    ("vit_huge_patch[14_gap_224,16_gap_448] vit_giant_patch16_gap_224", {}),
    ("vit_[small,base,large]_patch14_dinov2", DINOV2),
    ("vit_giant_patch14_dinov2", GIANT2),
    ("vit_[small,base,large]_patch14_reg4_dinov2", {**DINOV2, "no_embed_class": True}),
    ("vit_giant_patch14_reg4_dinov2", {**GIANT2, "no_embed_class": True}),
    ("vit_base_patch16_[siglip,siglip_gap]_[224,256,384,512]", {}),
    ("vit_large_patch16_[siglip,siglip_gap]_[256,384] vit_so400m_patch14_siglip_[224,378,384]", {}),
    ("vit_so400m_patch14_siglip_gap_[224,378,384,448,896]", {}),
    ("vit_base_patch32_[siglip,siglip_gap]_256 vit_large_patch16_[siglip,siglip_gap]_512", TANH),
    ("vit_so400m_patch16_[siglip,siglip_gap]_[256,384,512]", TANH),
    ("vit_giantopt_patch16_[siglip,siglip_gap]_[256,384]", TANH),
    ("vit_[wee,little,medium,betwixt]_patch16_reg1_gap_256", REG_GAP),
    ("vit_[little,medium]_patch16_reg4_gap_256", REG_GAP),
    ("vit_[mediumd,betwixt]_patch16_reg4_gap_[256,384]", REG_GAP),
    ("vit_base_patch16_reg4_gap_256", {**REG_GAP, "init_values": None}),
    ("vit_so150m_patch16_reg4_map_256 vit_so150m_patch16_reg4_gap_[256,384]", {}),
    ("vit_so150m2_patch16_reg1_gap_[256,384,448]", {**NO_BIAS, **SCALED, "fc_norm": None}),
    ("vit_[xsmall,medium,base]_patch16_clip_224 vit_[medium,betwixt,base]_patch32_clip_224", CLIP),
    ("vit_base_patch32_clip_[256,384,448] vit_base_patch16_[clip_384,plus_clip_240]", CLIP),
    ("vit_large_patch14_clip_[224,336] vit_huge_patch14_clip_[224,336,378]", CLIP),
    ("vit_giant_patch14_clip_224 vit_gigantic_patch14_clip_[224,378]", CLIP),
    ("vit_base_patch[16,32]_clip_quickgelu_224 vit_large_patch14_clip_quickgelu_[224,336]", QUICK),
    ("vit_huge_patch14_clip_quickgelu_[224,378] vit_gigantic_patch14_clip_quickgelu_224", QUICK),
    ("eva_large_patch14_[196,336]", {"global_pool": "avg"}),
    ("beit_[base,large]_patch16_[224,384] beit_large_patch16_512", BEIT),
    ("beitv2_[base,large]_patch16_224", BEIT),
    ("eva_giant_patch14_[224,336,560]", EVA),
    ("eva_giant_patch14_clip_224", {**EVA, "global_pool": "token"}),
    ("eva02_[tiny,small]_patch14_[224,336]", EVA02),
    ("eva02_[base,large]_patch14_[224,448]", {**EVA02, "sub_norm": "mlp"}),
    ("eva02_base_patch16_clip_224 eva02_large_patch14_clip_[224,336]", EVA02_CLIP),
    ("vit_[medium,base]_patch16_rope_reg1_gap_256 vit_betwixt_patch16_rope_reg4_gap_256", ROPE_GAP),
    ("vit_mediumd_patch16_rope_reg1_gap_256", {**ROPE_GAP, **NO_BIAS}),
    ("aimv2_large_patch14_[224,336,448]", {**AIMV2, "mlp_ratio": 5.5}),
    ("aimv2_huge_patch14_[224,336,448]", AIMV2_HUGE),
    ("aimv2_1b_patch14_[224,336,448]", AIMV2_1B),
    ("aimv2_3b_patch14_[224,336,448]", AIMV2_3B),
    ("flexivit_[small,base,large]", {"img_size": 240, "no_embed_class": True}),
    ("vit_[base,large]_patch16_radio_v3", {**RADIO, **SCALED, "reg_tokens": 7}),
    ("vit_huge_patch16_radio_v3", {**RADIO, "reg_tokens": 7}),
    ("vit_giant_patch16_radio_v3", {**RADIO, "reg_tokens": 7, **WIDE_GIANT, "mlp_ratio": 4}),
    ("vit_[so400m,huge]_patch16_radio_v4", {**RADIO, "reg_tokens": 9}),
    ("vit_[base,large,so400m]_patch14_reg1_tipsv2", TIPS),
    ("vit_giant_patch14_reg1_tipsv2", {**GIANT2, **TIPS}),
    ("vit_intern300m_patch14_448", {**INTERN, "init_values": 0.1, "final_norm": False}),
    ("test_vit2", {**TEST, **GAP, "fc_norm": None, "depth": 8, "reg_tokens": 1, **SCALED}),
    ("test_vit", TEST),
    ("vit_tiny_r_s16_p8_[224,384]", {"stem": ResNetConfig(()), "patch_size": 8}),
    ("vit_[small,base]_r26_s32_224", {"stem": ResNetConfig((2, 2, 2, 2)), "patch_size": 1}),
    ("vit_small_r26_s32_384", {"stem": ResNetConfig((2, 2, 2, 2)), "patch_size": 1}),
    ("vit_base_r50_s16_[224,384]", {"stem": ResNetConfig((3, 4, 9)), "patch_size": 1}),
    ("vit_large_r50_s32_[224,384]", {"stem": ResNetConfig((3, 4, 6, 3)), "patch_size": 1}),
    ("deit_[tiny,small]_patch16_224 deit_base_patch16_[224,384]", {}),
    ("deit_[tiny,small]_distilled_patch16_224", {"distilled": True}),
    ("deit_base_distilled_patch16_[224,384]", {"distilled": True}),
    ("deit3_[small,base,large]_patch16_[224,384] deit3_medium_patch16_224", DEIT3),
    ("deit3_huge_patch14_224", DEIT3),
    ("vit_[small,base,large]_patch16_dinov3", {**DINOV3, **NO_BIAS}),
    ("vit_[tiny,small,base,large]_patch16_dinov3_qkvb", DINOV3),
    ("vit_[small,base,large]_patch16_lingbot", {**DINOV3, "img_size": 224, "global_pool": "token"}),
    ("vit_small_plus_patch16_dinov3", {**S_PLUS, **NO_BIAS}),
    ("vit_small_plus_patch16_dinov3_qkvb", S_PLUS),
    ("vit_huge_plus_patch16_dinov3", {**H_PLUS, **NO_BIAS}),
    ("vit_huge_plus_patch16_dinov3_qkvb", H_PLUS),
    ("vit_7b_patch16_dinov3", {**DINOV3_GATED, **SEVEN_B, **NO_BIAS}),
)
"""Names, with choices in brackets, and the overrides of `VisionTransformer`'s defaults that they do
not imply. Size, patch size, registers and resolution are parsed from the name."""

DEFAULTS: Args = {
    "img_size": 224,
    "patch_size": 16,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_ratio": 4,
    "qkv_bias": True,
    "init_values": None,
    "class_token": True,
    "no_embed_class": False,
    "reg_tokens": 0,
    "pos_embed": "learn",
    "pre_norm": False,
    "final_norm": True,
    "fc_norm": None,
    "global_pool": "token",
    "act_layer": None,
}
"""Defaults of the arguments that affect what the network computes."""
_ARG_TYPES: dict[str, Any] = {
    "img_size": int | Size,
    "patch_size": int | Size,
    "mlp_ratio": float,
    "init_values": float | None,
    "pos_embed": Literal["learn", "none", ""],
    "fc_norm": bool | None,
    "global_pool": Literal["token", "avg", "map"],
    "act_layer": Activation | None,
}
"""Types of the arguments whose default does not show them."""

FIXED: Args = {"distilled": False, "swiglu": False, "norm_eps": 1e-6, "stem": None}
FIXED |= {"relative": False, "rope": "none", "key_bias": True, "sub_norm": "none", "norm": "layer"}
"""What only an architecture's name specifies, not JSON. `stem` is a hybrid's ResNet; patch size is
then in cells of the feature map."""


@cache
def architectures() -> dict[str, Args]:
    """Return all supported ViTs and hybrids of timm: name -> complete arguments."""
    return {
        name: {**DEFAULTS, **FIXED, **_parse_name(name), **departures}
        for patterns, departures in ARCHITECTURES
        for pattern in patterns.split()
        for name in expand_choices(pattern)
    }


def _parse_name(name: str) -> Args:
    """Parse the name of an architecture, such as "vit_small_patch14_reg4_dinov2"."""
    args: Args = {}
    for word in name.split("_")[1:]:
        if word in WORDS:
            args |= WORDS[word]
        elif match := re.fullmatch(r"patch(\d+)", word):
            args["patch_size"] = int(match[1])
        elif match := re.fullmatch(r"reg(\d+)", word):
            args["reg_tokens"] = int(match[1])
        elif word.isdecimal():
            args["img_size"] = int(word)
    return args


_FIELD_NAMES = {
    **{name: name for name in ("depth", "num_heads", "class_token", "pre_norm", "swiglu", "stem")},
    **{name: name for name in ("qkv_bias", "key_bias", "norm", "norm_eps", "sub_norm", "rope")},
    "embed_dim": "width",
    "reg_tokens": "num_registers",
    "distilled": "distill_token",
}
"""Arguments -> the `ModelConfig` fields with the same meaning."""
_POOLS = {"token": "token", "avg": "gap", "map": "map"}
"""timm's names for pooling -> ours."""

_SUPPORTED_VALUES: Args = {
    "in_chans": 3,
    "proj_bias": True,
    "qk_norm": False,
    "scale_attn_norm": False,
    "scale_mlp_norm": False,
    "pool_include_prefix": False,
    "dynamic_img_pad": False,
    "embed_norm_layer": None,
    # For a BiT ResNet:
    "global_pool": "avg",
    "output_stride": 32,
    "stem_chs": 64,
    "bottle_ratio": 0.25,
    "channels": [256, 512, 1024, 2048],
}
"""Arguments with the only value that our models support."""

_IGNORED = r"num_classes|.*drop_(path_)?rate|(weight|fix|zero)_init.*|(dynamic_|strict_)?img_size"
"""A regex for arguments that have no effect once weights are loaded, or are handled elsewhere."""


def architecture_from_args(
    name: str,
    args: Mapping[str, Any] | ForeignJson,
    backbone: ForeignJson | None = None,
) -> Architecture:
    """Return the named architecture, with some of its arguments overridden.

    Args:
        backbone: a hybrid's ResNet, if it is not the architecture's own.

    Raises:
        CheckpointError: the name or an argument is not supported.
        ConfigError: the arguments contradict each other.
    """
    overrides = args if isinstance(args, ForeignJson) else ForeignJson(dict(args))
    if name in BITS:
        return _bit_from_args(name, overrides)
    supported = architectures()
    if name not in supported:
        similar = nearest(name, list(supported))
        raise CheckpointError(
            f"timm's architecture '{name}' is not supported",
            hint=f"similar names that are supported: {', '.join(similar)}" if similar else None,
        )
    base = _to_model(supported[name])
    if timm_classes.has_other_class(base):
        overrides = timm_classes.from_class_args(overrides, base)
    if has_other_names(base) and base.swiglu and "mlp_ratio" in overrides:  # of the gate only
        overrides = overrides.merged({"mlp_ratio": 2 * overrides.get("mlp_ratio", float)})
    _check_args(overrides, DEFAULTS)
    types = {key: type(value) for key, value in DEFAULTS.items()} | _ARG_TYPES
    merged = dict(supported[name])
    for key in DEFAULTS.keys() & overrides.values.keys():  # null means false for a flag
        merged[key] = overrides.get(key, types[key], False if types[key] is bool else None)
    if merged["swiglu"] and merged["act_layer"]:  # in place of SiLU
        overrides.refuse("act_layer", "supported in a gated MLP")
    if merged["stem"] is not None and backbone is not None:
        merged["stem"] = _stem_from_backbone(backbone)
    model = _to_model(merged)
    # timm's attention pool uses SiLU beside a gated MLP, and in `Eva` it reads the prefix tokens.
    reads_prefix = timm_classes.has_other_class(model) and model.num_prefix_tokens > 0
    if model.pool == "map" and (model.swiglu or reads_prefix):
        overrides.refuse("global_pool", "supported with this architecture")
    return model


def _check_args(args: ForeignJson, allowed: Collection[str]) -> None:
    """Raise a CheckpointError for an argument that would change what the model computes."""
    for key, value in args.values.items():
        has_effect = not re.fullmatch(_IGNORED, key) and _SUPPORTED_VALUES.get(key, ...) != value
        if key not in allowed and has_effect:
            args.refuse(key, "a value that is supported")


def _to_model(args: Args) -> ModelConfig:
    """Convert timm's arguments to a `ModelConfig`."""
    stride = args["stem"].stride if args["stem"] else 1
    rows, columns = _as_pair(args["patch_size"])
    pool: Any = _POOLS[args["global_pool"]]
    fc_norm = pool == "gap" if args["fc_norm"] is None else args["fc_norm"]
    fields: Any = {ours: args[theirs] for theirs, ours in _FIELD_NAMES.items()}
    fields["key_bias"] |= not args["qkv_bias"]
    parts = 2 if args["swiglu"] else 1  # gate and value, each rounded down
    mlp_dim = args["embed_dim"] * args["mlp_ratio"] / parts
    return ModelConfig(
        **fields,
        mlp_dim=parts * int(min(max(mlp_dim, 0), 1 << 30)),
        patch_size=(rows * stride, columns * stride),
        image_size=_as_pair(args["img_size"]),
        posemb="relative" if args["relative"] else args["pos_embed"] or "none",
        posemb_tokens="patches" if args["no_embed_class"] else "all",
        pool=pool,
        final_norm=args["final_norm"] and not fc_norm,
        fc_norm=args["final_norm"] and fc_norm,
        layer_scale=bool(args["init_values"]),
        patch_bias=not args["pre_norm"],
        activation=args["act_layer"] or "gelu",
    )


def _as_pair(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _stem_from_backbone(config: ForeignJson) -> ResNetConfig:
    """Build a hybrid's stem from blocks per stage, channels per stage and channels of the root."""
    stem = ResNetConfig(tuple(config.get("layers", list[int], [])), config.integer("stem_chs") / 64)
    channels = [stem.width * 4 << stage for stage in range(len(stem.depths))]
    if config.get("channels", list[int], []) != channels:
        config.refuse("channels", f"{channels}")
    return stem


# ---------------------------------------------------------------------------------------------
# BiT ResNets

BITS = {
    f"resnetv2_{depth}x{factor}_bit": bit_resnet(DEPTHS[depth], float(factor))
    for depth, factor in ((50, 1), (50, 3), (101, 1), (101, 3), (152, 2), (152, 4))
}
"""BiT ResNets by name."""


def _bit_from_args(name: str, args: ForeignJson) -> BiTConfig:
    """Return the named BiT ResNet, with some of its arguments overridden."""
    _check_args(args, ("layers", "width_factor"))
    depths = tuple(args.get("layers", list[int], [])) or BITS[name].depths
    factor = args.get("width_factor", float, BITS[name].width_factor)
    return BiTConfig(bit_resnet(depths, factor), args.size("img_size", (224, 224)))


def _bit_name(resnet: ResNetConfig) -> str | None:
    """Return timm's name for a BiT ResNet; None for a size that timm has no function for."""
    size = resnet.depths, resnet.width_factor
    return next((name for name, r in BITS.items() if (r.depths, r.width_factor) == size), None)


# ---------------------------------------------------------------------------------------------
# Models as timm expresses them


TIMM_RESNET: Args = {"std_eps": 1e-8, "std_eps_in": "variance", "norm_eps": 1e-5}
"""Epsilons of a ResNet, which are constants in timm's code, like LayerNorm's (1e-6)."""


def with_timm_epsilons(model: Architecture) -> Architecture:
    """Replace epsilons with the constants in timm's code: those of the ResNet, if there is one, and
    LayerNorm's, if it is smaller (transformers' ViT has 1e-12)."""
    if isinstance(model, BiTConfig):
        return dataclasses.replace(model, resnet=dataclasses.replace(model.resnet, **TIMM_RESNET))
    stem = dataclasses.replace(model.stem, **TIMM_RESNET) if model.stem else None
    return dataclasses.replace(_with_timm_norm_eps(model), stem=stem)


def _with_timm_norm_eps(model: ModelConfig) -> ModelConfig:
    return dataclasses.replace(model, norm_eps=max(model.norm_eps, 1e-6))


def not_in_timm(model: Architecture) -> list[str]:
    """List what timm cannot express about a model; empty if it can load it, that is, if the nearest
    architecture with its overrides is the same model."""
    resnet = model.resnet if isinstance(model, BiTConfig) else model.stem
    reasons, size = [], ""
    if resnet is not None:  # timm's ResNet has our defaults
        bit = {"padding": ("symmetric",)}
        # In a hybrid, a ReLU comes before the max-pool, so its padding does not matter.
        hybrid = {"padding": ("same",), "pool_padding": None}
        unsupported = unsupported_fields(resnet, preact=None, **(bit if resnet.preact else hybrid))
        reasons = [f"a ResNet's {field}" for field in unsupported]
        size = f"of {resnet.depths} blocks, width factor {resnet.width_factor:g}"
    if isinstance(model, BiTConfig):
        return reasons if _bit_name(model.resnet) else [*reasons, f"a BiT ResNet {size}"]
    if model.swiglu and model.pool == "map":
        return ["an attention pool beside a gated MLP"]
    model = _with_timm_norm_eps(model)
    name, overrides = best_architecture(model)
    args = architectures()[name] | overrides
    stem = args["stem"]
    if model.stem and (
        not stem or model.stem.depths != stem.depths or model.stem.width_factor != 1
    ):
        return [*reasons, f"a ResNet stem {size}"]  # whose stride may not fit the image
    try:
        nearest_model = _to_model(args)
    except ConfigError:  # it has an option that these sizes do not allow, such as rotary embeddings
        return [*reasons, "this combination of options"]
    expressible: Args = {k: (v,) for k, v in vars(nearest_model).items()} | {"stem": None}
    if nearest_model.posemb == "learn":  # timm stores a sine-cosine table as a learned one
        expressible["posemb"] = ("learn", "sincos2d")
    if model.swiglu:  # which has its own activation
        expressible["activation"] = None
    if model.posemb_prefix == nearest_model.posemb_prefix:
        expressible["posemb_tokens"] = None
    reasons += unsupported_fields(model, **expressible)
    is_plain = (model.num_registers, model.posemb_prefix, model.pool) == (0, 2, "token")
    if model.distill_token and (not is_plain or model.fc_norm):
        reasons.append("a distillation token with these options")
    if timm_classes.has_other_class(model) and not reasons:
        reasons = timm_classes.not_in_class(model, overrides)
    return reasons


def has_other_names(model: Architecture) -> bool:
    """Whether timm may name tensors differently than we do: in `Eva`, `Beit` and AIMv2."""
    return timm_classes.has_other_class(model) or model.norm == "rms"


def _renamed_rows(model: Architecture) -> tuple[Row, ...]:
    """Return rows for tensors that timm names differently, if it can load the model."""
    if isinstance(model, BiTConfig) or not has_other_names(model) or not_in_timm(model):
        return ()
    return timm_classes.renamed_rows(model)


def timm_differences(info: CheckpointInfo) -> list[str]:
    """List what timm computes differently for a model that it can load."""
    model, differences = info.model, []
    if not info.preprocess.antialias:
        differences.append("timm always resizes images with antialiasing; this model expects none")
    if isinstance(model, BiTConfig):
        return differences
    if model.norm_eps < 1e-6:
        differences.append(
            f"timm uses LayerNorm epsilon 1e-6, not {model.norm_eps}: its logits differ where a "
            "token is near zero"
        )
    if model.posemb == "sincos2d":
        differences.append("timm loads the sine-cosine position embeddings as learned ones")
    if "input_size" in info.provenance:
        sizes = model.image_size, info.provenance["input_size"]
        theirs, ours = (f"{height} x {width}" for height, width in sizes)
        differences.append(f"timm uses images of {theirs} pixels, vit and transformers of {ours}")
    return differences


def best_architecture(model: Architecture) -> tuple[str, Args]:
    """Return timm's architecture with the fewest overrides, and those overrides."""
    if isinstance(model, BiTConfig):
        return _bit_name(model.resnet) or "", {}
    target = _to_args(_with_timm_norm_eps(model))

    def overrides(name: str) -> Args:
        base = dict(_normalized_args()[name])
        if architectures()[name]["fc_norm"] is None:  # timm's default depends on the pooling
            base["fc_norm"] = target["global_pool"] == "avg"
        return {key: value for key, value in target.items() if base[key] != value}

    def rank(name: str) -> tuple[int, int]:
        differing = overrides(name)
        return len(FIXED.keys() & differing), len(differing)

    best = min(architectures(), key=rank)
    return best, {key: value for key, value in overrides(best).items() if key in DEFAULTS}


@cache
def _normalized_args() -> dict[str, Args]:
    """Return the arguments of every architecture, as normalized by `_to_args`."""
    return {name: _to_args(_to_model(args)) for name, args in architectures().items()}


def _to_args(model: ModelConfig) -> Args:
    """Convert a model to timm's arguments, normalized so that they can be compared."""
    ratio = model.mlp_dim / model.width
    if int(ratio * model.width) != model.mlp_dim:  # timm truncates: rounding could lose a unit
        ratio = math.nextafter(ratio, math.inf)
    pools = {ours: theirs for theirs, ours in _POOLS.items()}
    patch = model.patch_kernel
    args = {theirs: getattr(model, ours) for theirs, ours in _FIELD_NAMES.items()} | {
        "img_size": list(model.image_size),
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "mlp_ratio": ratio,
        "init_values": 1e-5 if model.layer_scale else 0.0,  # timm.create_model drops None
        "no_embed_class": model.num_prefix_tokens > 0 and model.posemb_prefix == 0,
        "pos_embed": "none" if model.posemb in ("none", "relative") else "learn",
        "relative": model.posemb == "relative",
        "final_norm": model.final_norm or model.fc_norm,
        "fc_norm": model.fc_norm,
        "global_pool": pools.get(model.pool, "token"),
        "act_layer": "gelu" if model.swiglu else model.activation,
        "stem": model.stem and model.stem.depths,
    }
    return {key: args[key] for key in DEFAULTS | FIXED}


# ---------------------------------------------------------------------------------------------
# config.json

CONFIG = "config.json"
OWN_MODEL_TYPE = "vitcli"
"""A type of model that transformers does not know: without any, it may guess one from the path."""


def from_config(config: ForeignJson) -> CheckpointInfo:
    """Parse a `config.json` in timm's Hub format.

    Raises:
        CheckpointError: it is not one, or has an architecture or an option that is not supported.
    """
    is_old = "pretrained_cfg" not in config  # before 2023: everything in one object
    pretrained = config if is_old else config.nested("pretrained_cfg")
    name = config.get("architecture", str, "").partition(".")[0]
    args = config.nested("model_args")
    sources = [source for source in (config, args, pretrained) if "num_classes" in source]
    num_classes = (sources or [config])[0].integer("num_classes", 1000, 0, 10**9)
    size = pretrained.get("input_size", list[int], [])
    fixed_size = pretrained.get("fixed_input_size", bool, True) or name in BITS
    if "img_size" not in args and size and fixed_size:
        args = args.merged({"img_size": size[1:]})
    backbone = config.nested("resnet_backbone") if "resnet_backbone" in config else None
    try:
        model = architecture_from_args(name, args, backbone).with_classes(num_classes)
        preprocess = _parse_preprocess(pretrained, model.image_size)
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(error.what, where=config.where, hint=error.hint) from error
    dynamic = not fixed_size or args.get("dynamic_img_size", bool, False)
    if isinstance(model, ModelConfig) and dynamic and size and tuple(size[1:]) != model.image_size:
        theirs, ours = ("x".join(map(str, sides)) for sides in (size[1:], model.image_size))
        warn(
            f"timm would resize the position embeddings for images of {theirs} pixels, but {ours} "
            f"is used; to match timm, pass --resolution {theirs} --posemb-method bicubic to "
            "`vit predict`, `evaluate` or `finetune`",
            config.where,
        )
    return CheckpointInfo(
        model,
        preprocess,
        _parse_labels(config if "label_names" in config else pretrained, config, num_classes),
        provenance={"timm": {"architecture": name, "tag": pretrained.get("tag", str, "") or None}},
    )


def _parse_preprocess(pretrained: ForeignJson, size: Size) -> Preprocess:
    """Parse the preprocessing; missing keys have the defaults of timm's `PretrainedCfg`."""
    fields: Args = {
        "interpolation": pretrained.get("interpolation", str, "bicubic"),
        "crop_mode": pretrained.get("crop_mode", str, "center"),
    }
    mean, std = pretrained.triple("mean", IMAGENET[0]), pretrained.triple("std", IMAGENET[1])
    return Preprocess(size, mean, std, crop_pct=pretrained.get("crop_pct", float, 0.875), **fields)


def _parse_labels(source: ForeignJson, config: ForeignJson, count: int) -> tuple[ClassLabel, ...]:
    """Return the class labels in the file, by index; empty if there are not `count` of them."""
    if isinstance(source.values.get("label_names"), dict):
        by_index = source.nested("label_names")
        names = [by_index.get(str(index), str, "") for index in range(len(by_index.values))]
    else:
        names = source.get("label_names", list[str], [])
    if len(names) != count:
        return ()
    description_source = config if "label_descriptions" in config else source
    descriptions = description_source.nested("label_descriptions")
    return tuple(ClassLabel(name, descriptions.get(name, str, name)) for name in names)


def to_config(info: CheckpointInfo) -> dict[str, Any]:
    """Build a `config.json` that timm, transformers and `vit` can read; ours is the "vit" object.

    transformers reads class names from a list `label_names` at the root and fails on a
    `num_classes` inside `model_args`; both need a `pretrained_cfg`, without which neither loads a
    model that timm cannot express.
    """
    model, preprocess = info.model, info.preprocess
    if not_in_timm(model):
        return {"model_type": OWN_MODEL_TYPE, "vit": info.to_dict()}
    is_vit = isinstance(model, ModelConfig)
    name, args = best_architecture(model)
    classifier: Any = "head.fc"
    pool = "avg"
    if isinstance(model, ModelConfig):
        classifier = ["head", "head_dist"] if model.distill_token else "head"
        pool = _to_args(model)["global_pool"]
        if timm_classes.has_other_class(model):
            args = timm_classes.to_class_args(args, model)
        if has_other_names(model) and model.swiglu and "mlp_ratio" in args:
            args["mlp_ratio"] /= 2  # of the gate only
    config: dict[str, Any] = {
        "architecture": name,
        "model_args": args,
        "num_classes": model.num_classes,
        "num_features": model.feature_dim,
        "global_pool": pool,
        "dtype": "float32",  # transformers would compute in the stored dtype
    }
    if info.classes:
        config["label_names"] = unique_names(info.classes)
    if info.score != "softmax":  # so that transformers computes the same scores
        problem_types = {"sigmoid": "multi_label_classification", "none": "regression"}
        config["problem_type"] = problem_types[info.score]
    config["pretrained_cfg"] = {
        "tag": "vit",
        "custom_load": False,
        "input_size": [3, *preprocess.size],
        "fixed_input_size": is_vit,
        "interpolation": preprocess.interpolation,
        "crop_pct": preprocess.crop_pct,
        "crop_mode": preprocess.crop_mode,
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "num_classes": model.num_classes,
        "pool_size": None if is_vit else list(model.grid),
        # The convolution applied to the image: a ResNet's first, or the patch embedding.
        "first_conv": next(
            layer.name for layer in model.layers() if layer.name.endswith(("conv", "proj"))
        ),
        "classifier": classifier,
    }
    return {**config, "vit": info.to_dict()}


# ---------------------------------------------------------------------------------------------
# Tensors

_ANCHORS = (
    ("patch_embed.proj.weight", "blocks.0.norm1.weight"),
    ("patch_embed.proj.weight", "blocks.0.0.norm1.weight"),
    ("stem.conv.weight", "stages.0.blocks.0.norm1.weight"),
)
"""Names that identify a ViT, a ViT with blocks in chunks, and a BiT ResNet."""

_STATISTICS = dict.fromkeys(("deit", "deit3", "dinov2", "intern300m"), IMAGENET)
_STATISTICS |= dict.fromkeys(("clip", "eva", "radio"), layout.CLIP)
"""Means and standard deviations by a part of the architecture's name; others have HALF."""

_ALIASES = rows(
    """
reg_token                register_tokens
reg_token                storage_tokens
blocks.{i}.mlp.fc1.*     blocks.{i}.mlp.w12.*
blocks.{i}.mlp.fc1.*     blocks.{i}.mlp.[w1,w2].*
blocks.{i}.mlp.fc2.*     blocks.{i}.mlp.w3.*
blocks.{i}.attn.qkv.*    blocks.{i}.attn.[q_proj,k_proj,v_proj].*
"""
    + timm_classes.SCALES
    + timm_classes.BIASES
    + timm_classes.GATED
)
"""Names that differ in timm's `Eva`, or in files by the authors of DINOv2, DINOv3 and DeiT III."""


class Timm(Layout):
    """timm's own files, and others with its names. The output format is called "vit": a directory
    that timm, transformers (with its timm wrapper) and `vit` can load."""

    name = "timm"
    library = "timm"
    config_files = (CONFIG,)
    suffixes = ("", ".safetensors")

    def find(self, store: Store) -> Match | None:
        prefixes = (find_prefix(store.tensors, *anchors) for anchors in _ANCHORS)
        prefix = next((prefix for prefix in prefixes if prefix is not None), None)
        if prefix is None:
            return None
        # DINOv2 trains with blocks in chunks, numbered by chunk and by block.
        chunked = (r"^blocks\.\d+\.(\d+\.)", r"blocks.\1")
        tensors = timm_classes.apply_bias_masks(tensors_under(store, prefix, *chunked))
        tensors = with_key_biases(tensors)
        table = identity(tensors)
        table += tuple(r for r in _ALIASES if r.theirs[0].replace("{i}", "0") in tensors)
        drop = r"mask_token$|masked_embed$|(^|\.)decoder_|head\.(mlp|last_layer)|^fc\.\w+\."
        drop += r"|\.bias_mask$|^rope_embed\.periods$|^local_cls_norm\.|relative_position_index$"
        drop += r"|^decoder" if "decoder_pos_embed" in tensors else ""
        drop += r"|^head\.\d" if prefix.endswith("base_encoder.") else ""  # MoCo's projection head
        info = CheckpointInfo.from_metadata(store.metadata, where=store.path)
        facts: Args = {"info": info or _read_config_info(store)}
        if facts["info"] is None and timm_classes.PERIODS in tensors:
            facts = timm_classes.dinov3_match(tensors)
        elif facts["info"] is None and timm_classes.BEIT_TABLE in tensors:
            facts = timm_classes.beit_match(tensors)
        elif facts["info"] is None:
            _check_unambiguous(store, tensors)
            # DeiT, DINO and MAE use the usual ImageNet preprocessing.
            default = Match.default if store.kind == "pickle" else Preprocess()
            facts = {"known": frozenset(), "default": default, **_from_train_args(store)}
        return Match(table, tensors, drop, **facts)

    def unsupported(self, model: Architecture) -> list[str]:
        return []  # our own description is stored too

    def warnings(self, info: CheckpointInfo) -> list[str]:
        model, reasons = info.model, not_in_timm(info.model)
        if not reasons:
            return timm_differences(info)
        adapted, advice = with_timm_epsilons(model), ""
        name, overrides = best_architecture(adapted)
        size_args = {"embed_dim", "depth", "num_heads", "mlp_ratio", "patch_size"}
        if not not_in_timm(adapted) and not size_args & overrides.keys():
            gelu = " and the exact GELU" if isinstance(model, ModelConfig) else ""
            advice = f" (--arch {name} uses timm's epsilons{gelu})"
        return [f"timm cannot load it, as it does not support {', '.join(reasons)}{advice}"]

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        return _renamed_rows(model) + identity(model.tensor_shapes())

    def save(
        self, model: Architecture, tensors: Mapping[str, LazyTensor]
    ) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
        saved, names = super().save(model, tensors)
        return timm_classes.drop_key_biases(saved), {
            ours: (*timm_classes.drop_key_biases(dict.fromkeys(n)),) for ours, n in names.items()
        }

    def metadata(self, info: CheckpointInfo) -> Mapping[str, str]:
        return info.to_metadata()

    def configs(self, info: CheckpointInfo) -> dict[str, dict[str, Any]]:
        return {CONFIG: to_config(info)}

    def resized_config(
        self, name: str, config: ForeignJson, info: CheckpointInfo
    ) -> dict[str, Any] | None:
        if name != CONFIG or not {"architecture", "vit", "pretrained_cfg"} & set(config):
            return None
        size, values = list(info.model.image_size), dict(config.values)
        if "pretrained_cfg" in config:
            pretrained = config.nested("pretrained_cfg").values
            values["pretrained_cfg"] = {**pretrained, "input_size": [3, *size]}
        elif "architecture" in config:
            values["input_size"] = [3, *size]
        if "architecture" in config:
            values["model_args"] = {**config.nested("model_args").values, "img_size": size}
        if "vit" in config:
            values["vit"] = {**config.nested("vit").values, **info.to_dict()}
        return values


def _read_config_info(store: Store) -> CheckpointInfo | None:
    """Read the description in a file's config.json, if it is timm's or ours."""
    path = store.path.parent / CONFIG
    config = read_json(path)
    if config is None or (store.kind == "pickle" and not {"vit", "architecture"} & set(config)):
        return None
    # transformers adds its own type to the configuration of weights that it has written.
    if "vit" in config and config.get("model_type", str, OWN_MODEL_TYPE) == OWN_MODEL_TYPE:
        return CheckpointInfo.from_dict(config.values["vit"], where=path)
    if "architecture" in config:
        return from_config(config)
    if "model_type" in config:
        raise CheckpointError(
            f"the configuration of a transformers model ({config.get('model_type', str)}), but the "
            "tensors have timm's names",
            where=path,
            hint="replace config.json with the one that belongs to these weights",
        )
    raise CheckpointError("not a timm config.json: it has no architecture", where=path)


def _from_train_args(store: Store) -> dict[str, Any]:
    """Return `Match` fields from the options of timm's train.py in a checkpoint. Preprocessing that
    they leave to timm's default for the architecture is assumed from the architecture's family."""
    try:
        args = ForeignJson(parse(store.metadata.get("args", "{}")), store.path, "args.")
    except ValueError:
        return {}
    name = str(args.values.get("model")).partition(".")[0]
    if name not in architectures():
        return {}
    model = architecture_from_args(name, args.nested("model_kwargs"))
    mean, std = next((_STATISTICS[word] for word in name.split("_") if word in _STATISTICS), HALF)
    preprocess = Preprocess(
        mean=args.triple("mean", mean),
        std=args.triple("std", std),
        crop_pct=args.get("crop_pct", float, 0.9 if max(model.image_size) < 300 else 1.0),
        interpolation=cast(Any, args.get("interpolation", str, "") or "bicubic"),
    )
    is_complete = all(key in args for key in ("mean", "std", "crop_pct"))
    names = {"num_heads", "activation", "norm_eps", *(() if "gp" in args else ("pool",))}
    return {
        "fields": {key: getattr(model, key) for key in names},
        "preprocess" if is_complete else "default": preprocess,
    }


def _check_unambiguous(store: Store, tensors: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for tensor names that unsupported architectures also have."""
    if "blocks.0.norm1.weight" not in tensors:
        return

    def has(*names: str) -> bool:
        return any(name in tensors for name in names)

    pre_norm, has_pool = has("norm_pre.weight"), has("attn_pool.latent")
    is_plain = has("cls_token", "blocks.0.attn.qkv.bias", "blocks.0.ls1.gamma", "blocks.0.gamma_1")
    unsupported = {
        "rotary position embeddings": not has("pos_embed", "pos_embed_row")
        or (pre_norm and (has_pool or not has("norm.weight", "fc_norm.weight")))
        or (store.kind != "pickle" and has("blocks.0.gamma_1"))
        or has("blocks.0.attn.q_bias", "blocks.0.attn.q_proj.weight", "blocks.0.mlp.fc1_g.weight"),
        "an attention pool that reads more than the patches": has_pool
        and has("cls_token", "reg_token"),
        "norms behind its branches": not is_plain,
    }
    if feature := next((name for name, possible in unsupported.items() if possible), None):
        raise CheckpointError(
            f"may be a model with {feature}, which is not supported",
            where=store.path,
            hint="put timm's config.json, which specifies the architecture, next to the file",
        )
