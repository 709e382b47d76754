"""timm's Vision Transformers and hybrids by name: a table of what each name says and does not say.

Argument names are those of timm's `VisionTransformer`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

Args = dict[str, Any]

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
"""The word after the family in a timm name."""

GAP = {"class_token": False, "global_pool": "avg", "fc_norm": False}
REG_GAP = {"class_token": False, "global_pool": "avg", "no_embed_class": True, "init_values": 1e-5}
MAP = {"class_token": False, "global_pool": "map"}
TANH = {"act_layer": "gelu_tanh"}
CLIP = {"pre_norm": True, "norm_eps": 1e-5}
QUICK = {**CLIP, "act_layer": "quick_gelu"}
SCALED = {"init_values": 1e-5}
DINOV2 = {**SCALED, "img_size": 518}
# SwiGLU's gate and value are one matrix, so its ratio is twice the usual 8/3.
GIANT2 = {**DINOV2, "embed_dim": 1536, "num_heads": 24, "mlp_ratio": 5.33334, "swiglu": True}
DEIT3 = {"init_values": 1e-6, "no_embed_class": True}

ARCHITECTURES: tuple[tuple[str, Args], ...] = (
    ("vit_tiny_patch16_{224,384}", {}),
    ("vit_small_patch{16,32}_{224,384}", {}),
    ("vit_small_patch8_224", {}),
    ("vit_base_patch{16,32}_{224,384}", {}),
    ("vit_base_patch8_224", {}),
    ("vit_large_patch{16,32}_{224,384}", {}),
    ("vit_large_patch14_224", {}),
    ("vit_huge_patch14_224", {}),
    ("vit_{giant,gigantic}_patch14_224", {}),
    ("vit_base_patch16_224_miil", {"qkv_bias": False}),
    ("vit_small_patch16_36x1_224", {"depth": 36, **SCALED}),
    ("vit_base_patch{32_plus_256,16_plus_240}", {**SIZES["plus"], **SCALED}),
    ("vit_medium_patch16_gap_{240,256,384}", {**GAP, "qkv_bias": False, **SCALED}),
    ("vit_betwixt_patch16_gap_256", {**GAP, "qkv_bias": False, **SCALED}),
    ("vit_base_patch16_gap_224", {**GAP, "num_heads": 16}),
    ("vit_huge_patch{14_gap_224,16_gap_448}", GAP),
    ("vit_giant_patch16_gap_224", GAP),
    ("vit_{small,base,large}_patch14_dinov2", DINOV2),
    ("vit_giant_patch14_dinov2", GIANT2),
    ("vit_{small,base,large}_patch14_reg4_dinov2", {**DINOV2, "no_embed_class": True}),
    ("vit_giant_patch14_reg4_dinov2", {**GIANT2, "no_embed_class": True}),
    ("vit_base_patch32_siglip_256", {**MAP, **TANH}),
    ("vit_base_patch16_siglip_{224,256,384,512}", MAP),
    ("vit_large_patch16_siglip_{256,384}", MAP),
    ("vit_large_patch16_siglip_512", {**MAP, **TANH}),
    ("vit_so400m_patch14_siglip_{224,378,384}", MAP),
    ("vit_so400m_patch16_siglip_{256,384,512}", {**MAP, **TANH}),
    ("vit_giantopt_patch16_siglip_{256,384}", {**MAP, **TANH}),
    ("vit_base_patch32_siglip_gap_256", {**GAP, **TANH}),
    ("vit_base_patch16_siglip_gap_{224,256,384,512}", GAP),
    ("vit_large_patch16_siglip_gap_{256,384}", GAP),
    ("vit_large_patch16_siglip_gap_512", {**GAP, **TANH}),
    ("vit_so400m_patch14_siglip_gap_{224,378,384,448,896}", GAP),
    ("vit_so400m_patch16_siglip_gap_{256,384,512}", {**GAP, **TANH}),
    ("vit_giantopt_patch16_siglip_gap_{256,384}", {**GAP, **TANH}),
    ("vit_{wee,little,medium,betwixt}_patch16_reg1_gap_256", REG_GAP),
    ("vit_{little,medium,mediumd,betwixt}_patch16_reg4_gap_256", REG_GAP),
    ("vit_{mediumd,betwixt}_patch16_reg4_gap_384", REG_GAP),
    ("vit_base_patch16_reg4_gap_256", {**REG_GAP, "init_values": None}),
    ("vit_so150m_patch16_reg4_map_256", MAP),
    ("vit_so150m_patch16_reg4_gap_{256,384}", GAP),
    (
        "vit_so150m2_patch16_reg1_gap_{256,384,448}",
        {"class_token": False, "global_pool": "avg", "qkv_bias": False, **SCALED},
    ),
    ("vit_{xsmall,medium,base}_patch16_clip_224", CLIP),
    ("vit_{medium,betwixt,base}_patch32_clip_224", CLIP),
    ("vit_base_patch32_clip_{256,384,448}", CLIP),
    ("vit_base_patch16_clip_384", CLIP),
    ("vit_base_patch16_plus_clip_240", {**SIZES["plus"], **CLIP}),
    ("vit_large_patch14_clip_{224,336}", CLIP),
    ("vit_huge_patch14_clip_{224,336,378}", CLIP),
    ("vit_giant_patch14_clip_224", CLIP),
    ("vit_gigantic_patch14_clip_{224,378}", CLIP),
    ("vit_base_patch{16,32}_clip_quickgelu_224", QUICK),
    ("vit_large_patch14_clip_quickgelu_{224,336}", QUICK),
    ("vit_huge_patch14_clip_quickgelu_{224,378}", QUICK),
    ("vit_gigantic_patch14_clip_quickgelu_224", QUICK),
    ("test_vit", {"embed_dim": 64, "depth": 6, "num_heads": 2, "mlp_ratio": 3, "img_size": 160}),
    ("vit_tiny_r_s16_p8_{224,384}", {"stem": (), "patch_size": 8}),
    ("vit_{small,base}_r26_s32_224", {"stem": (2, 2, 2, 2), "patch_size": 1}),
    ("vit_small_r26_s32_384", {"stem": (2, 2, 2, 2), "patch_size": 1}),
    ("vit_base_r50_s16_{224,384}", {"stem": (3, 4, 9), "patch_size": 1}),
    ("vit_large_r50_s32_{224,384}", {"stem": (3, 4, 6, 3), "patch_size": 1}),
    ("deit_{tiny,small}_patch16_224", {}),
    ("deit_base_patch16_{224,384}", {}),
    ("deit_{tiny,small}_distilled_patch16_224", {"distilled": True}),
    ("deit_base_distilled_patch16_{224,384}", {"distilled": True}),
    ("deit3_{small,base,large}_patch16_{224,384}", DEIT3),
    ("deit3_medium_patch16_224", DEIT3),
    ("deit3_huge_patch14_224", DEIT3),
)
"""Names, with alternatives in braces, and what a name does not say by itself: departures from
`VisionTransformer`'s defaults. Size, patch, registers and resolution are read from the name."""

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
"""The arguments that decide what the network computes."""

FIXED: Args = {"distilled": False, "swiglu": False, "norm_eps": 1e-6, "stem": None}
"""What only an architecture's name decides: JSON cannot say it. `stem` is a hybrid's ResNet, as
blocks a stage; its patch size counts cells of the feature map."""


@cache
def architectures() -> dict[str, Args]:
    """Every ViT and hybrid of timm's that we know: name -> all its arguments."""
    return {
        name: {**DEFAULTS, **FIXED, **_said_by(name), **departures}
        for pattern, departures in ARCHITECTURES
        for name in _expand(pattern)
    }


def _expand(pattern: str) -> Iterator[str]:
    """Alternatives in braces, as a shell expands them."""
    match = re.search(r"\{([^}]*)\}", pattern)
    if match is None:
        yield pattern
        return
    for word in match[1].split(","):
        yield from _expand(pattern[: match.start()] + word + pattern[match.end() :])


def _said_by(name: str) -> Args:
    """What an architecture's name says: "vit_small_patch14_reg4_dinov2"."""
    args: Args = {}
    for word in name.split("_")[1:]:
        if word in SIZES:
            args |= SIZES[word]
        elif match := re.fullmatch(r"patch(\d+)", word):
            args["patch_size"] = int(match[1])
        elif match := re.fullmatch(r"reg(\d+)", word):
            args["reg_tokens"] = int(match[1])
        elif word.isdecimal():
            args["img_size"] = int(word)
    return args
