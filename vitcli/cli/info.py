"""`vit info`."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from vitcli.checkpoints import store
from vitcli.checkpoints.info import CheckpointInfo, unique_names
from vitcli.checkpoints.read import read_info
from vitcli.cli import options, output
from vitcli.cli.options import parse_resolution
from vitcli.config import (
    Architecture,
    BiTConfig,
    ClassLabel,
    ResNetConfig,
    architecture,
    variant_name,
)

Described = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model's name, a path, a Hub repo, or an architecture such as B/16.",
        show_default=False,
        autocompletion=options.complete_model,
    ),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        metavar="N|HxW",
        help="Count for images of this size.  [default: the model's]",
    ),
]
Images = Annotated[
    float | None,
    typer.Option("--images", min=0, metavar="N", help="Images of a training set, as in 303e6."),
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", min=0, metavar="N", help="Passes over them.  [default: 1]"),
]

SHOWN_CLASSES = 10
"""More are counted and not named one by one."""
COPIED = ("file", "command", "then")
"""Lines that people copy: they are not folded."""


def info(
    model: Described,
    resolution: Resolution = None,
    images: Images = None,
    epochs: Epochs = None,
    json: options.Json = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Describe a model, and count what a run costs.

    Headers are read, not weights. With --images (and --epochs), the cost of training as well:
    3 x forward x images x epochs, convolutions and matrix products without the head.
    """
    if epochs is not None and images is None:
        raise typer.BadParameter("--epochs are of --images N: give both")
    if not all(math.isfinite(number or 0) for number in (images, epochs)):
        raise typer.BadParameter("--images and --epochs are numbers, not infinite")
    size = parse_resolution(resolution) if resolution else None
    checkpoint, config = None, _variant(model)
    told: dict[str, Any] = {"model": model}
    if config is None:
        with output.FetchDisplay(quiet) as fetching:
            checkpoint, file = read_info(model, offline, fetching, allow_pickle)
        config = checkpoint.model
        told["file"] = str(file)
    config = config.at(size) if size else config
    told |= describe_model(config)
    if checkpoint is not None:
        told |= describe_checkpoint(checkpoint) | describe_storage(Path(told["file"]))
    if images is not None:
        epochs = 1.0 if epochs is None else epochs
        flops = training_flops(config, images, epochs)
        told["training"] = {"images": images, "epochs": epochs, "exaflops": flops / 1e18}
    if json:
        output.json_line(told)
        return
    for name, text in as_lines(told):
        if name in COPIED:
            output.line(f"{name:<20}{output.printable(text)}")
        else:
            output.line(output.entry(name, text, 20, sys.stdout))


def _variant(name: str) -> Architecture | None:
    """What "B/16", "R50+B/16" or "R50x1" means; None where it is no such thing (org/repo has a
    slash too).

    Raises:
        ConfigError: it is written like one, and there is none of that name.
    """
    form = r"(R\d*\+)?[A-Za-z]+/\d+|R\d+x\d+"
    return architecture(name) if re.fullmatch(form, name, re.IGNORECASE) else None


def training_flops(config: Architecture, images: float, epochs: float) -> float:
    """Of a whole run: the backward pass costs twice the forward pass, and FLOPs = 2 x MACs."""
    return 3 * 2 * config.macs() * images * epochs


def describe_model(config: Architecture) -> dict[str, Any]:
    """What an architecture is and costs, as JSON has it."""
    return {
        "architecture": variant_name(config),
        "config": dataclasses.asdict(config),
        "parameters": config.num_params(),
        "flops": 2 * config.macs(),
        "grid": config.grid,
        "tokens": None if isinstance(config, BiTConfig) else config.num_tokens,
    }


def _sizes(config: Mapping[str, Any]) -> str:
    """An architecture's sizes, for people."""
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
    stages = f"bottlenecks {blocks} a stage" if resnet.depths else "its root alone"
    return f"{stages}, {resnet.width} to {resnet.channels} channels"


def describe_checkpoint(info: CheckpointInfo) -> dict[str, Any]:
    """What a checkpoint says beside its architecture, as JSON has it."""
    return {
        "preprocess": dataclasses.asdict(info.preprocess),
        "score": info.score,
        "classes": [label._asdict() for label in info.classes],
        "provenance": info.provenance,
    }


def describe_storage(file: Path) -> dict[str, Any]:
    """How a checkpoint is stored, as JSON has it."""
    dtypes = {tensor.dtype for tensor in store.open_store(file).tensors.values()}
    return {"dtypes": sorted(dtypes), "bytes": os.stat(file).st_size}


def as_lines(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for people: a word and what there is to say, line by line."""
    config = told["config"]
    yield "model", told["model"]
    if "file" in told:
        size = f"{told['bytes'] / 1e6:,.1f} MB, {', '.join(told['dtypes'])}"
        yield "file", f"{told['file']} ({size})"
    yield "architecture", f"{told['architecture']}: {_sizes(config)}"
    yield "parameters", f"{told['parameters']:,}"
    images = f"{_size(config['image_size'])} px"
    if told["tokens"] is None:
        images += f" or any other: a feature map of {_size(told['grid'])}"
    else:
        images += f", patches of {_size(config['patch_size'])}: "
        images += f"a grid of {_size(told['grid'])}, {told['tokens']:,} tokens"
    yield "images", images
    yield "forward pass", f"{told['flops'] / 1e9:,.2f} GFLOPs an image"
    if "preprocess" in told:
        yield "pre-processing", _preprocess_text(told["preprocess"])
        yield from _class_lines(told["classes"], config["num_classes"], told["score"])
        yield from _provenance_lines(told["provenance"])
    if run := told.get("training"):
        yield (
            "training",
            f"{run['exaflops']:,.4g} exaFLOPs for {run['epochs']:g} "
            f"epoch{'s' if run['epochs'] != 1 else ''} of "
            f"{run['images']:,.0f} images",
        )


def _provenance_lines(said: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where a checkpoint comes from: the commands that made it, oldest first, then the rest."""
    commands = [run["command"] for run in (*said.get("history", ()), said) if run.get("command")]
    for i, command in enumerate(commands):
        yield "command" if i == 0 else "then", command
    for name, value in said.items():
        if name == "metrics":
            value = ", ".join(f"{key.replace('_', ' ')} {x:.2%}" for key, x in value.items())
        elif name == "posemb_resize":
            name, value = "position embeddings", f"resized, {value.get('method')}"
        if name not in ("command", "history") and value not in ("", None, {}):
            text = value if isinstance(value, str) else json_format.dumps(value, ensure_ascii=False)
            yield name.replace("_", " "), text


def _class_lines(
    classes: Sequence[Mapping[str, str]], count: int, score: str
) -> Iterator[tuple[str, str]]:
    names = unique_names(tuple(ClassLabel(**label) for label in classes))
    shown = "; ".join(names[:SHOWN_CLASSES]) + ("; ..." if len(names) > SHOWN_CLASSES else "")
    if not count:
        yield "classes", "none: it gives features"
    else:
        yield "classes", f"{count:,} ({score}): {shown or 'without names'}"


def _preprocess_text(told: Mapping[str, Any]) -> str:
    how = {"center": "centre crop", "squash": "squashed", "border": "letterbox"}[told["crop_mode"]]
    kept = f" of {told['crop_pct']:.1%}" if told["crop_pct"] != 1 else ""
    filtered = told["interpolation"] + ("" if told["antialias"] else " without antialiasing")
    means, deviations = (", ".join(f"{v:g}" for v in told[key]) for key in ("mean", "std"))
    return f"{_size(told['size'])}, {filtered}, {how}{kept}, mean ({means}), std ({deviations})"


def _size(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"
