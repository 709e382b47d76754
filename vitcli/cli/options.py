"""Options that several commands share, each written once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Literal

import typer

from vitcli.config import Size


def _remember_debug(ctx: typer.Context, wanted: bool) -> bool:
    """The error boundary (cli/main.py) looks it up."""
    ctx.meta["debug"] = wanted
    return wanted


def complete_model(incomplete: str) -> list[str]:
    """Names for the shell: those that ship and those of the registry."""
    from vitcli.hub import registry

    known = [*registry.aliases(), *registry.shipped(), *registry.entries()]
    return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]


def parse_resolution(text: str) -> Size:
    """ "384" or "192x320" as (height, width)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"'{text}' is not a size such as 384 or 192x320 (height x width)")
    return int(parts[0]), int(parts[-1])


def spare(read: Iterable[str | None], written: str | None, option: str) -> None:
    """Refuses to write text over a file that the command reads, or over any image."""
    if written and os.path.isfile(written):
        from vitcli.data.source import is_image

        target = os.path.realpath(written)
        if any(target == os.path.realpath(name) for name in read if name):
            raise typer.BadParameter(f"'{written}' is read, and would be lost", param_hint=option)
        if is_image(target):
            raise typer.BadParameter(
                f"'{written}' is an image, and would be lost", param_hint=option
            )


def drawable(path: str | None) -> str | None:
    """Refuses, before the work, an image of a kind that cannot be drawn."""
    if path is not None and not path.lower().endswith((".png", ".pdf", ".svg")):
        raise typer.BadParameter(f"'{path}' does not end in .png, .pdf or .svg")
    return path


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="A model's name, a run's folder or a checkpoint file (./x is always a path), or a "
        "Hub repo: org/name[@revision].",
        autocompletion=complete_model,
    ),
]
Classes = Annotated[
    str | None,
    typer.Option("--classes", metavar="FILE", help="The data's classes, one a line, in order."),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "-b",
        min=1,
        metavar="N",
        help="Images that the model sees at once.  [default: by device]",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda[:N]|mps", help="What computes.")
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option("--precision", help="auto: bf16 where the hardware has it, else fp32."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
Output = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write the results there, whole or not at all."
    ),
]
OldGrid = Annotated[
    str | None,
    typer.Option("--old-grid", metavar="RxC", help="Today's grid, where the file does not say."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never touch the network.")]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Take a Hub repo whose weights are a pickle only; tensors are read, nothing is run.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and do nothing.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and errors only.")]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Print the traceback of a failure.", callback=_remember_debug),
]
