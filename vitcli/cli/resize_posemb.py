"""`vit resize-posemb`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitcli.checkpoints.info import warn_of_assumptions
from vitcli.cli import output
from vitcli.cli.options import CHECKPOINT, DownloadOptions, WriteOptions, fetching, figure_option
from vitcli.cli.parameters import UsageError, command
from vitcli.config import POSEMB_METHODS, PosembMethod, Size
from vitcli.fields import option, parse_grid, parse_output, parse_size

if TYPE_CHECKING:
    import numpy as np

    from vitcli.checkpoints.resize import Resize


@dataclass(frozen=True, kw_only=True)
class ResizePosemb(DownloadOptions):
    """Options of `vit resize-posemb`."""

    checkpoint: str = option(..., "CHECKPOINT", CHECKPOINT)
    grid: Size | None = option(
        None,
        "--grid N|RxC",
        "New rows and columns of patches, for example 24 or 10x20.  [this or --resolution is "
        "required]",
        parse=parse_grid,
    )
    resolution: Size | None = option(
        None,
        "--resolution N|HxW",
        "New input size in pixels, for example 384; alternative to --grid.",
        parse=parse_size,
    )
    posemb_method: PosembMethod = option("bilinear", "--posemb-method --method", POSEMB_METHODS)
    plot: str | None = figure_option(
        "--plot FILE", "the similarity of the embeddings before and after"
    )
    output: str | None = option(
        None,
        "--output -o OUT",
        "Output file or directory.  [default: next to the input, with the grid in its name]",
        parse=parse_output,
    )
    in_place: bool = option(False, "--in-place", "Replace the input instead of writing a copy.")
    writing: WriteOptions = WriteOptions()


@command(ResizePosemb)
def resize_posemb(args: ResizePosemb) -> None:
    """Resize a checkpoint's position embeddings for another input size.

    All other tensors are copied unchanged. Accuracy drops until the model is fine-tuned at the new
    size.

    \b
    Examples:
      vit resize-posemb model.safetensors --grid 24
      vit resize-posemb default --resolution 224 -o larger --plot posemb.png
    """
    if args.grid is None and args.resolution is None:
        raise UsageError("--grid or --resolution is required")
    if args.grid is not None and args.resolution is not None:
        raise UsageError("--grid and --resolution cannot be combined")
    if args.in_place and args.output is not None:
        raise UsageError("--in-place and --output cannot be combined")
    output.check_writable(args.plot)
    from vitcli.checkpoints import resize

    with fetching(args) as kwargs:
        job = resize.plan_resize(
            args.checkpoint,
            grid=args.grid,
            resolution=args.resolution,
            method=args.posemb_method,
            output=args.output,
            in_place=args.in_place,
            old_grid=args.writing.old_grid,
            **kwargs,
        )
    for name, table in job.tables.items():
        if not (table == table).all():
            (source_name,) = job.checkpoint.tensors[name].sources
            output.warning(f"{job.source}: {source_name} contains NaN")
    tiles = _similarities(job) if args.plot else []
    if not args.writing.dry_run:
        resize.resize_posemb(job, args.writing.force)
    warn_of_assumptions(job.checkpoint.info, job.source)
    if args.plot and not args.writing.dry_run:
        from vitcli.figures import plots

        plots.position_similarity(tiles, args.plot)
        output.note(f"similarity of position embeddings: {args.plot}")
    if args.json:
        output.json_line({**job.to_json(), "written": not args.writing.dry_run})
        return
    output.line(_summary(job, args.writing.dry_run))
    if job.is_converted:
        output.note("vit cannot write a pickle: the output is safetensors in vit's layout")
    if not job.resized:
        return
    old_grid = "{} x {}".format(*job.models[0].grid)
    difference = f"the embeddings would differ from the original by {job.difference():.2%}"
    change = f"resized back to {old_grid}, {difference}"
    if args.writing.dry_run:
        output.line(change)
    else:
        output.note(f"{change}; accuracy drops until the model is fine-tuned at the new size")
    if any(name.endswith("decoder_pos_embed") for name in job.checkpoint.dropped):
        output.note("the position embeddings of the decoder were not resized")


def _similarities(job: Resize) -> list[tuple[str, np.ndarray]]:
    """The similarity of the embeddings before and after, each with its grid."""
    from vitcli.architectures.posemb import similarity

    pairs = zip((job.tables, {**job.tables, **job.resized}), job.models, strict=True)
    return [
        (f"{m.grid[0]} x {m.grid[1]}", similarity(tables, m.grid, m.posemb_prefix))
        for tables, m in pairs
    ]


def _summary(job: Resize, dry_run: bool) -> str:
    wrote = f"would write {job.output}" if dry_run else f"wrote {job.output}"
    (rows, columns), (new_rows, new_columns) = (model.grid for model in job.models)
    if not job.resized:
        what = f"{job.output} is unchanged" if job.in_place else f"{wrote}, a copy of {job.source}"
        return f"{what}: the grid is already {rows} x {columns}"
    return (
        f"{wrote}: {job.source} with position embeddings resized from {rows} x {columns} to "
        f"{new_rows} x {new_columns} patches ({job.method})"
    )
