"""`vit convert`."""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitcli.cli import options, output

if TYPE_CHECKING:
    from vitcli.checkpoints.convert import Conversion
    from vitcli.checkpoints.read import Checkpoint

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint of any layout, a model's folder, a name or a Hub repo.",
        show_default=False,
        autocompletion=options.complete_model,
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="DST", help="A .safetensors or .npz file, or a folder.", show_default=False
    ),
]
To = Annotated[
    Literal["vit", "timm", "transformers", "vit-npz", "bit-npz", "big_vision"] | None,
    typer.Option(
        "--to",
        help="vit (timm's layout too), transformers (a folder), the authors' npz or big_vision's.  "
        "[default: the authors' for .npz, else vit]",
    ),
]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option("--dtype", help="Of the stored weights.  [default: as they are]"),
]
DropHead = Annotated[
    bool, typer.Option("--drop-head", help="Leave out the head, and pre_logits before it.")
]
Classes = Annotated[
    int | None,
    typer.Option("--num-classes", min=1, metavar="N", help="A new head of zeros for N classes."),
]
Labels = Annotated[
    str | None,
    typer.Option("--labels", metavar="FILE", help="Names: a line each, or an id, a tab, a name."),
]
Preprocessing = Annotated[
    list[str] | None,
    typer.Option(
        "--preprocess",
        metavar="KEY=VALUE",
        help="As in mean=0.5,0.5,0.5 or crop_mode=squash; may be repeated.",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", metavar="NAME", help="B/16 or timm's, where the file cannot tell."),
]
Heads = Annotated[
    int | None,
    typer.Option("--num-heads", min=1, metavar="N", help="Where neither file nor --arch tells."),
]
PatchSize = Annotated[
    int | None,
    typer.Option("--patch-size", min=1, max=512, metavar="N", help="Resample the patch embedding."),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compare with the source's own library (timm, transformers), on a random image.",
    ),
]


def convert(
    source: Source,
    target: Target,
    to: To = None,
    dtype: Dtype = None,
    drop_head: DropHead = False,
    num_classes: Classes = None,
    labels: Labels = None,
    preprocess: Preprocessing = None,
    arch: Arch = None,
    num_heads: Heads = None,
    patch_size: PatchSize = None,
    old_grid: options.OldGrid = None,
    verify: Verify = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    json: options.Json = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Write a checkpoint of any layout in another one.

    Reads files of timm, transformers, torchvision, vit_jax and big_vision, and torch's pickles.
    What the target cannot express is refused by name.
    """
    if drop_head and num_classes:
        raise typer.BadParameter("--drop-head and --num-classes contradict each other")
    from vitcli.checkpoints import convert as converting
    from vitcli.checkpoints.changes import Changes

    changes = Changes(
        dtype=dtype,
        drop_head=drop_head,
        num_classes=num_classes,
        labels=_read_labels(labels),
        preprocess=dict(_parse_setting(setting) for setting in preprocess or []),
        arch=arch,
        num_heads=num_heads,
        patch_size=patch_size,
    )
    with output.FetchDisplay(quiet) as fetching:
        job = converting.plan_convert(
            source,
            target,
            "vit" if to == "timm" else to,
            changes,
            old_grid=options.parse_resolution(old_grid) if old_grid else None,
            offline=offline,
            on_progress=fetching,
            allow_pickle=allow_pickle,
        )
    verified = [_verified(job.source)] if verify else []
    if not dry_run:
        converting.write(job, force)
        verified += _verified_result(job) if verify else []
    for row in job.names() if job.nan else ():
        if set(row.target) & set(job.nan):
            named = _folded(row.source)
            output.warning(f"{job.source.file}: {named} holds values that are not numbers (NaN)")
    if json:
        output.json_line({**describe(job, not dry_run), "verified": verified})
        return
    if dry_run:
        output.table(*_table(job), ())
    for warning in job.warnings:
        output.note(warning, quiet)
    verb = "would be" if dry_run else "is"
    output.line(
        output.printable(
            f"{job.output} {verb} {job.source.file} ({job.source.layout}) as {job.format}: "
            f"{len(job.tensors)} tensors, {job.info.model.num_params():,} parameters"
        )
    )
    for found in verified:
        output.line(
            output.printable(
                f"{found['file']} verified: max |difference| of {found['what']} from "
                f"{found['library']} {found['difference']:.2g}, on a random image in float64 "
                f"(they reach {found['largest']:.3g}){found['note'] and ', ' + found['note']}"
            )
        )


def _verified(checkpoint: Checkpoint) -> dict[str, Any]:
    """How a checkpoint compares with its own library, as JSON has it. Raises CheckpointError."""
    import dataclasses

    from vitcli.checkpoints.verify import verify

    found = verify(checkpoint)
    return {**dataclasses.asdict(found), "file": str(found.file)}


def _verified_result(job: Conversion) -> list[dict[str, Any]]:
    """The same of what was written, where its library is there."""
    from vitcli.checkpoints import read
    from vitcli.checkpoints.verify import check_verifiable
    from vitcli.errors import CheckpointError

    written = read.open_checkpoint(read.locate(job.output).file)
    try:
        check_verifiable(written)
    except CheckpointError as error:
        output.note(str(error))
        return []
    return [_verified(written)]


def _table(job: Conversion) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What becomes of each tensor: columns and rows. Names that are ours are not repeated."""
    from vitcli.checkpoints.convert import shape_text

    names = list(job.names())
    columns: dict[str, list[str]] = {
        "ours": [row.ours for row in names],
        "shape": [shape_text(row.shape) for row in names],
        "type": [row.dtype for row in names],
        "was": [row.was for row in names],
        "in the source": [_folded(row.source) or "(zeros)" for row in names],
        "in the target": [_folded(row.target) or "(computed)" for row in names],
    }
    told = {
        title: cells
        for title, cells in columns.items()
        if title == "ours" or (any(cells) and cells != columns["ours"])
    }
    return tuple(told), [*zip(*told.values(), strict=True)]


def _folded(names: Sequence[str]) -> str:
    """Several names as one, with what differs in braces: "block/{query,key,value}/kernel"."""
    if len(names) < 2:
        return "".join(names)
    start = os.path.commonprefix(names)
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    middle = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{start}{{{','.join(middle)}}}{end}"


def describe(job: Conversion, written: bool) -> dict[str, Any]:
    """A conversion as JSON has it."""
    return {
        "source": str(job.source.file),
        "layout": job.source.layout,
        "output": str(job.output),
        "format": job.format,
        "tensors": len(job.tensors),
        "parameters": job.info.model.num_params(),
        "dropped": list(job.source.dropped),
        "nan": job.nan,
        "warnings": job.warnings,
        "written": written,
        "names": [
            {
                "ours": row.ours,
                "shape": list(row.shape),
                "dtype": row.dtype,
                "source": list(row.source),
                "target": list(row.target),
            }
            for row in job.names()
        ],
    }


def _read_labels(path: str | None) -> Any:
    from vitcli.data.classes import read_classes

    return read_classes(Path(path)) if path else ()


def _parse_setting(text: str) -> tuple[str, Any]:
    """ "mean=0.5,0.5,0.5" as a name and a JSON value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"'{text}' is not KEY=VALUE")

    def parse(word: str) -> Any:
        try:
            return json_format.loads(word)
        except ValueError:
            return word

    parts = [parse(part) for part in value.split(",")]
    parts *= {"size": 2, "mean": 3, "std": 3}.get(name, 1) if len(parts) == 1 else 1
    return name, parts if len(parts) > 1 else parts[0]
