"""`vit fewshot`."""

from __future__ import annotations

import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitcli.cli import options, output
from vitcli.config import DataConfig, FewshotConfig, Pool
from vitcli.errors import OutputError

if TYPE_CHECKING:
    from vitcli.fewshot import Trial

DEFAULTS = FewshotConfig(DataConfig("", val_fraction=0.2))


def _listed(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"'{text}' is not a list such as 1,5,10", param_hint=option)
    return tuple(int(part) for part in parts)


def _l2(text: str) -> tuple[float, ...]:
    if text == "auto":
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is neither a number, a list of them, nor auto", param_hint="--l2"
        ) from error


def fewshot(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="PATH",
            help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
            "shards. Tested on its test part, else its validation part, else a part held out.",
            show_default=False,
        ),
    ],
    model: options.Model = "default-pretrained",
    classes: options.Classes = None,
    shots: Annotated[
        str, typer.Option("--shots", metavar="N,...", help="Training images of each class.")
    ] = _listed(DEFAULTS.shots),
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N,...", help="Which training images are drawn.")
    ] = _listed(DEFAULTS.seeds),
    l2: Annotated[
        str,
        typer.Option(
            "--l2",
            metavar="X,...|auto",
            help="Regularisation, one or several; auto: for each draw by leaving out each of its "
            "images in turn.",
        ),
    ] = _listed(DEFAULTS.l2),
    pool: Annotated[
        Literal["head", Pool],
        typer.Option(
            "--pool",
            help="What is read: as the model's head does, the class token, the mean of the "
            "patches (gap), both, or the model's attention query (map).",
        ),
    ] = DEFAULTS.pool,
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            min=1,
            metavar="N",
            help="Cut the model after its Nth block; its final norm stays.  [default: the last]",
        ),
    ] = DEFAULTS.layer,
    preprocess: Annotated[
        Literal["big_vision", "checkpoint"],
        typer.Option(
            "--transform",
            "--preprocess",
            help="big_vision, as published figures have it: squashed to 256 without antialiasing, "
            "the centre 224 cut out (in proportion at other sizes); checkpoint: its own resize and "
            "crop. Size, mean and std are the checkpoint's in both.",
        ),
    ] = DEFAULTS.preprocess,
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", metavar="X", help="Held out where nothing else is.")
    ] = DEFAULTS.data.val_fraction,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw accuracy against shots there (.png, .pdf or .svg).",
            callback=options.drawable,
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="PATH",
            help="Write the model with the head of the most shots and the first seed: a "
            ".safetensors file, or a folder with a card, for vit predict and all the rest.",
        ),
    ] = None,
    force: options.Force = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")
    ] = False,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model by a few images of each class: linear regression on its frozen features.

    The protocol is that of the paper's section 4.1, as its authors' code has it. Features are
    remembered, so a second run solves at once.
    """
    config = FewshotConfig(
        DataConfig(data, classes, val_fraction),
        _numbers(shots, "--shots"),
        _numbers(seeds, "--seeds"),
        _l2(l2),
        pool,
        layer,
        preprocess,
    )
    if save is not None and len(config.l2) > 1:
        raise typer.BadParameter("takes one --l2, or auto", param_hint="--save")
    from vitcli.fewshot import measure, model_file, save_head
    from vitcli.prediction import Predictor

    if save is not None and model_file(Path(save)).exists() and not force:
        raise OutputError("exists already", where=save, hint="--force replaces it")

    with output.FetchDisplay(quiet) as fetching:
        predictor = Predictor(
            model, device, precision, offline, fetching, allow_pickle=allow_pickle
        )
    with output.Meter("features", quiet=quiet) as meter:
        report = measure(predictor, config, batch_size, meter.reach, save is not None, strict)
    for warning in report.splits.warnings:
        output.warning(warning)
    for error in report.unreadable:
        output.error(f"{error.where}: {error.what}")
    held_out = report.splits.record["kind"] == "held out"
    split = "held-out images" if held_out else "validation images"
    split = "test images" if report.splits.test else split
    output.note(f"tested on {report.tested:,} {split}", quiet)
    rows = summary(report.trials, config)
    if json:
        counts = {"test": report.tested, "unreadable": len(report.unreadable)}
        for row in rows:
            output.json_line({"model": predictor.name, "data": data, **counts, **row})
    else:
        show(rows, config)
    if plot is not None:
        draw(rows, config, plot)
        output.note(f"plotted accuracy against shots in {plot}", quiet)
    if save is not None and report.saved is not None:
        save_head(predictor, config, report, Path(save), shlex.join(["vit", *sys.argv[1:]]))
        trial, _ = report.saved
        what = f"{trial.shots} shots, seed {trial.seed}, l2 {trial.l2:g}: {trial.accuracy:.2%}"
        output.note(f"saved the model of {what} in {save}", quiet)
        output.note(f"next: vit predict IMAGE --model {shlex.quote(save)}", quiet)
    if report.unreadable:
        output.note(f"skipped {len(report.unreadable):,} images that cannot be read")
        raise typer.Exit(1)


def summary(trials: tuple[Trial, ...], config: FewshotConfig) -> list[dict[str, Any]]:
    """A row for each number of shots and l2, as JSON has it; accuracies in [0, 1]."""
    rows = []
    for shots in config.shots:
        for l2 in config.l2 or [None]:
            found = [t for t in trials if t.shots == shots and l2 in (None, t.l2)]
            accuracies = [trial.accuracy for trial in found]
            rows.append(
                {
                    "shots": shots,
                    "mean": statistics.fmean(accuracies),
                    "std": statistics.stdev(accuracies) if len(found) > 1 else 0.0,
                    "accuracies": accuracies,
                    "seeds": list(config.seeds),
                    "l2": [trial.l2 for trial in found],
                }
            )
    return rows


def show(rows: list[dict[str, Any]], config: FewshotConfig) -> None:
    """The rows for people."""
    columns = ["shots", *(f"seed {seed}" for seed in config.seeds), "mean", "std"]
    several = len(config.l2) > 1
    if several:
        columns.insert(1, "l2")
    if not config.l2:
        columns.append("l2 by seed")
    cells = []
    for row in rows:
        figures = [*row["accuracies"], row["mean"], row["std"]]
        l2 = [f"{row['l2'][0]:g}"] if several else []
        chosen = [] if config.l2 else [", ".join(f"{value:g}" for value in row["l2"])]
        cells.append([str(row["shots"]), *l2, *(f"{figure:.2%}" for figure in figures), *chosen])
    output.table(columns, cells, range(len(columns)))


def draw(rows: list[dict[str, Any]], config: FewshotConfig, path: str) -> None:
    """The rows as an image: a line for each l2."""
    from vitcli import plots

    curves = {}
    for l2 in config.l2 or [None]:
        name = f"l2 {l2:g}" if l2 is not None else "l2 by leave-one-out"
        curves[name] = [row["accuracies"] for row in rows if l2 in (None, row["l2"][0])]
    plots.accuracy_by_shots(config.shots, curves, path)
