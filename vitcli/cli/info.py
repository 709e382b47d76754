"""`vit info`."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitcli.checkpoints.info import resize_text, unique_names
from vitcli.checkpoints.read import Checkpoint
from vitcli.checkpoints.store import files_of
from vitcli.cli import output
from vitcli.cli.options import DownloadOptions, read_checkpoint
from vitcli.cli.parameters import UsageError, command
from vitcli.config import (
    METRICS,
    Architecture,
    BiTConfig,
    ClassLabel,
    Preprocess,
    ResNetConfig,
    Size,
    architecture,
    looks_like_variant,
    variant_name,
)
from vitcli.errors import HubError
from vitcli.fields import option, parse_size
from vitcli.hub import registry
from vitcli.layouts.layout import SIZES
from vitcli.words import format_flops, format_setting, join_numbers, pluralize

SHOWN_CLASSES = 10
INDENT = 20
UNWRAPPED = ("file", "command", "then")
"""Entries that users copy, which are not wrapped."""
NAMES = {
    "train_images": "training images",
    "parent": "initial weights",
    "posemb_resize": "positions",
    "steps": "stored step",
    "seconds": "time",
    "converted_from": "layout",
}
"""Display names of provenance keys; other keys are shown with spaces for underscores."""


@dataclass(frozen=True, kw_only=True)
class Info(DownloadOptions):
    """Options of `vit info`."""

    model: str = option(
        ..., "MODEL", "Model name, path, Hub repo, or an architecture such as B/16."
    )
    resolution: Size | None = option(
        None,
        "--resolution N|HxW",
        "Input size in pixels.  [default: the model's]",
        parse=parse_size,
    )
    images: float | None = option(
        None, "--images N", "Compute the cost of training on N images, for example 303e6.", min=1
    )
    epochs: float | None = option(
        None, "--epochs X", "Number of passes over the images.  [default: 1]", above=0
    )


@command(Info)
def info(args: Info) -> None:
    """Describe a model and compute the cost of training it.

    Reads only the header of a checkpoint; a model on the Hub is downloaded first (`vit models show`
    describes one without downloading it). With --images, also prints the FLOPs of training: 3 x
    forward pass x images x epochs, counting convolutions and matrix products, except those of the
    head.

    \b
    Examples:
      vit info default
      vit info L/16 --resolution 384 --images 303e6 --epochs 7
    """
    if args.epochs is not None and args.images is None:
        raise UsageError("--epochs requires --images")
    fields: dict[str, Any] = {"model": registry.aliases().get(args.model, args.model)}
    checkpoint, config = None, named_architecture(args.model)
    if config is None:
        try:
            checkpoint = read_checkpoint(args, args.model)
        except HubError as error:
            if registry.find(args.model):
                error.add_note(f"`vit models show {args.model}` needs no download")
            raise
        config, fields["file"] = checkpoint.info.model, str(checkpoint.file)
    if args.resolution:
        config = config.with_image_size(args.resolution)
        if checkpoint is not None:
            preprocess = dataclasses.replace(checkpoint.info.preprocess, size=args.resolution)
            resized = dataclasses.replace(checkpoint.info, model=config, preprocess=preprocess)
            checkpoint = dataclasses.replace(checkpoint, info=resized)
    fields |= describe_model(config)
    if checkpoint is not None:
        fields |= _describe_checkpoint(checkpoint)
    if args.images is not None:
        epochs = 1.0 if args.epochs is None else args.epochs
        # The backward pass costs twice the forward pass, and FLOPs = 2 x MACs.
        flops = 3 * 2 * config.macs() * args.images * epochs
        fields["training"] = {"images": args.images, "epochs": epochs, "exaflops": flops / 1e18}
    if args.json:
        output.json_line(fields)
        return
    lines = [("model", fields["model"])]
    if checkpoint is not None:
        size = f"{fields['bytes'] / 1e6:,.1f} MB, {', '.join(fields['dtypes'])}"
        lines.append(("file", f"{checkpoint.file} ({size})"))
    lines += architecture_lines(config)
    if checkpoint is not None:
        meta = checkpoint.info
        lines += use_lines(meta.preprocess, meta.classes, config.num_classes, meta.score)
        lines += _provenance_lines(meta.provenance)
    if args.images is not None:
        schedule = f"{epochs:g} epoch{'s' * (epochs != 1)} of {args.images:,.0f} images"
        lines.append(("training", f"{format_flops(flops)} for {schedule}"))
    print_lines(lines)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print (name, text) pairs, wrapped on a terminal unless in UNWRAPPED."""
    for name, text in lines:
        if name in UNWRAPPED:
            output.line(f"{name:<{INDENT}}{text}")
        else:
            output.line(*output.format_entry(name, text, INDENT, sys.stdout))


def named_architecture(name: str) -> Architecture | None:
    """Return the architecture of "B/16", "R50+B/16" or "R50x1"; None for names such as org/repo.

    Raises:
        ConfigError: the name has that form but is unknown.
    """
    return architecture(name) if looks_like_variant(name) else None


def describe_model(config: Architecture) -> dict[str, Any]:
    """Return an architecture and its cost as a JSON object."""
    return {
        "architecture": variant_name(config),
        "config": dataclasses.asdict(config),
        "parameters": config.num_params(),
        "flops": 2 * config.macs(),
        "grid": config.grid,
        "tokens": None if isinstance(config, BiTConfig) else config.num_tokens,
    }


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the rest of a checkpoint's description as a JSON object."""
    return {
        "preprocess": dataclasses.asdict(checkpoint.info.preprocess),
        "score": checkpoint.info.score,
        "classes": [label._asdict() for label in checkpoint.info.classes],
        "provenance": checkpoint.info.provenance,
        "dtypes": sorted({tensor.dtype for tensor in checkpoint.tensors.values()}),
        "bytes": sum(file.stat().st_size for file in files_of(checkpoint.file)),
    }


def architecture_lines(config: Architecture) -> Iterator[tuple[str, str]]:
    """Yield an architecture and its cost as (name, text) pairs."""
    name, sizes = variant_name(config), _format_sizes(config)
    yield "architecture", sizes if "width" in name else f"{name}: {sizes}"
    if options := _format_options(config):
        yield "options", options
    yield "parameters", f"{config.num_params():,}"
    images, grid = f"{_shape(config.image_size)} px", _shape(config.grid)
    if isinstance(config, BiTConfig):
        yield "images", f"{images} or any other size: a feature map of {grid}"
    else:
        patches = f"patches of {_shape(config.patch_size)}: a grid of {grid}"
        yield "images", f"{images}, {patches}, {pluralize(config.num_tokens, 'token')}"
    yield "forward pass", f"{format_flops(2 * config.macs())} per image, without the head"


def _format_options(config: Architecture) -> str:
    """Return the non-default fields, except sizes and the stem, as in `--set KEY=VALUE`."""
    if isinstance(config, BiTConfig):
        return ""
    values = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in SIZES | {"stem"} and getattr(config, field.name) != field.default
    }
    return ", ".join(format_setting(name, value) for name, value in values.items())


def _format_sizes(config: Architecture) -> str:
    if isinstance(config, BiTConfig):
        return f"a BiT ResNet with {_format_stages(config.resnet)}"
    vit = (
        f"{pluralize(config.depth, 'block')}, width {config.width}, "
        f"{pluralize(config.num_heads, 'head')}, MLP {config.mlp_dim}"
    )
    if config.stem and not config.stem.depths:
        return f"{vit}, after a ResNet's first convolution ({config.stem.width} channels)"
    return f"{vit}, after a ResNet with {_format_stages(config.stem)}" if config.stem else vit


def _format_stages(resnet: ResNetConfig) -> str:
    channels = f"{resnet.width} to {resnet.channels:,} channels"
    return f"stages of {join_numbers(resnet.depths)} bottlenecks and {channels}"


def use_lines(
    preprocess: Preprocess, classes: Sequence[ClassLabel], num_classes: int, score: str
) -> Iterator[tuple[str, str]]:
    """Yield the preprocessing and the classes as (name, text) pairs."""
    parts = [_shape(preprocess.size), preprocess.interpolation, f"crop_mode {preprocess.crop_mode}"]
    parts[1] += "" if preprocess.antialias else " without antialiasing"
    parts[2] += f" (crop_pct {preprocess.crop_pct:g})" if preprocess.crop_pct != 1 else ""
    for key in ("mean", "std"):
        parts.append(f"{key} ({', '.join(f'{v:g}' for v in getattr(preprocess, key))})")
    yield "preprocessing", ", ".join(parts)
    names = unique_names(tuple(classes))
    listed = "; ".join(names[:SHOWN_CLASSES]) + ("; ..." if len(names) > SHOWN_CLASSES else "")
    text = f"{num_classes:,} ({score})" + (f": {listed}" if listed else ", without names")
    yield "classes", text if num_classes else "none; the model computes features"


def _provenance_lines(provenance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the provenance as (name, text) pairs, starting with the command."""
    runs = (*provenance.get("history", ()), provenance)
    commands = [run["command"] for run in runs if run.get("command")]
    if commands:
        yield "command", commands[-1]
    if len(commands) > 1:
        yield "earlier runs", f"{len(commands) - 1} (listed by --json and in the model card)"
    for name, value in provenance.items():
        if name == "metrics":
            value = ", ".join(
                f"{_format_metric(key)} {f'{x:.4f}' if key.endswith('loss') else f'{x:.2%}'}"
                for key, x in value.items()
                if x is not None
            )
        elif name == "steps":
            value = f"{value:,}{', the last' if provenance.get('store') == 'last' else ''}"
        elif name == "train_images":
            value = f"{value:,}"
        elif name == "seconds":
            value = output.format_duration(value)
        elif name == "posemb_resize":
            value = f"resized {resize_text(value)}"
        elif name == "timm":
            value = ", ".join(str(part) for part in value.values() if part)
        elif name == "input_size":
            value = f"{_shape(value)} px"
        elif name in ("assumed", "left_out", "took", "average_of"):
            value = "; ".join(value.values() if isinstance(value, Mapping) else value)
        if name not in ("command", "history", "store") and value not in ("", None, {}):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield NAMES.get(name, name.replace("_", " ")), text


def _format_metric(key: str) -> str:
    """Return the display name of a metric: "val top-1" for "val_top1"."""
    split, _, metric = key.partition("_")
    return f"{split} {METRICS[metric][1] if metric in METRICS else metric.replace('_', ' ')}"


def _shape(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
