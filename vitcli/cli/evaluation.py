"""An evaluation as JSON, tables, plots and rows of predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitcli.cli import output
from vitcli.errors import OutputError
from vitcli.words import counted

if TYPE_CHECKING:
    from vitcli.config import ClassLabel, Size
    from vitcli.evaluate import Answer, Report
    from vitcli.metrics import Evaluation

TABLE = 20
"""Classes up to which the confusion matrix is printed."""
MISTAKES = 10
"""Most frequent mistakes that are printed instead where there are more."""
BEST = 5
"""Classes in a row of predictions."""


def as_object(report: Report) -> dict[str, Any]:
    """The report as JSON: metrics in [0, 1], classes by the model's indices."""
    from vitcli.checkpoints.info import unique_names
    from vitcli.config import METRICS

    found, names, index = report.evaluation, unique_names(report.classes), report.indices
    result: dict[str, Any] = {
        "model": report.model,
        "data": report.data,
        "split": report.split,
        "resolution": list(report.resolution),
        "images": report.images,
        "unreadable": len(report.errors),
        "among": len(report.classes),
        **{name: getattr(found, name, None) for name in (*METRICS, "loss")},
    }
    if (real := report.real) is not None:
        result["real"] = {"top1": real.accuracy, "images": real.count, "left_out": real.left_out}
    classes, confusion = [], []
    if found is not None:
        classes = [
            {
                "index": index[row.index],
                "id": report.classes[row.index].id,
                "label": names[row.index],
                "images": row.count,
                "recall": row.recall,
                "precision": row.precision,
                "f1": row.f1,
            }
            for row in found.by_class
        ]
        pairs = zip(found.labels, found.predictions, found.counts, strict=True)
        confusion = [
            {"label": index[label], "prediction": index[prediction], "images": int(count)}
            for label, prediction, count in pairs
        ]
    return result | {"classes": classes, "confusion": confusion}


def show(report: Report) -> None:
    """One report for people: its metrics, each class, and what is taken for what."""
    from vitcli.checkpoints.info import unique_names

    found, names, real = report.evaluation, unique_names(report.classes), report.real
    images = counted(report.images, "image")
    output.line(f"{report.model} on {report.data}: {report.split}, {images}")
    if found is not None:
        output.line("   ".join([*output.metrics(found.metrics()), f"loss {found.loss:.4f}"]))
    if real is not None:
        output.line(
            f"ReaL {_percent(real.accuracy, 2)} of {counted(real.count, 'image')} "
            f"({real.left_out:,} without a correct class left out)"
        )
    if found is None:
        return
    output.line()
    rows = [
        [names[row.index], f"{row.count:,}", *map(_percent, (row.recall, row.precision, row.f1))]
        for row in found.by_class
        if row.count
    ]
    output.table(["class", "images", "recall", "precision", "F1"], rows, numbers=range(1, 5))
    shown = found.seen
    output.line()
    if len(shown) <= TABLE:
        counts = found.confusion_of(shown)
        header = ["label \\ prediction", *(names[i] for i in shown)]
        cells = [[names[i], *map(str, row)] for i, row in zip(shown, counts.tolist(), strict=True)]
        output.table(header, cells, numbers=range(1, len(header)))
    else:
        mistakes = found.mistakes(MISTAKES)
        cells = [[names[a], names[b], f"{count:,}"] for a, b, count in mistakes]
        output.table(["label", "predicted as", "images"], cells, numbers=[2])


def summarise(reports: Sequence[Report], stored: Size, method: str) -> None:
    """Several reports for people: a row each, by dataset and then by resolution.

    Args:
        stored: the checkpoint's own resolution.
        method: how its position embeddings were resized for others.
    """
    from vitcli.config import METRICS

    several = len({report.resolution for report in reports}) > 1
    names = {key: name for key, (_, name) in METRICS.items()}
    values = [_metrics(report) for report in reports]
    shown = [key for key in (*names, "real") if any(key in row for row in values)]
    header = ["data", "split", *["resolution"] * several, "images"]
    header += [names.get(key, "ReaL") for key in shown]
    rows = [
        [
            report.data,
            report.split,
            *[size_text(report.resolution) + " *" * (report.resolution == stored)] * several,
            f"{report.images:,}",
            *(_percent(row.get(key, math.nan)) for key in shown),
        ]
        for report, row in zip(reports, values, strict=True)
    ]
    output.line(reports[0].model)
    output.table(header, rows, numbers=range(2, len(header)))
    if several:
        output.line(
            "* the checkpoint's own resolution; for others its position embeddings are resized "
            f"({method})"
        )


def _metrics(report: Report) -> dict[str, float]:
    own = {} if report.evaluation is None else report.evaluation.metrics()
    return own if report.real is None else own | {"real": report.real.accuracy}


def size_text(size: Size) -> str:
    """ "224", or "192x320" (height x width)."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def _percent(share: float, places: int = 1) -> str:
    return "-" if math.isnan(share) else f"{share:.{places}%}"


@dataclass(frozen=True)
class PredictionRow:
    """The answer for one image; classes are ids."""

    data: str
    answer: Answer

    def to_json(self) -> dict[str, Any]:
        answer = self.answer
        row: dict[str, Any] = {"data": self.data, "file": answer.file}
        row["label"] = answer.label.id if answer.label else None
        if answer.error is not None:
            return row | {"error": answer.error.what}
        best = [{"id": label.id, "score": score} for label, score in answer.best]
        correct = None if answer.label is None else answer.correct
        return row | {"predictions": best, "correct": correct, "real": answer.accepted}

    def records(self) -> list[dict[str, Any]]:
        """Correct and real are 1 or 0, or empty where there is no label."""
        answer = self.answer
        judged = answer.error is None and answer.label is not None
        best: list[Any] = [cell for label, score in answer.best for cell in (label.id, score)]
        best += [None] * (2 * BEST - len(best))
        names = [f"{word}{rank}" for rank in range(2, BEST + 1) for word in ("prediction", "score")]
        return [
            {
                "data": self.data,
                "file": answer.file,
                "label": answer.label.id if answer.label else None,
                "prediction": best[0],
                "score": best[1],
                "correct": int(answer.correct) if judged else None,
                "real": None if answer.accepted is None else int(answer.accepted),
                **dict(zip(names, best[2:], strict=True)),
                "error": answer.error.what if answer.error else None,
            }
        ]

    def text(self, terminal: bool) -> str | None:
        return None


def draw(
    reports: Sequence[Report], stored: Size, plot: str | None, reliability: str | None
) -> None:
    """Draws the plots: the confusion matrix of one report, or accuracy against resolution of
    several; the reliability diagram of one."""
    if plot is None and reliability is None:
        return
    from vitcli import plots

    own = reports[0].evaluation
    if own is None and len(reports) == 1:
        output.warning("nothing to plot: these images have no labels of their own")
        return
    if plot is not None and len(reports) == 1 and own is not None:
        _draw_confusion(reports[0].classes, own, plot)
        output.note(f"confusion matrix: {plot}")
    elif plot is not None:
        lines: dict[str, list[tuple[Size, float]]] = {}
        for report in reports:
            accuracy = next(iter(_metrics(report).values()))  # top-1, else ReaL's
            lines.setdefault(report.data, []).append((report.resolution, accuracy))
        plots.accuracy_by_resolution(lines, stored, plot)
        output.note(f"accuracy against resolution: {plot}")
    if reliability is not None and own is not None:
        bins = own.calibration
        plots.reliability(bins.counts, bins.confidence, bins.accuracy, bins.error, reliability)
        output.note(f"reliability diagram: {reliability}")


def _draw_confusion(classes: tuple[ClassLabel, ...], found: Evaluation, path: str) -> None:
    from vitcli import plots
    from vitcli.checkpoints.info import unique_names

    names, shown = unique_names(classes), found.seen
    if len(shown) > plots.DRAWN:
        raise OutputError(
            f"a confusion matrix of {len(shown):,} classes is too large to plot",
            where=path,
            hint="--json prints it as a list",
        )
    plots.confusion_matrix(found.confusion_of(shown), [names[i] for i in shown], path)
