"""The forms that an evaluation is shown in: tables, JSON, CSV, images."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vitcli.cli import output
from vitcli.errors import OutputError

if TYPE_CHECKING:
    from vitcli.config import ClassLabel, Size
    from vitcli.evaluate import Answer, Report
    from vitcli.metrics import Evaluation

TABLE = 20
"""Up to so many classes, the confusion matrix is printed."""
MISTAKES = 10
"""With more, so many of the most frequent mistakes are."""
BEST = 5
"""Answers that a row of predictions holds."""


def as_object(report: Report) -> dict[str, Any]:
    """The report as JSON has it; figures in [0, 1], classes by the model's indices."""
    from vitcli.checkpoints.info import unique_names

    figures, names, index = report.evaluation, unique_names(report.classes), report.indices
    known = ("top1", "top5", "macro_f1", "ece", "loss")
    told: dict[str, Any] = {
        "model": report.model,
        "data": report.data,
        "split": report.split,
        "resolution": list(report.resolution),
        "images": report.images,
        "unreadable": len(report.errors),
        "among": len(report.classes),
        **{name: getattr(figures, name, None) for name in known},
    }
    if report.real is not None:
        real = report.real
        told["real"] = {
            "top1": real.accuracy,
            "images": real.count,
            "left_out": real.left_out,
        }
    told |= {"classes": [], "confusion": []}
    if figures is None:
        return told
    told["classes"] = [
        {
            "index": index[row.index],
            "id": report.classes[row.index].id,
            "label": names[row.index],
            "images": row.count,
            "recall": row.recall,
            "precision": row.precision,
            "f1": row.f1,
        }
        for row in figures.by_class
    ]
    told["confusion"] = [
        {"label": index[label], "prediction": index[prediction], "images": int(count)}
        for label, prediction, count in zip(
            figures.labels, figures.predictions, figures.counts, strict=True
        )
    ]
    return told


def show(report: Report) -> None:
    """One report for people: its figures, each class, what is taken for what."""
    from vitcli.checkpoints.info import unique_names

    figures, names = report.evaluation, unique_names(report.classes)
    output.line(f"{report.model} on {report.data}: {report.split}, {report.images:,} images")
    if figures is not None:
        output.line("   ".join([*output.figures(figures.figures()), f"loss {figures.loss:.4f}"]))
    if report.real is not None:
        output.line(
            f"ReaL {_percent(report.real.accuracy, 2)} of {report.real.count:,} images "
            f"({report.real.left_out:,} without a class that is right)"
        )
    if figures is None:
        return
    output.line()
    rows = [
        [names[row.index], f"{row.count:,}", *map(_percent, (row.recall, row.precision, row.f1))]
        for row in figures.by_class
        if row.count
    ]
    output.table(["class", "images", "recall", "precision", "F1"], rows, numbers=range(1, 5))
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
        output.table(["label", "taken for", "images"], cells, numbers=[2])


def summarise(reports: Sequence[Report], stored: Size, method: str) -> None:
    """Several reports for people: a row each, by data and then by resolution.

    Args:
        stored: the resolution that the model was trained at.
        method: how its position embeddings were resized for others.
    """
    from vitcli.config import FIGURES

    several = len({report.resolution for report in reports}) > 1
    names = {key: name for key, (_, name) in FIGURES.items()}
    values = [_figures(report) for report in reports]
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
            "* the resolution of the checkpoint; at others its position embeddings are resized "
            f"({method})"
        )


def _figures(report: Report) -> dict[str, float]:
    own = {} if report.evaluation is None else report.evaluation.figures()
    return own if report.real is None else own | {"real": report.real.accuracy}


def size_text(size: Size) -> str:
    """ "224", or "192x320" (height x width)."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def _percent(part: float, places: int = 1) -> str:
    return "-" if math.isnan(part) else f"{part:.{places}%}"


# ---------------------------------------------------------------------------------------------
# Files


@contextmanager
def predictions_file(path: str | None) -> Iterator[Callable[[str, Answer], None]]:
    """Called with a data set and an answer; writes a row of a CSV for each.

    Columns: data, file, label, prediction, score, correct, real, then prediction2, score2 and so on
    of the five best, and error. Classes are ids; correct and real are 1 or 0, or empty where
    nothing can be said.
    """
    if path is None:
        yield lambda data, answer: None
        return
    with output.results_file(path) as file:
        table = csv.writer(file, lineterminator="\n")
        columns = ["data", "file", "label", "prediction", "score", "correct", "real"]
        others = [
            f"{word}{rank}" for rank in range(2, BEST + 1) for word in ("prediction", "score")
        ]
        table.writerow([*columns, *others, "error"])

        def write(data: str, answer: Answer) -> None:
            cells = [cell for label, score in answer.best for cell in (label.id, score)]
            cells += [""] * (2 * BEST - len(cells))
            judged = answer.error is None and answer.label is not None
            table.writerow(
                [
                    *(data, answer.file, answer.label.id if answer.label else "", *cells[:2]),
                    int(answer.correct) if judged else "",
                    "" if answer.accepted is None else int(answer.accepted),
                    *(*cells[2:], answer.error.what if answer.error else ""),
                ]
            )

        yield write


def draw(
    reports: Sequence[Report], stored: Size, plot: str | None, reliability: str | None, quiet: bool
) -> None:
    """The images that were asked for: a confusion matrix of one report, or accuracy against
    resolution of several; a reliability diagram of one."""
    if plot is None and reliability is None:
        return
    from vitcli import plots

    own = reports[0].evaluation
    if own is None and len(reports) == 1:
        output.warning("nothing is drawn: these images have no labels of their own")
        return
    if plot is not None and len(reports) == 1 and own is not None:
        _draw_confusion(reports[0].classes, own, plot)
        output.note(f"the confusion matrix is in {plot}", quiet)
    elif plot is not None:
        lines: dict[str, list[tuple[Size, float]]] = {}
        for report in reports:
            accuracy = next(iter(_figures(report).values()))  # top-1, else ReaL's
            lines.setdefault(report.data, []).append((report.resolution, accuracy))
        plots.accuracy_by_resolution(lines, stored, plot)
        output.note(f"accuracy against resolution is in {plot}", quiet)
    if reliability is not None and own is not None:
        bins = own.calibration
        plots.reliability(bins.counts, bins.confidence, bins.accuracy, bins.error, reliability)
        output.note(f"the reliability diagram is in {reliability}", quiet)


def _draw_confusion(classes: tuple[ClassLabel, ...], found: Evaluation, path: str) -> None:
    from vitcli import plots
    from vitcli.checkpoints.info import unique_names

    names, shown = unique_names(classes), found.seen
    if len(shown) > plots.DRAWN:
        raise OutputError(
            f"a confusion matrix of {len(shown):,} classes is too large to draw",
            where=path,
            hint="--json lists what was taken for what",
        )
    plots.confusion_matrix(found.confusion_of(shown), [names[i] for i in shown], path)
