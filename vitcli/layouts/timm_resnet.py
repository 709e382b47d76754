"""timm's BiT ResNets, and the ResNets that its hybrids have for a stem, in and out of its words.

Argument names are those of timm's `ResNetV2`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from vitcli.config import BiTConfig, ResNetConfig, Size
from vitcli.errors import CheckpointError
from vitcli.layouts.timm_names import Args
from vitcli.resnets import DEPTHS, bit_resnet

NAME = re.compile(r"resnetv2_(\d+)x(\d+)_bit")

RELEASED = ("50x1", "50x3", "101x1", "101x3", "152x2", "152x4")
"""What stands between "resnetv2_" and "_bit" in timm's names."""

NEUTRAL: Args = {
    "in_chans": 3,
    "global_pool": "avg",
    "output_stride": 32,
    "stem_chs": 64,
    "bottle_ratio": 0.25,
    "channels": [256, 512, 1024, 2048],
}
"""Arguments with the one value that our model has."""

IGNORED = re.compile(r"num_classes|img_size|.*drop_(path_)?rate|zero_init_last")
"""Arguments that change nothing once the weights are loaded, or are read elsewhere."""


def bit_from_args(name: str, args: Args) -> BiTConfig | None:
    """The BiT ResNet of that name with some of its arguments replaced; None if it is none.

    Raises:
        CheckpointError: an argument is not known to us.
        ConfigError: no ResNet has these sizes.
    """
    match = NAME.fullmatch(name)
    if match is None or int(match[1]) not in DEPTHS:
        return None
    for key, value in args.items():
        known = key in ("layers", "width_factor") or IGNORED.fullmatch(key)
        if not known and not (key in NEUTRAL and _same(value, NEUTRAL[key])):
            raise CheckpointError(f"timm's option {key}={value!r} is not one that vit knows")
    depths = tuple(int(depth) for depth in args.get("layers") or DEPTHS[int(match[1])])
    factor = float(args.get("width_factor") or match[2])
    return BiTConfig(bit_resnet(depths, factor), _pair(args.get("img_size", 224)))


def _same(value: Any, other: Any) -> bool:
    return bool((list(value) if isinstance(value, tuple) else value) == other)


def _pair(size: Any) -> Size:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def bit_name(resnet: ResNetConfig) -> str | None:
    """timm's name of a BiT ResNet of these sizes; None if it has none. (Its own functions take no
    other sizes, though its class would.)"""
    for sizes in RELEASED:
        known = bit_from_args(f"resnetv2_{sizes}_bit", {})
        if known is not None and known.resnet == bit_resnet(resnet.depths, resnet.width_factor):
            return f"resnetv2_{sizes}_bit"
    return None


def bit_not_in_timm(model: BiTConfig) -> list[str]:
    """What of a BiT ResNet timm has no way to say; empty if it can be said."""
    reasons = resnet_not_in_timm(model.resnet)
    if bit_name(model.resnet) is None:
        depths, factor = model.resnet.depths, model.resnet.width_factor
        reasons.append(f"a BiT ResNet of {depths} blocks, width factor {factor:g}")
    return reasons


def with_timms_epsilons(resnet: ResNetConfig) -> ResNetConfig:
    """The ResNet as timm computes it: its epsilons are constants in timm's code."""
    timm = bit_resnet(resnet.depths, 1) if resnet.preact else ResNetConfig(resnet.depths)
    epsilons = {name: getattr(timm, name) for name in ("std_eps", "std_eps_in", "norm_eps")}
    return dataclasses.replace(resnet, **epsilons)


def resnet_not_in_timm(resnet: ResNetConfig) -> list[str]:
    """What of a ResNet timm has no way to say; empty if it can be said."""
    timm = bit_resnet(resnet.depths, 1) if resnet.preact else ResNetConfig(resnet.depths)
    checks = {
        f"weight standardisation's epsilon {resnet.std_eps} in the {resnet.std_eps_in}": (
            (resnet.std_eps, resnet.std_eps_in) != (timm.std_eps, timm.std_eps_in)
        ),
        f"GroupNorm epsilon {resnet.norm_eps}": resnet.norm_eps != timm.norm_eps,
        f"{resnet.padding} padding": resnet.padding != timm.padding,
        # A hybrid's pool stands behind a ReLU, where the border decides nothing.
        "-inf around the max-pool": resnet.preact and resnet.pool_padding != timm.pool_padding,
    }
    return [what for what, impossible in checks.items() if impossible]


def stem_from_backbone(said: dict[str, Any]) -> ResNetConfig:
    """A hybrid's stem by its sizes, which timm's own config.json cannot hold: blocks a stage,
    channels a stage and channels of the root.

    Raises:
        CheckpointError: our stems have other channels.
        KeyError: a size is missing.
    """
    stem = ResNetConfig(tuple(said["layers"]), int(said["stem_chs"]) / 64)
    channels = [stem.width * 4 << stage for stage in range(len(stem.depths))]
    if list(said["channels"]) != channels:
        raise CheckpointError(
            f"a ResNet of {said['channels']} channels behind {stem.width} is not one that vit knows"
        )
    return stem
