"""`vit fewshot`."""

from __future__ import annotations

import statistics
from typing import Annotated, Any, Literal

import typer

from vitcli.cli import options, output


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"'{text}' is not a list such as 1,5,10", param_hint=option)
    return [int(part) for part in parts]


def _l2(text: str) -> float | Literal["auto"]:
    try:
        return "auto" if text == "auto" else float(text)
    except ValueError as error:
        raise typer.BadParameter(f"'{text}' is neither a number nor auto") from error


def fewshot(
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="PATH",
            help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
            "shards. Tested on its test part, else its validation part, else a part held out.",
        ),
    ],
    model: options.Model = "default-pretrained",
    shots: Annotated[
        str, typer.Option("--shots", metavar="N,...", help="Training pictures of each class.")
    ] = "1,5,10,25",
    seeds: Annotated[
        str, typer.Option("--seeds", metavar="N,...", help="Which training pictures are drawn.")
    ] = "0,1,2",
    l2: Annotated[
        str,
        typer.Option(
            "--l2", metavar="X|auto", help="Regularisation; auto: by leave-one-out on the shots."
        ),
    ] = "1024",
    val_fraction: Annotated[
        float, typer.Option("--val-fraction", metavar="X", help="Held out where nothing else is.")
    ] = 0.2,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw accuracy against shots there (.png, .pdf or .svg).",
            callback=options.drawable,
        ),
    ] = None,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model by a few pictures of each class: linear regression on its frozen features.

    The protocol of the paper's section 4.1, as its authors' code has it, on the pre-processing of
    the checkpoint. Features are remembered, so a second run solves at once.
    """
    counts, draws, strength = _numbers(shots, "--shots"), _numbers(seeds, "--seeds"), _l2(l2)
    from vitcli.config import DataConfig
    from vitcli.data.sources import open_data
    from vitcli.features import FeatureCache, cache_name, source_features
    from vitcli.fewshot import run_trials
    from vitcli.prediction import Predictor

    with output.FetchDisplay(quiet) as fetching:
        predictor = Predictor(model, device, precision, offline, fetching)
    splits = open_data(DataConfig(data, val_fraction=val_fraction))
    for warning in splits.warnings:
        output.warning(warning)
    test = splits.test or splits.val
    if test is None:
        raise typer.BadParameter("nothing is left to test on", param_hint="--val-fraction")
    name = cache_name(predictor)
    with output.Meter("features", len(splits.train) + len(test), quiet) as meter:
        train_features, test_features = (
            source_features(predictor, part, FeatureCache(name), batch_size, meter.advance)
            for part in (splits.train, test)
        )
    trials = list(
        run_trials(
            (train_features, splits.train.labels),
            (test_features, test.labels),
            [label.name for label in splits.classes],
            counts,
            draws,
            strength,
        )
    )
    rows: list[list[str]] = []
    summary: list[dict[str, Any]] = []
    for count in counts:
        found = [trial for trial in trials if trial.shots == count]
        accuracies = [trial.accuracy for trial in found]
        mean = statistics.fmean(accuracies)
        spread = statistics.stdev(accuracies) if len(found) > 1 else 0.0
        summary.append({"shots": count, "mean": mean, "std": spread, "accuracies": accuracies})
        summary[-1] |= {"seeds": draws, "l2": [trial.l2 for trial in found]}
        rows.append([str(count), *(f"{a:.2%}" for a in accuracies), f"{mean:.2%}", f"{spread:.2%}"])
    if plot is not None:
        from vitcli import plots

        points = [entry["accuracies"] for entry in summary]
        plots.accuracy_by_shots(counts, points, plot)
    if json:
        for entry in summary:
            output.json_line({"model": predictor.name, "data": data, "test": len(test), **entry})
        return
    seed_columns = [f"seed {seed}" for seed in draws]
    columns = ["shots", *seed_columns, "mean", "std"]
    output.table(columns, rows, range(len(columns)))
