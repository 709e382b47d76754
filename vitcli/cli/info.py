"""`vit info`."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import typer

from vitcli.checkpoints.info import unique_names
from vitcli.checkpoints.read import Checkpoint, open_checkpoint
from vitcli.checkpoints.store import files_of
from vitcli.cli import output
from vitcli.cli.options import Fetching
from vitcli.cli.parameters import command
from vitcli.config import (
    Architecture,
    BiTConfig,
    ClassLabel,
    ResNetConfig,
    Size,
    architecture,
    variant_name,
)
from vitcli.fields import option, parse_size
from vitcli.hub import registry

SHOWN_CLASSES = 10
COPIED = ("file", "command", "then")
"""Lines that people copy, which are not folded."""


@dataclass(frozen=True, kw_only=True)
class Info(Fetching):
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
        None, "--images N", "Compute the cost of training on N images, for example 303e6.", min=0
    )
    epochs: float | None = option(
        None, "--epochs N", "Number of passes over the images.  [default: 1]", min=0
    )


@command(Info)
def info(args: Info) -> None:
    """Describe a model and compute the cost of training it.

    Reads only the header of a checkpoint. With --images, also prints the FLOPs of training: 3 x
    forward pass x images x epochs, counting convolutions and matrix products without the head.

    \b
    Examples:
      vit info default
      vit info L/16 --resolution 384 --images 303e6 --epochs 7
    """
    if args.epochs is not None and args.images is None:
        raise typer.BadParameter("requires --images", param_hint="--epochs")
    found: dict[str, Any] = {"model": registry.aliases().get(args.model, args.model)}
    checkpoint, config = None, named_architecture(args.model)
    if config is None:
        with output.FetchDisplay(args.quiet) as fetching:
            checkpoint = open_checkpoint(
                args.model,
                offline=args.offline,
                on_progress=fetching,
                allow_pickle=args.allow_pickle,
            )
        config, found["file"] = checkpoint.info.model, str(checkpoint.file)
    config = config.at(args.resolution) if args.resolution else config
    found |= describe_model(config)
    if checkpoint is not None:
        found |= describe_checkpoint(checkpoint)
    if args.images is not None:
        epochs = 1.0 if args.epochs is None else args.epochs
        # The backward pass costs twice the forward pass, and FLOPs = 2 x MACs.
        exaflops = 3 * 2 * config.macs() * args.images * epochs / 1e18
        found["training"] = {"images": args.images, "epochs": epochs, "exaflops": exaflops}
    if args.json:
        output.json_line(found)
        return
    for name, text in as_lines(found):
        if name in COPIED:
            output.line(f"{name:<20}{output.printable(text)}")
        else:
            output.line(output.entry(name, text, 20, sys.stdout))


def named_architecture(name: str) -> Architecture | None:
    """The architecture of "B/16", "R50+B/16" or "R50x1"; None for other names, such as org/repo.

    Raises:
        ConfigError: the name is of that form, but unknown.
    """
    form = r"(R\d*\+)?[A-Za-z]+/\d+|R\d+x\d+"
    return architecture(name) if re.fullmatch(form, name, re.IGNORECASE) else None


def describe_model(config: Architecture) -> dict[str, Any]:
    """An architecture and its cost, as JSON."""
    return {
        "architecture": variant_name(config),
        "config": dataclasses.asdict(config),
        "parameters": config.num_params(),
        "flops": 2 * config.macs(),
        "grid": config.grid,
        "tokens": None if isinstance(config, BiTConfig) else config.num_tokens,
    }


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """The rest of a checkpoint's description, as JSON."""
    return {
        "preprocess": dataclasses.asdict(checkpoint.info.preprocess),
        "score": checkpoint.info.score,
        "classes": [label._asdict() for label in checkpoint.info.classes],
        "provenance": checkpoint.info.provenance,
        "dtypes": sorted({tensor.dtype for tensor in checkpoint.tensors.values()}),
        "bytes": sum(file.stat().st_size for file in files_of(checkpoint.file)),
    }


def as_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A description as (name, text) for people."""
    config = found["config"]
    yield "model", found["model"]
    if "file" in found:
        size = f"{found['bytes'] / 1e6:,.1f} MB, {', '.join(found['dtypes'])}"
        yield "file", f"{found['file']} ({size})"
    yield "architecture", f"{found['architecture']}: {_sizes(config)}"
    yield "parameters", f"{found['parameters']:,}"
    images = f"{_size(config['image_size'])} px"
    if found["tokens"] is None:
        images += f" or any other size: a feature map of {_size(found['grid'])}"
    else:
        images += f", patches of {_size(config['patch_size'])}: "
        images += f"a grid of {_size(found['grid'])}, {found['tokens']:,} tokens"
    yield "images", images
    yield "forward pass", f"{found['flops'] / 1e9:,.2f} GFLOPs per image"
    if "preprocess" in found:
        yield "preprocessing", _preprocess(found["preprocess"])
        yield "classes", _classes(found["classes"], config["num_classes"], found["score"])
        yield from _provenance(found["provenance"])
    if run := found.get("training"):
        epochs = f"{run['epochs']:g} epoch{'s' if run['epochs'] != 1 else ''}"
        cost = f"{run['exaflops']:,.4g} exaFLOPs"
        yield "training", f"{cost} for {epochs} of {run['images']:,.0f} images"


def _sizes(config: Mapping[str, Any]) -> str:
    if "resnet" in config:
        return f"a BiT ResNet, {_stages(ResNetConfig(**config['resnet']))}"
    vit = (
        f"{config['depth']} blocks, width {config['width']}, {config['num_heads']} heads, "
        f"MLP {config['mlp_dim']}"
    )
    stem = config["stem"]
    return f"{vit}, behind a ResNet, {_stages(ResNetConfig(**stem))}" if stem else vit


def _stages(resnet: ResNetConfig) -> str:
    blocks = ", ".join(map(str, resnet.depths))
    stages = f"stages of {blocks} bottlenecks" if resnet.depths else "its root alone"
    return f"{stages}, {resnet.width} to {resnet.channels} channels"


def _classes(classes: Sequence[Mapping[str, str]], count: int, score: str) -> str:
    if not count:
        return "none; the model computes features"
    names = unique_names(tuple(ClassLabel(**label) for label in classes))
    shown = "; ".join(names[:SHOWN_CLASSES]) + ("; ..." if len(names) > SHOWN_CLASSES else "")
    return f"{count:,} ({score}): {shown or 'without names'}"


def _provenance(stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a checkpoint comes from: the commands that made it, oldest first, then the rest."""
    runs = [run["command"] for run in (*stated.get("history", ()), stated) if run.get("command")]
    yield from zip(["command", *["then"] * len(runs)], runs, strict=False)
    for name, value in stated.items():
        if name == "metrics":
            known = {key: number for key, number in value.items() if number is not None}
            value = ", ".join(
                f"{key.replace('_', ' ')} {f'{x:.4f}' if key.endswith('loss') else f'{x:.2%}'}"
                for key, x in known.items()
            )
        elif name == "posemb_resize":
            name, value = "position embeddings", f"resized, {value['method']}"
        elif name in ("assumed", "left_out", "took"):
            value = "; ".join(value.values() if isinstance(value, dict) else value)
        if name not in ("command", "history") and value not in ("", None, {}):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield name.replace("_", " "), text


def _preprocess(stated: Mapping[str, Any]) -> str:
    how = {"center": "centre crop", "squash": "squashed", "border": "letterbox"}
    crop = how[stated["crop_mode"]]
    crop += f" of {stated['crop_pct']:.1%}" if stated["crop_pct"] != 1 else ""
    filtered = stated["interpolation"] + ("" if stated["antialias"] else " without antialiasing")
    mean, std = (", ".join(f"{v:g}" for v in stated[key]) for key in ("mean", "std"))
    return f"{_size(stated['size'])}, {filtered}, {crop}, mean ({mean}), std ({std})"


def _size(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
