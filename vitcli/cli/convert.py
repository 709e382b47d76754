"""`vit convert`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitcli.cli import options, output
from vitcli.config import Preprocess
from vitcli.fields import key_value
from vitcli.layouts.catalogue import formats

if TYPE_CHECKING:
    from vitcli.checkpoints.convert import Conversion
    from vitcli.checkpoints.read import Checkpoint
    from vitcli.config import ClassLabel


def _parse_preprocess(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if key in ("mean", "std") and "," not in value:  # one number for the three channels
        value = ",".join([value] * 3)
    try:
        return key_value(Preprocess)(f"{key}{equals}{value}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint file of any layout, model directory, model name, or Hub repo.",
        show_default=False,
        autocompletion=options.complete_model,
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="DST",
        help="Output: a .safetensors or .npz file, or a directory.",
        show_default=False,
    ),
]


def _layout(name: str | None) -> str | None:
    """The value of --to. Raises BadParameter where no such layout is written."""
    if name is not None and name not in (*formats(), "timm"):
        raise typer.BadParameter(f"'{name}' is not one of {', '.join(formats())}.")
    return "vit" if name == "timm" else name


To = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(formats()),
        callback=_layout,
        autocompletion=formats,
        help="Layout to write. vit is the same as timm; transformers is a directory; vit-npz, "
        "bit-npz and big_vision are .npz files.  [default: vit-npz or bit-npz if DST ends in "
        ".npz, else vit]",
    ),
]
Dtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    typer.Option(help="Data type of the stored weights.  [default: the source's]"),
]
DropHead = Annotated[
    bool, typer.Option("--drop-head", help="Leave out the head and the pre_logits layer before it.")
]
NumClasses = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Replace the head with one of zeros for N classes."),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        "--labels",
        metavar="FILE",
        help="File with the names of the classes, one per line, in index order: a name, or an "
        "id, a tab and a name.",
    ),
]
Preprocessing = Annotated[
    list[str] | None,
    typer.Option(
        "--preprocess",
        metavar="KEY=VALUE",
        help="Change a field of the preprocessing, for example mean=0.5,0.5,0.5 or "
        "crop_mode=squash; repeatable.",
        parser=_parse_preprocess,
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Architecture, if the file does not specify it: a name such as B/16, or a name of "
        "timm's.",
    ),
]
Heads = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Number of attention heads, if the file does not specify it."
    ),
]
PatchSize = Annotated[
    int | None,
    typer.Option(min=1, max=512, metavar="N", help="Resample the patch embedding to N x N pixels."),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Compare the output for a random image with that of timm or transformers, in float64.",
    ),
]


def convert(
    source: Source,
    target: Target,
    to: To = None,
    dtype: Dtype = None,
    drop_head: DropHead = False,
    num_classes: NumClasses = None,
    classes: Classes = None,
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
    """Convert a checkpoint to another layout.

    Reads checkpoints of timm, transformers, torchvision, open_clip, vit_jax and big_vision,
    including pickles. If the target layout cannot express the model, the error says why.

    \b
    Examples:
      vit convert ViT-B_16.npz vit-b16 --verify
      vit convert runs/pets pets-hf --to transformers --dtype float16
    """
    if drop_head and num_classes:
        raise typer.BadParameter("--drop-head and --num-classes cannot be combined")
    from vitcli.checkpoints import convert as converting
    from vitcli.checkpoints.changes import Changes

    changes = Changes(
        dtype=dtype,
        drop_head=drop_head,
        num_classes=num_classes,
        labels=_read_classes(classes),
        preprocess=dict(preprocess or []),  # type: ignore[arg-type]  # pairs, once parsed
        arch=arch,
        num_heads=num_heads,
        patch_size=patch_size,
    )
    with output.FetchDisplay(quiet) as fetching:
        job = converting.plan_convert(
            source,
            target,
            to,
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
            output.warning(f"{job.source.file}: {named} contains NaN")
    if json:
        output.json_line({**job.to_json(), "written": not dry_run, "verified": verified})
        return
    if dry_run:
        output.table(*_table(job), ())
    for warning in job.warnings:
        output.note(warning, quiet)
    verb = "would be" if dry_run else "is"
    output.line(
        output.printable(
            f"{job.output} {verb} {job.source.file} ({job.source.layout}) as {to or job.format}: "
            f"{len(job.tensors)} tensors, {job.info.model.num_params():,} parameters"
        )
    )
    for found in verified:
        note = f" {found['note']}" if found["note"] else ""
        output.line(
            output.printable(
                f"{found['file']} is verified: its {found['what']} differ from those of "
                f"{found['library']}{note} by {found['difference']:.2g} at most, of "
                f"{found['largest']:.3g} (a random image, float64)"
            )
        )


def _verified(checkpoint: Checkpoint) -> dict[str, Any]:
    """The comparison with a checkpoint's own library, as JSON. Raises CheckpointError."""
    import dataclasses

    from vitcli.checkpoints.verify import verify

    found = verify(checkpoint)
    return {**dataclasses.asdict(found), "file": str(found.file)}


def _verified_result(job: Conversion) -> list[dict[str, Any]]:
    """The same of the output, if the library that reads its layout is installed."""
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
    """Columns and rows: what becomes of each tensor. Columns that repeat our names are left out."""
    names = list(job.names())
    columns: dict[str, list[str]] = {
        "ours": [row.ours for row in names],
        "shape": [" x ".join(map(str, row.shape)) or "1" for row in names],
        "type": [row.dtype for row in names],
        "was": [row.was for row in names],
        "in the source": [_folded(row.source) or "(zeros)" for row in names],
        "in the target": [_folded(row.target) or "(computed)" for row in names],
    }
    shown = {
        title: cells
        for title, cells in columns.items()
        if title == "ours" or (any(cells) and cells != columns["ours"])
    }
    return tuple(shown), [*zip(*shown.values(), strict=True)]


def _folded(names: Sequence[str]) -> str:
    """Several names as one, with what differs in braces: "block/{query,key,value}/kernel"."""
    if len(names) < 2:
        return "".join(names)
    start = os.path.commonprefix(names)
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    middle = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{start}{{{','.join(middle)}}}{end}"


def _read_classes(path: str | None) -> tuple[ClassLabel, ...]:
    from vitcli.data.classes import read_classes

    return read_classes(Path(path)) if path else ()
