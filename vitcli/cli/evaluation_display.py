"""What `vit evaluate` prints and plots: reports as JSON or tables, rows of predictions, figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints.info import unique_names
from vitcli.cli import output
from vitcli.config import METRICS, Size
from vitcli.errors import OutputError
from vitcli.words import format_size, pluralize

if TYPE_CHECKING:
    from vitcli.evaluation.evaluate import LabeledPrediction, Report

MAX_MATRIX_CLASSES = 20
"""Maximum number of classes for which the confusion matrix is printed."""
TOP_MISTAKES = 10
"""Number of most frequent mistakes printed instead if there are more classes."""
TOP_CLASSES = 5
"""Number of top classes in a row of predictions."""


def as_object(report: Report) -> dict[str, Any]:
    """Return the report as a JSON object: metrics in [0, 1], classes by the model's indices."""
    evaluation, names, indices = report.evaluation, unique_names(report.classes), report.indices
    same = ("model", "data", "split", "resolution", "device", "precision", "images")
    result: dict[str, Any] = {
        **{name: getattr(report, name) for name in same},
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
    output.line(f"{report.model} on {report.data}: {report.split} ({report.images:,})")
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
    seen = evaluation.seen
    rows = [
        [names[row.index], f"{row.count:,}", *map(_percent, (row.recall, row.precision, row.f1))]
        for row in evaluation.by_class
    ]
    output.table(["class", "images", "recall", "precision", "F1"], rows, numeric=range(1, 5))
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
    resolutions = {report.resolution for report in reports}
    several = len(resolutions) > 1
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
    output.line(reports[0].model)
    output.table(header, rows, numeric=range(2, len(header)))
    if several and stored in resolutions:
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
    from vitcli.figures import plots

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
            name, accuracy = next(iter(_metrics(report).items()))  # top-1, else ReaL accuracy
            lines.setdefault(report.data, []).append((report.resolution, accuracy))
        plots.accuracy_by_resolution(lines, stored, plot, "ReaL" if name == "real" else "top-1")
        output.note(f"accuracy against resolution: {plot}")
    if reliability is not None and evaluation is not None:
        plots.reliability(*evaluation.calibration, evaluation.ece, reliability)
        output.note(f"reliability diagram: {reliability}")
