"""`vit fewshot`."""

from __future__ import annotations

import itertools
import shlex
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitcli.cli import options, output
from vitcli.config import TASK_DEFAULTS, FewshotConfig
from vitcli.errors import OutputError

if TYPE_CHECKING:
    from vitcli.fewshot import Trial

Plot = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Plot accuracy against the number of shots (.png, .pdf or .svg).",
        callback=options.drawable,
    ),
]
Save = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Save the model with the head fitted with the most shots and the first seed, as a "
        ".safetensors file or a directory with a model card.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop at an image that cannot be read, instead of skipping it."),
]


@options.from_fields(FewshotConfig, "fewshot")
def fewshot(
    given: dict[str, Any],
    model: options.Model = "default-pretrained",
    plot: Plot = None,
    save: Save = None,
    force: options.Force = False,
    strict: Strict = False,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Evaluate a model's features with a few images per class.

    Fits a linear classifier to frozen features in closed form and classifies the test split, as in
    the few-shot protocol of the paper (section 4.1). Features are cached, so later runs are fast.

    \b
    Examples:
      vit fewshot --data flowers
      vit fewshot --data flowers --shots 5,10 --l2 auto --plot shots.png
      vit fewshot --data flowers --shots 25 --save flowers-25
    """
    data = {**TASK_DEFAULTS["fewshot"]["data"], **given.get("data", {})}
    if "path" not in data:
        raise typer.BadParameter("missing; pass a dataset to draw images from", param_hint="--data")
    config: FewshotConfig = options.replaced(FewshotConfig, {**given, "data": data})
    if save is not None and len(config.l2) > 1:
        raise typer.BadParameter("requires a single --l2, or auto", param_hint="--save")
    from vitcli.fewshot import measure, model_file, save_head
    from vitcli.prediction import Predictor

    if save is not None and model_file(Path(save)).exists() and not force:
        raise OutputError("already exists", where=save, hint="use --force to replace it")
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
    kind = "test" if report.splits.test else "held-out" if held_out else "validation"
    output.note(f"tested on {report.tested:,} {kind} images", quiet)
    rows = summary(report.trials, config)
    if json:
        counts = {"test": report.tested, "unreadable": len(report.unreadable)}
        for row in rows:
            output.json_line({"model": predictor.name, "data": config.data.path, **counts, **row})
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
        output.note(f"skipped {len(report.unreadable):,} images that cannot be read", quiet)
        raise typer.Exit(1)


def summary(trials: tuple[Trial, ...], config: FewshotConfig) -> list[dict[str, Any]]:
    """A row for each number of shots and l2, as JSON shows it; accuracies in [0, 1]."""
    rows = []
    for shots, l2 in itertools.product(config.shots, config.l2 or [None]):
        found = [t for t in trials if t.shots == shots and l2 in (None, t.l2)]
        accuracies = [trial.accuracy for trial in found]
        row = {"shots": shots, "mean": statistics.fmean(accuracies)}
        row["std"] = statistics.stdev(accuracies) if len(found) > 1 else 0.0
        l2s = [trial.l2 for trial in found]
        rows.append({**row, "accuracies": accuracies, "seeds": list(config.seeds), "l2": l2s})
    return rows


def show(rows: list[dict[str, Any]], config: FewshotConfig) -> None:
    """Prints the rows as a table; with l2 unless it is the same for all."""
    columns = ["shots", *(f"seed {seed}" for seed in config.seeds), "mean", "std", "l2"]
    cells = []
    for row in rows:
        shares = [f"{share:.2%}" for share in (*row["accuracies"], row["mean"], row["std"])]
        l2s = row["l2"][:1] if config.l2 else row["l2"]  # auto: one by seed
        cells.append([str(row["shots"]), *shares, ", ".join(f"{l2:g}" for l2 in l2s)])
    if len(config.l2) == 1:
        columns, cells = columns[:-1], [cell[:-1] for cell in cells]
    output.table(columns, cells, range(len(columns)))


def draw(rows: list[dict[str, Any]], config: FewshotConfig, path: str) -> None:
    """Plots the rows, a line for each l2."""
    from vitcli import plots

    curves = {}
    for l2 in config.l2 or [None]:
        name = f"l2 {l2:g}" if l2 is not None else "l2 by leave-one-out"
        curves[name] = [row["accuracies"] for row in rows if l2 in (None, row["l2"][0])]
    plots.accuracy_by_shots(config.shots, curves, path)
