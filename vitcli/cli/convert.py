"""`vit convert`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints.changes import Changes
from vitcli.cli import output, progress
from vitcli.cli.options import CHECKPOINT, DownloadOptions, WriteOptions, fetching
from vitcli.cli.parameters import command
from vitcli.fields import option, parse_output
from vitcli.layouts.catalog import formats
from vitcli.words import collapse_names, join_or

if TYPE_CHECKING:
    from vitcli.checkpoints.convert import Conversion
    from vitcli.checkpoints.read import Checkpoint


def _parse_layout(name: str) -> str:
    if name not in (*formats(), "timm"):
        raise ValueError(f"expected {join_or(formats())}, not '{name}'")
    return "vit" if name == "timm" else name


@dataclass(frozen=True, kw_only=True)
class Convert(DownloadOptions):
    """Options of `vit convert`."""

    source: str = option(..., "SRC", CHECKPOINT)
    target: str = option(
        ..., "DST", "Output: a .safetensors or .npz file, or a directory.", parse=parse_output
    )
    to: str | None = option(
        None,
        f"--to {'|'.join(formats())}",
        "Layout to write: vit (the same as timm), transformers (a directory) or, as a .npz file, "
        "vit-npz (vit_jax), bit-npz (BiT) or big_vision.  [default: vit-npz or bit-npz if DST ends "
        "in .npz, else vit]",
        parse=_parse_layout,
    )
    verify: bool = option(
        False,
        "--verify",
        "Compare the model's outputs for a random image with those of timm or transformers (which "
        "must be installed), in float64.",
    )
    average: list[str] = option(
        [],
        "--average CHECKPOINT",
        "Average the weights of SRC with those of this checkpoint, which must have the same "
        "architecture, classes and preprocessing; repeatable.",
    )
    changes: Changes = Changes()
    writing: WriteOptions = WriteOptions()


@command(Convert)
def convert(args: Convert) -> None:
    """Convert a checkpoint to another layout.

    Reads checkpoints from timm, transformers, torchvision, open_clip, vit_jax and big_vision,
    including pickles. If the target layout cannot express the model, the error says why.

    \b
    Examples:
      vit convert ViT-B_16.npz vit-b16 --verify
      vit convert runs/pets pets-hf --to transformers --dtype float16
    """
    from vitcli.checkpoints import convert as library

    with fetching(args) as kwargs:
        job = library.plan_convert(
            args.source,
            args.target,
            args.to,
            args.changes,
            args.average,
            args.writing.old_grid,
            **kwargs,
        )
    checks = [_verify(job.source)] if args.verify else []
    if not args.writing.dry_run:
        with progress.Meter("tensors") as meter:
            library.write(job, args.writing.force, meter.update)
        checks += _verify_output(job) if args.verify else []
    for row in job.names if job.nan else ():
        if set(row.target) & set(job.nan):
            output.warning(f"{job.source.file}: {collapse_names(row.source)} contains NaN")
    if args.json:
        output.json_line({**job.to_json(), "written": not args.writing.dry_run, "verified": checks})
        return
    if args.writing.dry_run:
        output.table(*_tensor_table(job), ())
    for warning in job.warnings:
        output.warning(warning)
    verb = "would write" if args.writing.dry_run else "wrote"
    averaged = ", ".join(str(checkpoint.file) for checkpoint in job.others)
    lines = [
        f"{verb} {job.output} in the {job.format} layout, from {job.source.file} "
        f"({job.source.layout}){f', averaged with {averaged}' if averaged else ''}: "
        f"{len(job.tensors)} tensors, {job.info.model.num_params():,} parameters"
    ]
    lines += [
        f"verified {check['file']}: on a random image in float64, its {check['what']}"
        f"{' ' * bool(check['note'])}{check['note']} differ from {check['library']}'s by at most "
        f"{check['difference']:.2g} (largest value {check['largest']:.3g})"
        for check in checks
    ]
    output.line(*lines)


def _verify(checkpoint: Checkpoint) -> dict[str, Any]:
    """Compare with the checkpoint's own library; return a JSON object. Raises CheckpointError."""
    from vitcli.checkpoints.verify import verify

    result = verify(checkpoint)
    return {**dataclasses.asdict(result), "file": str(result.file)}


def _verify_output(job: Conversion) -> list[dict[str, Any]]:
    """Verify the written output, if the library that reads its layout is installed."""
    from vitcli.checkpoints import read
    from vitcli.checkpoints.verify import check_verifiable
    from vitcli.errors import CheckpointError

    checkpoint = read.open_checkpoint(job.output)
    try:
        check_verifiable(checkpoint)
    except CheckpointError as error:
        output.note(error.message, f"hint: {error.hint}", always=True)
        return []
    return [_verify(checkpoint)]


def _tensor_table(job: Conversion) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and a row per tensor, without columns that only repeat our names."""
    origins = ["(zeros)" if row.name.startswith("head") else "(computed)" for row in job.names]
    columns: dict[str, list[str]] = {
        "tensor": [row.name for row in job.names],
        "shape": [" x ".join(map(str, row.shape)) or "1" for row in job.names],
        "type": [row.dtype for row in job.names],
        "was": [row.was for row in job.names],
        "in the source": [
            collapse_names(row.source) or origin
            for row, origin in zip(job.names, origins, strict=True)
        ],
        "in the target": [collapse_names(row.target) or "(computed)" for row in job.names],
    }
    visible = {
        title: cells
        for title, cells in columns.items()
        if title == "tensor" or (any(cells) and cells != columns["tensor"])
    }
    return tuple(visible), [*zip(*visible.values(), strict=True)]
