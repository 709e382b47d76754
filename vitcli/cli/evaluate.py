"""`vit evaluate`."""

from __future__ import annotations

import functools
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitcli.cli import evaluation, options, output
from vitcli.config import DataConfig, PosembMethod, Size
from vitcli.prediction import Predictor
from vitcli.train_config import TrainConfig

if TYPE_CHECKING:
    from vitcli.evaluate import Report

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PATH",
        help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
        "shards. May be given several times.",
        show_default=False,
    ),
]
Part = Annotated[
    Literal["auto", "train", "val", "test"],
    typer.Option(
        "--split",
        help="auto: the test part, else the validation part (what the model's own run held out, on "
        "the data it was trained on), else all images.",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the confusion matrix there (.png, .pdf or .svg); with several --resolutions, "
        "accuracy against resolution.",
        callback=options.drawable,
    ),
]
Reliability = Annotated[
    str | None,
    typer.Option(
        "--reliability",
        metavar="FILE",
        help="Draw accuracy against confidence there (.png, .pdf or .svg).",
        callback=options.drawable,
    ),
]
Labels = Annotated[
    str,
    typer.Option(
        "--labels",
        metavar="original|real|FILE.json",
        help="real: count ReaL labels too (several classes may be right) on ImageNet's validation "
        "images, told by their names, in class folders or not; FILE: other such labels, 50,000 "
        "lists of classes.",
    ),
]
MappingFile = Annotated[
    str | None,
    typer.Option(
        "--mapping",
        metavar="FILE",
        help="Lines of the data's class, tab, the model's (ids or names; - leaves its images "
        "out). Several lines for one class: any of those answers is right.",
    ),
]
Among = Annotated[
    Literal["auto", "model", "data", "imagenet-1k"],
    typer.Option(
        "--among",
        help="Classes that the model may answer: all of its own, the data's, or ImageNet's 1,000. "
        "auto: those 1,000 for a model of ImageNet-21k on data of ImageNet-1k, else its own.",
    ),
]
SkipUnknown = Annotated[
    bool,
    typer.Option("--skip-unknown", help="Leave out images of classes that the model lacks."),
]
Resolutions = Annotated[
    str | None,
    typer.Option(
        "--resolutions",
        metavar="N,...",
        help="Evaluate at each of these sizes (224 or 192x320), with position embeddings resized.",
    ),
]
PosembResize = Annotated[
    PosembMethod,
    typer.Option("--posemb-method", help="How --resolutions resizes position embeddings."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Threads that decode images.  [default: one for each core]",
    ),
]
Predictions = Annotated[
    str | None,
    typer.Option("--predictions", metavar="FILE.csv", help="Write the answer for each image."),
]


def evaluate(
    data: Data,
    model: options.Model = "default",
    split: Part = "auto",
    classes: options.Classes = None,
    labels: Labels = "original",
    mapping: MappingFile = None,
    among: Among = "auto",
    skip_unknown: SkipUnknown = False,
    resolutions: Resolutions = None,
    posemb_method: PosembResize = TrainConfig.posemb_method,
    predictions: Predictions = None,
    plot: Plot = None,
    reliability: Reliability = None,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
    workers: Workers = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model on labelled images: accuracy, macro F1, calibration, class by class.

    The data's classes are matched to the model's by id, then by a name that is unique. An image
    that cannot be read is reported and not counted; the exit code is then 1. Several --data or
    --resolutions give a table with a row each.
    """
    sizes: list[Size | None] = [None]
    if resolutions is not None:
        sizes = [options.parse_resolution(text) for text in resolutions.split(",")]
    one = len(data) * len(sizes) == 1
    if plot and not one and len(sizes) == 1:
        raise typer.BadParameter("a confusion matrix is of one --data", param_hint="--plot")
    if reliability and not one:
        raise typer.BadParameter("give one --data, one resolution", param_hint="--reliability")
    if predictions and len(sizes) > 1:
        raise typer.BadParameter("give one resolution", param_hint="--predictions")
    options.spare((*data, classes, mapping, labels), predictions, "--predictions")
    from vitcli import evaluate as library
    from vitcli.data.alignment import MatchRules, read_mapping
    from vitcli.imagenet import read_accepted

    rules = MatchRules(read_mapping(Path(mapping)) if mapping else {}, among, skip_unknown)
    accepted = None if labels == "original" else read_accepted(None if labels == "real" else labels)
    with output.FetchDisplay(quiet) as fetching:
        # All before the first image: a size that the model cannot have fails at once.
        waiting = deque(
            Predictor(
                model, device, precision, offline, fetching, size, posemb_method, allow_pickle
            )
            for size in sizes
        )
    stored = waiting[0].stored.image_size
    # Each resolution finds the same to say of the data: it is said once.
    note = functools.cache(partial(output.note, quiet=quiet))
    warn, complain = functools.cache(output.warning), functools.cache(output.error)
    reports: list[Report] = []
    with evaluation.predictions_file(predictions) as write:
        while waiting:
            predictor = waiting.popleft()  # its weights go when the next one's come
            size = f" at {evaluation.size_text(predictor.info.model.image_size)}" * (len(sizes) > 1)
            for place in data:
                config, answered = DataConfig(place, classes=classes), partial(write, place)
                with output.Meter(f"images{size}", quiet=quiet) as meter:
                    report = library.evaluate(
                        *(predictor, config, split, batch_size, workers, rules, accepted),
                        *(answered, meter.reach, note),
                    )
                for warning in report.warnings:
                    warn(warning)
                for name, error in report.errors:
                    complain(f"{name}: {error.what}")
                if json:
                    output.json_line(evaluation.as_object(report))
                reports.append(report)
    reports.sort(key=lambda report: data.index(report.data))
    if not json:
        evaluation.show(reports[0]) if one else evaluation.summarise(reports, stored, posemb_method)
    evaluation.draw(reports, stored, plot, reliability, quiet)
    unreadable = {name for report in reports for name, _ in report.errors}
    if unreadable:
        output.note(f"not counted, as they could not be read: {len(unreadable):,}")
        raise typer.Exit(1)
