"""Architectures by name: "B/16", "R50+B/16", "R50x1".

Standard library only.
"""

import re
from typing import Any, NamedTuple

from vitcli.architectures.resnet import DEPTHS, BiTConfig, ResNetConfig, bit_resnet
from vitcli.architectures.vit import Architecture, ModelConfig, check_image_size
from vitcli.errors import ConfigError
from vitcli.fields import field_types
from vitcli.words import join_or, pluralize


class Variant(NamedTuple):
    """A row of Table 1 of the paper; Ti and S come from DeiT and AugReg."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int


VARIANTS = {
    "Ti": Variant(12, 192, 768, 3),
    "S": Variant(12, 384, 1536, 6),
    "B": Variant(12, 768, 3072, 12),
    "L": Variant(24, 1024, 4096, 16),
    "H": Variant(32, 1280, 5120, 16),
}


def model_config(variant: str, **overrides: Any) -> ModelConfig:
    """Return the configuration of a ViT such as "B/16" or a hybrid such as "R50+B/16", with fields
    overridden. The patch size of a hybrid is its stride: at 16 the blocks of stage 4 are in stage 3
    (section 3.1). A root only, "R+Ti/16", has the patches of the released model: 8 x 8 cells of 4
    pixels. "R(3-4)x0.5+Ti/8" gives the blocks of each stage, and has half the channels.

    Raises:
        ConfigError: there is no such variant.
    """
    match = re.fullmatch(_VIT, variant, re.IGNORECASE)
    name = {size.lower(): size for size in VARIANTS}.get(match["size"].lower()) if match else None
    if match is None or name is None or not int(match["patch"]):
        raise _unknown_variant(variant)
    patch, stem = int(match["patch"]), None
    if match["number"] is not None:
        stem = _parse_stem(match, patch, variant)
        patch = ROOT_PATCH if (stem.depths, patch) == ((), 16) else patch
    sizes = {**VARIANTS[name]._asdict(), "patch_size": (patch, patch), "stem": stem}
    config = ModelConfig(**(sizes | overrides))
    check_image_size(config.image_size, config)
    return config


_RESNET = r"R(?P<number>\d{,9})(?:\((?P<blocks>\d{1,9}(-\d{1,9})*)\))?(?:x(?P<factor>\d+(\.\d+)?))?"
"""A ResNet: its number or the blocks of its stages, and its width factor."""
_VIT = rf"(?:{_RESNET}\+)?(?P<size>[A-Za-z]{{1,2}})/(?P<patch>\d{{1,9}})"
"""A ViT: its size and patch size, after the ResNet of a hybrid."""


def looks_like_variant(name: str) -> bool:
    """Whether a name has the form of a variant, known or not."""
    resnet = re.fullmatch(_RESNET, name, re.IGNORECASE)
    return bool(re.fullmatch(_VIT, name, re.IGNORECASE) or (resnet and resnet["factor"]))


ROOT_PATCH = 32
"""Patch size of R+Ti/16 in pixels: 16 in the name, but the actual stride is 32."""


def _parse_stem(match: re.Match[str], stride: int, variant: str) -> ResNetConfig:
    depths = _parse_depths(match, variant)
    if match["number"] and stride not in (16, 32):
        raise _unknown_variant(variant)
    if match["number"] and stride == 16:
        depths = (*depths[:2], depths[2] + depths[3])
    return ResNetConfig(depths, float(match["factor"] or 1))


def _parse_depths(match: re.Match[str], variant: str) -> tuple[int, ...]:
    """The blocks per stage of a `_RESNET` match; empty for only a root."""
    number, blocks = match["number"], match["blocks"]
    if number and (blocks or int(number) not in DEPTHS):
        raise _unknown_variant(variant)
    if blocks:
        return tuple(map(int, blocks.split("-")))
    return DEPTHS[int(number)] if number else ()


def bit_config(variant: str, **overrides: Any) -> BiTConfig:
    """Return the configuration of a BiT ResNet such as "R50x1", as in timm.

    Raises:
        ConfigError: there is no such variant.
    """
    match = re.fullmatch(_RESNET, variant, re.IGNORECASE)
    depths = _parse_depths(match, variant) if match and match["factor"] else ()
    if match is None or not depths:
        raise _unknown_variant(variant)
    return BiTConfig(bit_resnet(depths, float(match["factor"])), **overrides)


def architecture(variant: str, **overrides: Any) -> Architecture:
    """Return the configuration of any variant: "B/16", "R50+B/16", "R50x1".

    Raises:
        ConfigError: there is no such variant, or it has no such field.
    """
    is_vit = "/" in variant
    if not is_vit:
        bit_config(variant)  # an unknown name is reported before an unknown field
    if unknown := overrides.keys() - field_types(ModelConfig if is_vit else BiTConfig):
        raise ConfigError(f"{variant} has no field '{min(unknown)}'")
    return model_config(variant, **overrides) if is_vit else bit_config(variant, **overrides)


def _unknown_variant(variant: str) -> ConfigError:
    resnets = join_or(["R", *(f"R{depth}" for depth in DEPTHS)])
    return ConfigError(
        f"unknown architecture '{variant}'",
        hint=f"use a size ({', '.join(VARIANTS)}) and a patch size, such as B/16; a hybrid "
        f"({resnets} before a +), such as R50+B/16 or R+Ti/16; or a BiT ResNet, such as R50x1",
    )


def variant_name(config: Architecture) -> str:
    """The short name of an architecture, such as "B/16"; other sizes are spelled out."""
    if isinstance(config, BiTConfig):
        return f"{_resnet_name(config.resnet.depths)}x{config.resnet.width_factor:g}"
    sizes = Variant(config.depth, config.width, config.mlp_dim, config.num_heads)
    rows, columns = config.patch_size
    patch = str(rows) if rows == columns else f"{rows}x{columns}"
    stem = ""
    if config.stem:
        factor = config.stem.width_factor
        stem = _resnet_name(config.stem.depths) + (f"x{factor:g}" if factor != 1 else "") + "+"
        if not config.stem.depths and config.patch_size == (ROOT_PATCH, ROOT_PATCH):
            patch = "16"
    for name, variant in VARIANTS.items():
        if sizes == variant:
            return f"{stem}{name}/{patch}"
        if sizes == variant._replace(depth=config.depth):
            return f"{stem}{name}/{patch} with {pluralize(config.depth, 'block')}"
    return f"{stem}width {config.width}, depth {config.depth}, patch {patch}"


def _resnet_name(depths: tuple[int, ...]) -> str:
    """The name of a ResNet: "R50", even if stage 4 is merged into stage 3; "R" for only a root."""
    for name, stages in DEPTHS.items():
        if depths in (stages, (*stages[:2], stages[2] + stages[3])):
            return f"R{name}"
    return f"R({'-'.join(map(str, depths))})" if depths else "R"
