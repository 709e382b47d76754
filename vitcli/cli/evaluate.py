"""`vit evaluate`."""

from __future__ import annotations

import functools
import math
import os
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from vitcli.checkpoints.info import unique_names
from vitcli.cli import output
from vitcli.cli.launch import on_devices
from vitcli.cli.options import (
    INPUT,
    MODEL,
    PreprocessOptions,
    check_dataset_overwrite,
    check_overwrite,
    model_files,
    note_assumptions,
    open_predictor,
    parse_figure,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.cli.rows import Csv, open_writer
from vitcli.config import CLASS_LIST, DATA, DATA_KINDS, METRICS, DataConfig, Size, hub_or_path
from vitcli.errors import OutputError
from vitcli.fields import option, parse_output, parse_sizes
from vitcli.words import format_size, pluralize

if TYPE_CHECKING:
    from vitcli.evaluate import LabeledPrediction, Report


MAX_MATRIX_CLASSES = 20
"""Maximum number of classes for which the confusion matrix is printed."""
TOP_MISTAKES = 10
"""Number of most frequent mistakes printed instead if there are more classes."""
TOP_CLASSES = 5
"""Number of top classes in a row of predictions."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(PreprocessOptions):
    """Options of `vit evaluate`."""

    model: str = option("default", "--model -m NAME|PATH|REPO", MODEL, DATA)
    data: list[str] = option(..., "--data PATH", f"Labeled images: {DATA_KINDS}; repeatable.", DATA)
    split: Literal["auto", "train", "val", "test"] = option(
        "auto",
        "--split",
        "Split to evaluate on; auto: the test split if there is one, else the validation split, "
        "else all images. If the model was trained on this data, the validation split is what its "
        "run held out.",
    )
    classes: str | None = option(None, "--classes FILE", CLASS_LIST)
    real_labels: bool = option(
        False,
        "--real-labels",
        "Also score against ReaL labels, which allow several correct classes per image; requires "
        "ImageNet validation images with their original file names.",
    )
    mapping: str | None = option(
        None,
        "--mapping FILE",
        "File with a line per class of the dataset: the class, a tab, and the model's class (ids "
        "or names; - skips the images). If a class has several lines, any of their model classes "
        "counts as correct.",
    )
    among: Literal["auto", "model", "data", "imagenet-1k"] = option(
        "auto",
        "--among",
        "Classes that the model may predict. model: all of its own; data: the dataset's; "
        "imagenet-1k: those of ImageNet-1k; auto: imagenet-1k for an ImageNet-21k model on "
        "ImageNet-1k data, else model.",
    )
    skip_unknown: bool = option(
        False, "--skip-unknown", "Skip images of classes that the model does not have."
    )
    predictions: str | None = option(
        None,
        "--predictions FILE",
        "Write the top 5 classes of each image to FILE, in the format given by its suffix: CSV for "
        ".csv or no suffix, JSON Lines for .json or .jsonl, Parquet for .parquet.",
        "Options",
        parse=parse_output,
    )
    plot: str | None = option(
        None,
        "--plot FILE",
        "Plot the confusion matrix (.png, .pdf or .svg); with several resolutions, accuracy "
        "against resolution.",
        parse=parse_figure,
    )
    reliability: str | None = option(
        None,
        "--reliability FILE",
        "Plot a reliability diagram: accuracy against confidence (.png, .pdf or .svg).",
        parse=parse_figure,
    )
    resolution: tuple[Size, ...] = option(
        (),
        "--resolution --resolutions N|HxW,...",
        "Input sizes in pixels, each evaluated in turn; position embeddings are resized to match.  "
        "[default: the model's]",
        INPUT,
        parse=parse_sizes,
    )


@command(Evaluate)
@on_devices("predictions", "plot", "reliability")
def evaluate(args: Evaluate) -> None:
    """Evaluate a model on labeled images: accuracy, macro F1, calibration and per-class metrics.

    Matches the dataset's classes to the model's by id, then by name if it is unique. Images that
    cannot be read are reported and skipped, and the exit code is 1. For several datasets or
    resolutions, prints a table with a row for each.

    \b
    Examples:
      vit evaluate --data photos --model runs/photos
      vit evaluate --data imagenet/val --model vit-b16-i21k --real-labels
      vit evaluate --data photos --resolution 192,224,256 --plot accuracy.png
    """
    data, sizes = [hub_or_path(path) for path in args.data], args.resolution or (None,)
    is_single = len(data) * len(sizes) == 1
    _check_outputs(args, data, len(sizes))
    from vitcli import evaluate as library
    from vitcli.data.alignment import MatchRules, read_mapping
    from vitcli.hub import registry

    mapping = read_mapping(Path(args.mapping)) if args.mapping else {}
    accepted = registry.real_labels() if args.real_labels else None
    rules = MatchRules(mapping, args.among, args.skip_unknown)
    # Every resolution hits the same data problems; print each only once.
    warn, report_error = functools.cache(output.warning), functools.cache(output.error)
    reports: list[Report] = []
    file = args.predictions
    with open_writer(file, Csv, "'--predictions'") if file else nullcontext() as writer:

        def write_row(data_path: str, prediction: LabeledPrediction) -> None:
            if writer is not None:
                writer.write(PredictionRow(data_path, prediction))

        # Open everything before the first image, so that an invalid size or dataset fails early.
        predictors = deque(open_predictor(args, size) for size in sizes)
        note_assumptions(predictors[0])
        stored = predictors[0].stored_model.image_size
        configs = [DataConfig(path, classes=args.classes).reachable(args.offline) for path in data]
        arguments = (args.split, rules, accepted, functools.cache(output.note))
        datasets = [library.open_labeled(predictors[0], config, *arguments) for config in configs]
        while predictors:
            predictor = predictors.popleft()  # free its weights before loading the next
            size = f" at {format_size(predictor.info.model.image_size)}" * (len(sizes) > 1)
            for dataset in datasets:
                with output.Meter(f"images{size}") as meter:
                    report = library.evaluate(
                        predictor,
                        dataset,
                        args.batch_size,
                        args.workers,
                        on_prediction=partial(write_row, dataset.data),
                        on_progress=meter.update,
                    )
                for warning in report.warnings:
                    warn(warning)
                for name, error in report.errors:
                    report_error(f"{name}: {error.what}")
                if args.json:
                    output.json_line(as_object(report))
                reports.append(report)
    reports.sort(key=lambda report: data.index(report.data))
    if not args.json and is_single:
        show(reports[0])
    elif not args.json:
        summarize(reports, stored, args.posemb_method)
    if file:
        output.note(f"predictions: {file}")
    draw(reports, stored, args.plot, args.reliability)
    if failed := len({name for report in reports for name, _ in report.errors}):
        output.note(f"skipped {pluralize(failed, 'image')} that could not be read", always=True)
        raise typer.Exit(1)


def _check_outputs(args: Evaluate, data: Sequence[str], num_sizes: int) -> None:
    """Check the output options against the data and sizes. Raises BadParameter, OutputError."""
    if args.plot and len(data) > 1 and num_sizes == 1:
        raise UsageError("--plot requires a single --data for a confusion matrix")
    if args.reliability and len(data) * num_sizes > 1:
        raise UsageError("--reliability requires a single --data and a single resolution")
    if args.predictions and num_sizes > 1:
        raise UsageError("--predictions requires a single resolution")
    figures = [os.path.realpath(path) for path in (args.plot, args.reliability) if path]
    if len(figures) > len({*figures}):
        raise UsageError("--plot and --reliability must be different files")
    inputs = (*data, *model_files(args.model), args.classes, args.mapping)
    check_overwrite(inputs, args.predictions, "'--predictions'")
    for name, path in (("'--plot'", args.plot), ("'--reliability'", args.reliability)):
        check_dataset_overwrite(data, path, name)
        output.check_writable(path)


# ---------------------------------------------------------------------------------------------
# JSON, tables, rows of predictions and plots


def as_object(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object: metrics in [0, 1], classes by the model's indices."""
    evaluation, names, indices = report.evaluation, unique_names(report.classes), report.indices
    result: dict[str, Any] = {
        "model": report.model,
        "data": report.data,
        "split": report.split,
        "resolution": list(report.resolution),
        "device": report.device,
        "precision": report.precision,
        "images": report.images,
        "unreadable": len(report.errors),
        "among": len(report.classes),
        **{name: getattr(evaluation, name, None) for name in (*METRICS, "loss")},
    }
    if (real := report.real) is not None:
        result["real"] = {"top1": real.accuracy, "images": real.count, "left_out": real.left_out}
    classes, confusion = [], []
    if evaluation is not None:
        classes = [
            {
                "index": indices[row.index],
                "id": report.classes[row.index].id,
                "label": names[row.index],
                "images": row.count,
                "recall": row.recall,
                "precision": row.precision,
                "f1": row.f1,
            }
            for row in evaluation.by_class
        ]
        entries = zip(evaluation.labels, evaluation.predictions, evaluation.counts, strict=True)
        confusion = [
            {"label": indices[label], "prediction": indices[prediction], "images": int(count)}
            for label, prediction, count in entries
        ]
    return result | {"classes": classes, "confusion": confusion}


def show(report: Report) -> None:
    """Print one report: its metrics, a row per class, and the confusion matrix or top mistakes."""
    evaluation, names, real = report.evaluation, unique_names(report.classes), report.real
    title = f"{report.model} on {report.data}: {report.split} ({report.images:,})"
    output.line(output.printable(title))
    if evaluation is not None:
        metrics = [*output.format_metrics(evaluation.metrics()), f"loss {evaluation.loss:.4f}"]
        output.line("   ".join(metrics))
    if real is not None:
        output.line(
            f"ReaL accuracy {_percent(real.accuracy, 2)} on {pluralize(real.count, 'image')}, "
            f"leaving out {real.left_out:,} without a correct class"
        )
    if evaluation is None:
        return
    output.line()
    rows = [
        [names[row.index], f"{row.count:,}", *map(_percent, (row.recall, row.precision, row.f1))]
        for row in evaluation.by_class
        if row.count
    ]
    output.table(["class", "images", "recall", "precision", "F1"], rows, numeric=range(1, 5))
    seen = evaluation.seen
    output.line()
    if len(seen) <= MAX_MATRIX_CLASSES:
        counts = evaluation.confusion_matrix(seen)
        header = ["label \\ prediction", *(names[i] for i in seen)]
        cells = [[names[i], *map(str, row)] for i, row in zip(seen, counts.tolist(), strict=True)]
        output.table(header, cells, numeric=range(1, len(header)))
    else:
        mistakes = evaluation.top_confusions(TOP_MISTAKES)
        cells = [[names[a], names[b], f"{count:,}"] for a, b, count in mistakes]
        output.table(["label", "predicted as", "images"], cells, numeric=[2])


def summarize(reports: Sequence[Report], stored: Size, method: str) -> None:
    """Print a table with one row per report, by dataset and then by resolution.

    Args:
        stored: the checkpoint's own resolution.
        method: how its position embeddings were resized for other resolutions.
    """
    several = len({report.resolution for report in reports}) > 1
    metric_names = {key: name for key, (_, name) in METRICS.items()}
    metrics = [_metrics(report) for report in reports]
    keys = [key for key in (*metric_names, "real") if any(key in row for row in metrics)]
    header = ["data", "split", *["resolution"] * several, "images"]
    header += [metric_names.get(key, "ReaL") for key in keys]
    rows = [
        [
            report.data,
            report.split,
            *[format_size(report.resolution) + " *" * (report.resolution == stored)] * several,
            f"{report.images:,}",
            *(_percent(row.get(key, math.nan)) for key in keys),
        ]
        for report, row in zip(reports, metrics, strict=True)
    ]
    output.line(output.printable(reports[0].model))
    output.table(header, rows, numeric=range(2, len(header)))
    if several:
        output.line(
            "* the checkpoint's own resolution; for others its position embeddings are resized "
            f"({method})"
        )


def _metrics(report: Report) -> dict[str, float]:
    metrics = {} if report.evaluation is None else report.evaluation.metrics()
    return metrics if report.real is None else metrics | {"real": report.real.accuracy}


def _percent(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}%}"


@dataclass(frozen=True)
class PredictionRow:
    """The predictions for one image, with classes given by id."""

    data: str
    prediction: LabeledPrediction

    def to_json(self) -> dict[str, Any]:
        prediction = self.prediction
        row: dict[str, Any] = {"data": self.data, "file": prediction.file}
        row["label"] = prediction.label.id if prediction.label else None
        if prediction.error is not None:
            return row | {"error": prediction.error.what}
        predictions = [{"id": label.id, "score": score} for label, score in prediction.best]
        correct = None if prediction.label is None else prediction.correct
        return row | {"predictions": predictions, "correct": correct, "real": prediction.accepted}

    def records(self) -> list[dict[str, Any]]:
        """`correct` and `real` are 1 or 0, or empty if there is no label."""
        prediction = self.prediction
        is_scored = prediction.error is None and prediction.label is not None
        cells: list[Any] = [cell for label, score in prediction.best for cell in (label.id, score)]
        cells += [None] * (2 * TOP_CLASSES - len(cells))
        ranks = range(2, TOP_CLASSES + 1)
        columns = [f"{prefix}{rank}" for rank in ranks for prefix in ("prediction", "score")]
        return [
            {
                "data": self.data,
                "file": prediction.file,
                "label": prediction.label.id if prediction.label else None,
                "prediction": cells[0],
                "score": cells[1],
                "correct": int(prediction.correct) if is_scored else None,
                "real": None if prediction.accepted is None else int(prediction.accepted),
                **dict(zip(columns, cells[2:], strict=True)),
                "error": prediction.error.what if prediction.error else None,
            }
        ]

    def text(self, terminal: bool) -> str | None:
        return None


def draw(
    reports: Sequence[Report], stored: Size, plot: str | None, reliability: str | None
) -> None:
    """Draw the plots: for one report, the confusion matrix and the reliability diagram; for
    several, accuracy against resolution."""
    if plot is None and reliability is None:
        return
    from vitcli import plots

    evaluation = reports[0].evaluation if len(reports) == 1 else None
    if evaluation is None and len(reports) == 1:
        output.warning("nothing to plot: these images have no labels of their own")
    elif plot is not None and evaluation is not None:
        names, seen = unique_names(reports[0].classes), evaluation.seen
        if len(seen) > plots.MAX_DRAWN:
            raise OutputError(
                f"a confusion matrix of {len(seen):,} classes is too large to plot",
                where=plot,
                hint="--json prints it as a list",
            )
        plots.confusion_matrix(evaluation.confusion_matrix(seen), [names[i] for i in seen], plot)
        output.note(f"confusion matrix: {plot}")
    elif plot is not None:
        lines: dict[str, list[tuple[Size, float]]] = {}
        for report in reports:
            accuracy = next(iter(_metrics(report).values()))  # top-1, else ReaL accuracy
            lines.setdefault(report.data, []).append((report.resolution, accuracy))
        plots.accuracy_by_resolution(lines, stored, plot)
        output.note(f"accuracy against resolution: {plot}")
    if reliability is not None and evaluation is not None:
        plots.reliability(*evaluation.calibration, evaluation.ece, reliability)
        output.note(f"reliability diagram: {reliability}")
