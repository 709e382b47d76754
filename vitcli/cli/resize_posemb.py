"""`vit resize-posemb`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vitcli.cli import options, output
from vitcli.cli.options import parse_resolution
from vitcli.config import PosembMethod

if TYPE_CHECKING:
    from vitcli.checkpoints.resize import Resize

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="Checkpoint file of any layout, model directory, model name, or Hub repo.",
        show_default=False,
        autocompletion=options.complete_model,
    ),
]
Grid = Annotated[
    str | None,
    typer.Option(metavar="N|RxC", help="New rows and columns of patches, for example 24 or 10x20."),
]
Resolution = Annotated[
    str | None,
    typer.Option(
        metavar="N|HxW", help="New image size in pixels, for example 384; alternative to --grid."
    ),
]
Method = Annotated[
    PosembMethod,
    typer.Option(
        "--posemb-method",
        "--method",
        help="Interpolation method: the paper's (bilinear), timm's (bicubic) or transformers' "
        "(bicubic-hf).",
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="OUT",
        help="Output file or directory.  [default: next to the input, with the grid in its name]",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Plot the similarity of the embeddings before and after (.png, .pdf or .svg).",
        callback=options.drawable,
    ),
]


def resize_posemb(
    checkpoint: Checkpoint,
    grid: Grid = None,
    resolution: Resolution = None,
    posemb_method: Method = "bilinear",
    out: Out = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace the input instead of writing a copy.")
    ] = False,
    old_grid: options.OldGrid = None,
    plot: Plot = None,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    json: options.Json = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Resize a checkpoint's position embeddings for another image size.

    All other tensors are copied unchanged. Accuracy drops until the model is fine-tuned at the new
    size.

    \b
    Examples:
      vit resize-posemb model.safetensors --grid 24
      vit resize-posemb default --resolution 160 -o larger --plot posemb.png
    """
    if (grid is None) == (resolution is None):
        raise typer.BadParameter("pass either --grid or --resolution")
    from vitcli.checkpoints import resize

    with output.FetchDisplay(quiet) as fetching:
        job = resize.plan_resize(
            checkpoint,
            grid=parse_resolution(grid) if grid else None,
            resolution=parse_resolution(resolution) if resolution else None,
            method=posemb_method,
            output=out,
            in_place=in_place,
            old_grid=parse_resolution(old_grid) if old_grid else None,
            offline=offline,
            on_progress=fetching,
            allow_pickle=allow_pickle,
        )
    for name, table in job.tables.items():
        if not (table == table).all():
            theirs = job.checkpoint.sources.get(name, (name,))[0]
            output.warning(f"{job.source}: {theirs} contains NaN")
    if not dry_run:
        resize.resize_posemb(job, force)
    if plot:
        _draw(job, plot)
    if json:
        output.json_line({**job.to_json(), "written": not dry_run})
        return
    output.line(output.printable(_sentence(job, dry_run)))
    if not job.resized:
        return
    loss = f"resizing back would change the embeddings by {job.loss():.2%}"
    if dry_run:
        output.line(loss)
    else:
        output.note(f"{loss}; accuracy drops until the model is fine-tuned at this size", quiet)
    if any(name.endswith("decoder_pos_embed") for name in job.checkpoint.dropped):
        output.note("the position embeddings of the decoder were not resized", quiet)
    if job.kind == "pickle":
        output.note("vit does not write pickles: the output is safetensors in vit's layout", quiet)


def _draw(job: Resize, path: str) -> None:
    from vitcli import plots
    from vitcli.checkpoints.resize import similarity

    both = zip((job.tables, {**job.tables, **job.resized}), job.models, strict=True)
    tiles = [(f"{m.grid[0]} x {m.grid[1]}", similarity(tables, m)) for tables, m in both]
    plots.position_similarity(tiles, path)


def _sentence(job: Resize, dry_run: bool) -> str:
    verb = "would be" if dry_run else "is"
    (rows, columns), (new_rows, new_columns) = (model.grid for model in job.models)
    if not job.resized:
        what = "unchanged" if job.in_place else f"a copy of {job.source}"
        return f"{job.output} {verb} {what}: the grid is already {rows} x {columns}"
    return (
        f"{job.output} {verb} {job.source} with position embeddings for "
        f"{new_rows} x {new_columns} patches, from {rows} x {columns} ({job.method})"
    )
