"""`vit evaluate`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitcli.cli import options, output
from vitcli.config import DataConfig
from vitcli.errors import OutputError
from vitcli.prediction import Predictor

if TYPE_CHECKING:
    from vitcli.evaluate import Report

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="PATH",
        help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
        "shards.",
        show_default=False,
    ),
]
Part = Annotated[
    Literal["auto", "train", "val", "test"],
    typer.Option(
        "--split",
        help="auto: the test part, else the validation part (what the model's own run held out, on "
        "the data it was trained on), else all pictures.",
    ),
]
Classes = Annotated[
    str | None,
    typer.Option("--classes", metavar="FILE", help="The data's classes, one a line, in order."),
]
Plot = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw the confusion matrix there (.png, .pdf or .svg).",
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

TABLE = 20
"""Up to so many classes, the confusion matrix is printed."""
MISTAKES = 10
"""With more, so many of the most frequent mistakes are."""


def evaluate(
    data: Data,
    model: options.Model = "default",
    split: Part = "auto",
    classes: Classes = None,
    plot: Plot = None,
    reliability: Reliability = None,
    batch_size: options.BatchSize = None,
    json: options.Json = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model on labelled pictures: accuracy, macro F1, calibration, class by class.

    The data's classes are matched to the model's by id, then by a name that is unique. A picture
    that cannot be read is reported and not counted; the exit code is then 1.
    """
    with output.FetchDisplay(quiet) as fetching:
        predictor = Predictor(model, device, precision, offline, fetching)
    from vitcli import evaluate as library

    with output.Meter("pictures", quiet=quiet) as meter:

        def advance(done: int, total: int) -> None:
            meter.total = total
            meter.advance(done - meter.done)

        report = library.evaluate(
            predictor,
            DataConfig(data, classes=classes),
            split,
            batch_size,
            advance,
            lambda text: output.note(text, quiet),
        )
    for warning in report.warnings:
        output.warning(warning)
    for name, error in report.errors:
        output.error(f"{name}: {error.what}")
    if json:
        output.json_line(as_object(report))
    else:
        show(report)
    if plot is not None:
        draw(report, plot)
        output.note(f"the confusion matrix is in {plot}", quiet)
    if reliability is not None:
        from vitcli import plots

        plots.reliability(report.evaluation.calibration, reliability)
        output.note(f"the reliability diagram is in {reliability}", quiet)
    if report.errors:
        output.note(f"{len(report.errors):,} pictures could not be read and are not counted")
        raise typer.Exit(1)


def as_object(report: Report) -> dict[str, Any]:
    """The report as JSON has it; figures in [0, 1]."""
    from vitcli.checkpoints.timm_config import unique_names

    figures, names = report.evaluation, unique_names(report.classes)
    return {
        "model": report.model,
        "data": report.data,
        "part": report.part,
        "pictures": figures.count,
        "unreadable": len(report.errors),
        "top1": figures.top1,
        "top5": figures.top5,
        "macro_f1": figures.macro_f1,
        "ece": figures.ece,
        "loss": figures.loss,
        "classes": [
            {
                "index": row.index,
                "id": report.classes[row.index].id,
                "label": names[row.index],
                "pictures": row.count,
                "recall": row.recall,
                "precision": row.precision,
                "f1": row.f1,
            }
            for row in figures.by_class
        ],
        "confusion": [
            {"label": int(label), "prediction": int(prediction), "pictures": int(count)}
            for label, prediction, count in zip(
                figures.labels, figures.predictions, figures.counts, strict=True
            )
        ],
    }


def show(report: Report) -> None:
    """The report for people."""
    from vitcli.checkpoints.timm_config import unique_names

    figures, names = report.evaluation, unique_names(report.classes)
    output.line(f"{report.model} on {report.data}: {report.part}, {figures.count:,} pictures")
    output.line("   ".join([*output.figures(figures.figures()), f"loss {figures.loss:.4f}"]))
    output.line()
    rows = [
        [names[row.index], f"{row.count:,}", *map(_percent, (row.recall, row.precision, row.f1))]
        for row in figures.by_class
        if row.count
    ]
    output.table(["class", "pictures", "recall", "precision", "F1"], rows, numbers=range(1, 5))
    shown = figures.seen
    output.line()
    if len(shown) <= TABLE:
        counts = figures.confusion_of(shown)
        header = ["label \\ prediction", *(names[i] for i in shown)]
        cells = [[names[i], *map(str, row)] for i, row in zip(shown, counts.tolist(), strict=True)]
        output.table(header, cells, numbers=range(1, len(header)))
    else:
        mistakes = figures.mistakes(MISTAKES)
        cells = [[names[a], names[b], f"{count:,}"] for a, b, count in mistakes]
        output.table(["label", "taken for", "pictures"], cells, numbers=[2])


def draw(report: Report, path: str) -> None:
    """The confusion matrix as a picture."""
    from vitcli import plots
    from vitcli.checkpoints.timm_config import unique_names

    names, shown = unique_names(report.classes), report.evaluation.seen
    if len(shown) > plots.DRAWN:
        raise OutputError(
            f"a confusion matrix of {len(shown):,} classes is too large to draw",
            where=path,
            hint="--json lists what was taken for what",
        )
    plots.confusion_matrix(report.evaluation.confusion_of(shown), [names[i] for i in shown], path)


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{part:.1%}"
