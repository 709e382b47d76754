"""`vit fewshot`."""

from __future__ import annotations

import itertools
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vitcli.cli import output, progress
from vitcli.cli.launch import on_devices
from vitcli.cli.options import (
    MODEL,
    InferenceOptions,
    check_dataset_overwrite,
    figure_option,
    open_predictor,
)
from vitcli.cli.parameters import UsageError, apply_changes, command
from vitcli.config import DATA, TASK_DEFAULTS, FewshotConfig
from vitcli.errors import OutputError
from vitcli.fields import option, parse_directory
from vitcli.words import pluralize, public_url, quote

if TYPE_CHECKING:
    from vitcli.evaluation.fewshot import Trial


def _parse_save_path(path: str) -> str:
    is_file = path.endswith(".safetensors")
    return path if is_file else parse_directory(path, "a .safetensors file or a directory")


@dataclass(frozen=True, kw_only=True)
class Fewshot(InferenceOptions):
    """Options of `vit fewshot` besides those of `FewshotConfig`."""

    model: str = option("default-pretrained", "--model -m NAME|PATH|REPO", MODEL, DATA)
    plot: str | None = figure_option(
        "--plot FILE", "accuracy against the number of shots", "Options"
    )
    save: str | None = option(
        None,
        "--save PATH",
        "Save the model, with the head fitted for the largest of --shots and the first of --seeds, "
        "as a .safetensors file or a directory with a model card.",
        parse=_parse_save_path,
    )
    force: bool = option(False, "--force", "Overwrite existing output.")
    strict: bool = option(
        False, "--strict", "Stop at an image that cannot be read, instead of skipping it."
    )


@command(Fewshot, FewshotConfig, "fewshot")
@on_devices("plot", "save")
def fewshot(args: Fewshot, given: dict[str, Any]) -> None:
    """Evaluate a model's features with a few images per class.

    Fits a linear classifier to frozen features in closed form and classifies the test split, as in
    the few-shot protocol of the ViT paper (section 4.1). Features are cached, so later runs are
    fast.

    \b
    Examples:
      vit fewshot --data flowers
      vit fewshot --data flowers --shots 5,10 --l2 auto --plot shots.png
      vit fewshot --data flowers --shots 25 --save flowers-25
    """
    if "data.path" not in given:
        raise UsageError("--data is required")
    config: FewshotConfig = apply_changes(FewshotConfig, TASK_DEFAULTS["fewshot"] | given)
    config.data.reachable(args.offline)
    save = args.save
    if save is not None and len(config.l2) > 1:
        raise UsageError("--save requires a single value of --l2, or auto")
    check_dataset_overwrite([config.data.path], args.plot, "'--plot'")
    output.check_writable(args.plot)
    from vitcli.evaluation.fewshot import measure, model_file, save_head

    if save is not None:
        model_path = model_file(Path(save))
        if model_path.exists() and not args.force:
            raise OutputError("already exists", where=save, hint="use --force to replace it")
        output.check_writable(str(model_path), parents=True)
    predictor = open_predictor(args, args.resolution)
    with progress.Meter("features") as meter:
        report = measure(
            predictor, config, args.batch_size, meter.update, bool(save), args.strict, args.workers
        )
    for error in report.unreadable:
        output.error(f"{error.where}: {error.what}")
    is_held_out = report.splits.record["kind"] == "held out"
    split_name = "test" if report.splits.test else "held-out" if is_held_out else "validation"
    output.note(f"tested {predictor.name} on {pluralize(report.tested, f'{split_name} image')}")
    rows = summary(report.trials, config)
    if args.json:
        counts = {"test": report.tested, "unreadable": len(report.unreadable)}
        for row in rows:
            output.json_line({"model": predictor.name, "data": config.data.path, **counts, **row})
    else:
        show(rows, config)
    if args.plot is not None:
        draw(rows, config, args.plot)
        output.note(f"accuracy against shots: {args.plot}")
    if save is not None and report.saved is not None:
        words = ["vit", *map(public_url, sys.argv[1:])]
        save_head(predictor, config, report, Path(save), shlex.join(words))
        trial, _ = report.saved
        setting = f"{pluralize(trial.shots, 'shot')}, seed {trial.seed} and l2 {trial.l2:g}"
        output.note(f"saved {save}, with the head of {setting} (accuracy {trial.accuracy:.2%})")
        output.note(f"next: vit predict IMAGE --model {quote(save)}")
    if skipped := len(report.unreadable):
        output.note(f"skipped {pluralize(skipped, 'image')} that could not be read")
        raise typer.Exit(1)


def summary(trials: tuple[Trial, ...], config: FewshotConfig) -> list[dict[str, Any]]:
    """Return one JSON row per number of shots and l2, with accuracies in [0, 1]."""
    rows = []
    for shots, l2 in itertools.product(config.shots, config.l2 or [None]):
        matching = [t for t in trials if t.shots == shots and l2 in (None, t.l2)]
        accuracies = [trial.accuracy for trial in matching]
        row: dict[str, Any] = {"shots": shots, "mean": statistics.fmean(accuracies)}
        row["std"] = statistics.stdev(accuracies) if len(matching) > 1 else None
        l2s = [trial.l2 for trial in matching]
        rows.append({**row, "accuracies": accuracies, "seeds": list(config.seeds), "l2": l2s})
    return rows


def show(rows: list[dict[str, Any]], config: FewshotConfig) -> None:
    """Print the rows as a table, with an l2 column unless there is a single value."""
    columns = ["shots", *(f"seed {seed}" for seed in config.seeds), "mean", "std", "l2"]
    table_rows = []
    for row in rows:
        values = (*row["accuracies"], row["mean"], row["std"])
        percentages = ["-" if value is None else f"{value:.2%}" for value in values]
        l2s = row["l2"][:1] if config.l2 else row["l2"]  # auto: one per seed
        table_rows.append([str(row["shots"]), *percentages, ", ".join(f"{l2:g}" for l2 in l2s)])
    if len(config.l2) == 1:
        columns, table_rows = columns[:-1], [row[:-1] for row in table_rows]
    output.table(columns, table_rows, range(len(columns)))


def draw(rows: list[dict[str, Any]], config: FewshotConfig, path: str) -> None:
    """Plot the rows, one curve per l2."""
    from vitcli.figures import plots

    curves = {}
    for l2 in config.l2 or [None]:
        name = f"l2 {l2:g}" if l2 is not None else "l2 by leave-one-out"
        curves[name] = [row["accuracies"] for row in rows if l2 in (None, row["l2"][0])]
    plots.accuracy_by_shots(config.shots, curves, path)
