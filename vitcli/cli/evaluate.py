"""`vit evaluate`."""

from __future__ import annotations

import functools
from collections import deque
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitcli.cli import evaluation, options, output
from vitcli.cli.rows import FORMATS, Csv, RowWriter, open_rows
from vitcli.config import DATA_KINDS, DataConfig, Size
from vitcli.prediction import Predictor
from vitcli.train_config import TrainConfig

if TYPE_CHECKING:
    from vitcli.evaluate import Answer, Report

Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PATH",
        help=f"Labelled images: {DATA_KINDS}; repeatable.",
        show_default=False,
    ),
]
Split = Annotated[
    Literal["auto", "train", "val", "test"],
    typer.Option(
        "--split",
        help="Split to evaluate on; auto: the test split if there is one, else the validation "
        "split, else all images. On the data that the model was trained on, the validation split "
        "is what its run held out.",
    ),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Plot the confusion matrix (.png, .pdf or .svg); with several resolutions, accuracy "
        "against resolution.",
        callback=options.drawable,
    ),
]
Reliability = Annotated[
    str | None,
    typer.Option(
        "--reliability",
        metavar="FILE",
        help="Plot accuracy against confidence (.png, .pdf or .svg).",
        callback=options.drawable,
    ),
]
RealLabels = Annotated[
    bool,
    typer.Option(
        "--real-labels",
        help="Also score against ReaL labels, which allow several correct classes; for ImageNet "
        "validation images under their original file names.",
    ),
]
Labels = Annotated[
    str,
    typer.Option(
        "--labels",
        metavar="original|real|FILE.json",
        help="real: --real-labels; FILE.json: such labels of your own, 50,000 lists of classes.",
        hidden=True,
    ),
]
MappingFile = Annotated[
    str | None,
    typer.Option(
        "--mapping",
        metavar="FILE",
        help="File with a line per class of the dataset: the class, a tab, and the model's class "
        "(ids or names; - leaves its images out). If a class has several lines, any of those "
        "answers is correct.",
    ),
]
Among = Annotated[
    Literal["auto", "model", "data", "imagenet-1k"],
    typer.Option(
        "--among",
        help="Classes that the model may predict: all of its own, those of the dataset, or those "
        "of ImageNet-1k; auto is imagenet-1k for an ImageNet-21k model on ImageNet-1k data, else "
        "model.",
    ),
]
SkipUnknown = Annotated[
    bool,
    typer.Option(
        "--skip-unknown", help="Leave out images of classes that the model does not have."
    ),
]
Resolutions = Annotated[
    str | None,
    typer.Option(
        "--resolution",
        "--resolutions",
        metavar="N|HxW,...",
        help="Input sizes in pixels, each evaluated in turn; position embeddings are resized to "
        "match.  "
        "[default: the model's]",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        metavar="N",
        help="Number of threads that decode images.  [default: one per core]",
    ),
]
Predictions = Annotated[
    str | None,
    typer.Option(
        "--predictions",
        metavar="FILE",
        help="Write the predictions for each image to FILE; the suffix selects the format: "
        f"{', '.join(FORMATS)}.",
    ),
]


def evaluate(
    data: Data,
    model: options.Model = "default",
    split: Split = "auto",
    classes: options.Classes = None,
    real_labels: RealLabels = False,
    labels: Labels = "original",
    mapping: MappingFile = None,
    among: Among = "auto",
    skip_unknown: SkipUnknown = False,
    resolution: Resolutions = None,
    posemb_method: options.PosembResize = TrainConfig.posemb_method,
    predictions: Predictions = None,
    plot: Plot = None,
    reliability: Reliability = None,
    batch_size: options.BatchSize = None,
    workers: Workers = None,
    json: options.Json = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Evaluate a model on labelled images: accuracy, macro F1, calibration, metrics per class.

    Matches the dataset's classes to the model's by id, then by unique name. Reports and leaves out
    images that cannot be read, and exits with 1 if there are any. For several datasets or
    resolutions, prints a table with a row for each.

    \b
    Examples:
      vit evaluate --data photos --model runs/photos
      vit evaluate --data imagenet/val --model vit-b16-i21k --real-labels
      vit evaluate --data photos --resolution 192,224,256 --plot accuracy.png
    """
    sizes: list[Size | None] = [None]
    if resolution is not None:
        sizes = [options.parse_resolution(text) for text in resolution.split(",")]
    one = len(data) * len(sizes) == 1
    if plot and not one and len(sizes) == 1:
        raise typer.BadParameter("a confusion matrix needs one --data", param_hint="--plot")
    if reliability and not one:
        raise typer.BadParameter("needs one --data and one resolution", param_hint="--reliability")
    if predictions and len(sizes) > 1:
        raise typer.BadParameter("needs one resolution", param_hint="--predictions")
    options.spare((*data, classes, mapping, labels), predictions, "--predictions")
    for path in (plot, reliability):
        output.check_writable(path)
    from vitcli import evaluate as library
    from vitcli.data.alignment import MatchRules, read_mapping
    from vitcli.imagenet import read_accepted

    rules = MatchRules(read_mapping(Path(mapping)) if mapping else {}, among, skip_unknown)
    labels = "real" if real_labels else labels
    accepted = None if labels == "original" else read_accepted(None if labels == "real" else labels)
    measure = partial(
        library.evaluate,
        split=split,
        batch_size=batch_size,
        workers=workers,
        rules=rules,
        accepted=accepted,
        report=functools.cache(partial(output.note, quiet=quiet)),
    )
    # Every resolution finds the same problems with the data; each is printed once.
    warn, complain = functools.cache(output.warning), functools.cache(output.error)
    reports: list[Report] = []
    with open_rows(predictions, Csv, "--predictions") if predictions else nullcontext() as rows:
        with output.FetchDisplay(quiet) as fetching:
            # All before the first image, so that an impossible size fails at once.
            predictors = deque(
                Predictor(
                    *(model, device, precision, offline, fetching, size, posemb_method),
                    allow_pickle=allow_pickle,
                )
                for size in sizes
            )
        stored = predictors[0].stored.image_size
        while predictors:
            predictor = predictors.popleft()  # frees its weights before the next are loaded
            size = f" at {evaluation.size_text(predictor.info.model.image_size)}" * (len(sizes) > 1)
            for path in data:
                with output.Meter(f"images{size}", quiet=quiet) as meter:
                    report = measure(
                        predictor,
                        DataConfig(path, classes=classes),
                        on_answer=partial(_write, rows, path),
                        on_progress=meter.reach,
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
    if unreadable := {name for report in reports for name, _ in report.errors}:
        output.note(f"unreadable images, not counted: {len(unreadable):,}")
        raise typer.Exit(1)


def _write(rows: RowWriter | None, data: str, answer: Answer) -> None:
    if rows is not None:
        rows.write(evaluation.PredictionRow(data, answer))
