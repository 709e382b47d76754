"""Images of figures: confusions, calibration, the curves of a run. Arrays in, a file out.

matplotlib is imported here and nowhere else, without pyplot: nothing opens a window. The ending of
the file (.png, .pdf, .svg) decides its format.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from vitcli.atomic import whole_file

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "text.parse_math": False,  # a class may be called "$5 or $10"
}
TRAINING, VALIDATION, NEUTRAL = "#0072b2", "#d55e00", "#555555"
LINES = (TRAINING, VALIDATION, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", NEUTRAL)
"""Told apart by colour-blind readers too (Okabe and Ito)."""

NUMBERED, NAMED, DRAWN = 25, 100, 2000
"""Up to so many classes, a confusion matrix shows counts in its cells; names on its axes; can be
drawn."""


class Bins(Protocol):
    """Answers by their confidence (`vitcli.metrics.Calibration`): three arrays (M,) of the bins'
    answers, mean confidences and accuracies, and their mean gap."""

    @property
    def counts(self) -> npt.NDArray[np.int64]: ...
    @property
    def confidence(self) -> npt.NDArray[np.float64]: ...
    @property
    def accuracy(self) -> npt.NDArray[np.float64]: ...
    @property
    def error(self) -> float: ...


def confusion_matrix(
    confusion: npt.NDArray[np.integer[Any]], names: Sequence[str], path: str | Path
) -> None:
    """Draws a confusion matrix.

    Args:
        confusion: (K, K) counts: row is the label, column the prediction. Colours show each row's
            shares, so that classes of any size compare.
        names: of the K classes.
        path: the image, written whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    counts = np.asarray(confusion)
    k = len(counts)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.4 + (0.42 * k if k <= NUMBERED else 0.14 * k if k <= NAMED else 5.0)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(side + 0.8, side), layout="constrained")
        axes = figure.add_subplot()
        # The square root lets a confusion of a few per cent be seen beside a full diagonal.
        image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
        axes.set(xlabel="prediction", ylabel="label")
        for spine in axes.spines.values():
            spine.set_visible(False)
        if k <= NAMED:
            size = 9 if k <= NUMBERED else 6
            short = [name if len(name) <= 24 else name[:23] + "…" for name in names]
            axes.set_xticks(range(k), short, rotation=90 if k > 6 else 30, fontsize=size)
            if k <= 6:
                for label in axes.get_xticklabels():
                    label.set(ha="right", rotation_mode="anchor")
            axes.set_yticks(range(k), short, fontsize=size)
            axes.tick_params(length=0)
        else:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        if k <= NUMBERED:
            _write_counts(axes, counts, shares)
        bar = figure.colorbar(image, ax=axes, shrink=0.75, aspect=25, pad=0.02)
        bar.ax.yaxis.set_major_formatter(PercentFormatter(1))
        bar.set_label("share of the label's images")
        bar.outline.set_visible(False)
        _save(figure, path)


def _write_counts(
    axes: Axes, counts: npt.NDArray[np.integer[Any]], shares: npt.NDArray[np.floating[Any]]
) -> None:
    widest = len(f"{int(counts.max(initial=0)):,}")
    for row, column in np.argwhere(counts > 0):
        axes.text(
            column,
            row,
            f"{counts[row, column]:,}",
            ha="center",
            va="center",
            fontsize=8 if widest <= 4 else 6,
            color="white" if shares[row, column] > 0.4 else "#222222",
        )


def reliability(calibration: Bins, path: str | Path) -> None:
    """Draws a reliability diagram (Guo et al. 2017, figure 1): the accuracy of each bin of the
    confidence, its gap to the mean confidence, and how many answers the bin holds.

    Raises:
        OutputError: it cannot be written.
    """
    counts, bins = calibration.counts, len(calibration.counts)
    centres, full = (np.arange(bins) + 0.5) / bins, calibration.counts > 0
    x, accuracy, confidence = (
        centres[full],
        calibration.accuracy[full],
        calibration.confidence[full],
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.2, 5.0), layout="constrained")
        axes, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
        width = 1 / bins
        axes.plot([0, 1], [0, 1], color=NEUTRAL, linewidth=0.8, linestyle="--", zorder=3)
        axes.bar(x, accuracy, width, color=TRAINING, edgecolor="white", label="accuracy")
        axes.bar(
            x,
            confidence - accuracy,
            width,
            accuracy,
            color=(VALIDATION, 0.25),
            edgecolor=VALIDATION,
            linewidth=0.8,
            label="gap to the mean confidence",
        )
        axes.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"expected calibration error {calibration.error:.1%}", loc="left", pad=20)
        # Above the bars: within the axes there is no corner that they never reach.
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)
        histogram.bar(
            centres, counts / max(counts.sum(), 1), width, color=NEUTRAL, edgecolor="white"
        )
        histogram.set(xlabel="confidence", ylabel="share of answers")
        for axis in (axes.yaxis, histogram.xaxis, histogram.yaxis):
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
        _save(figure, path)


def training_curves(metrics: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Draws a run: loss, accuracy and learning rate against the step, one above the other.

    Args:
        metrics: lines of metrics.jsonl: {"step", "loss", "accuracy", "lr"} of training,
            {"step", "val_loss", "val_top1"} of evaluations; accuracies in [0, 1].
        path: the image, written whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    lines = list(metrics)
    with mpl.rc_context({**STYLE, "text.parse_math": True}):
        figure = Figure(figsize=(6.4, 6.0), layout="constrained")
        loss, accuracy, rate = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.6])
        for axes, train, val in (
            (loss, "loss", "val_loss"),
            (accuracy, "accuracy", "val_top1"),
        ):
            _draw_noisy(axes, *_series(lines, train), "training")
            steps, values = _series(lines, val)
            few = len(steps) <= 30
            axes.plot(
                steps, values, color=VALIDATION, marker="o" if few else "", ms=3, label="validation"
            )
            if axes.has_data() and len(steps):
                axes.legend(loc="best")
        loss.set_ylabel("loss")
        accuracy.set_ylabel("accuracy")
        accuracy.yaxis.set_major_formatter(PercentFormatter(1))
        steps, values = _series(lines, "lr")
        rate.plot(steps, values, color=NEUTRAL)
        rate.set(ylabel="learning rate", xlabel="step")
        rate.set_ylim(bottom=0)
        rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
        rate.xaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in (loss, accuracy, rate):
            axes.margins(x=0.01)
        figure.align_ylabels()
        _save(figure, path)


def _series(
    lines: Iterable[Mapping[str, Any]], key: str
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(steps, values) of the lines that have a value under `key`."""
    points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _draw_noisy(
    axes: Axes,
    steps: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    label: str,
) -> None:
    """A noisy curve: as it is, pale, and its running mean."""
    window = len(values) // 30
    if window < 2:
        axes.plot(steps, values, color=TRAINING, label=label)
        return
    axes.plot(steps, values, color=TRAINING, alpha=0.25, linewidth=0.8)
    # The mean of what is there of the window: no bend towards zero at the ends.
    kernel = np.ones(2 * window + 1)
    mean = np.convolve(values, kernel, "same") / np.convolve(np.ones_like(values), kernel, "same")
    axes.plot(steps, mean, color=TRAINING, label=label)


def accuracy_by_shots(
    shots: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]], path: str | Path
) -> None:
    """Draws few-shot accuracy: a dot for each seed, a line through the means.

    Args:
        shots: training images of each class, drawn on a logarithmic axis.
        curves: name -> for each number of shots the accuracies of the seeds, in [0, 1]. Names
            are shown where there are several curves.
        path: the image, written whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        axes = figure.subplots()
        colours = (
            [TRAINING]
            if len(curves) == 1
            else mpl.colormaps["viridis"].resampled(256)(np.linspace(0.0, 0.85, len(curves)))
        )
        for (name, accuracies), colour in zip(curves.items(), colours, strict=True):
            for count, values in zip(shots, accuracies, strict=True):
                axes.plot([count] * len(values), values, "o", color=colour, alpha=0.4, ms=4)
            means = [float(np.mean(values)) for values in accuracies]
            axes.plot(shots, means, color=colour, label=name)
        if len(curves) > 1:
            axes.legend(loc="best")
        axes.set_xscale("log")
        axes.set_xticks(shots, [str(count) for count in shots])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="training images of each class", ylabel="accuracy on the test part")
        _save(figure, path)


def accuracy_by_resolution(
    lines: Mapping[str, Sequence[tuple[tuple[int, int], float]]],
    trained: tuple[int, int],
    path: str | Path,
) -> None:
    """Draws accuracy against the resolution of the images, a line for each data set.

    Args:
        lines: by the data's name, ((height, width), accuracy in [0, 1]) of each resolution.
        trained: the model's own resolution, which is marked.
        path: the image, written whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """

    def side(size: tuple[int, int]) -> float:
        return float(np.sqrt(size[0] * size[1]))

    sizes = sorted({size for points in lines.values() for size, _ in points} | {trained}, key=side)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.axvline(side(trained), color=NEUTRAL, linewidth=0.8, linestyle="--")
        for i, (name, points) in enumerate(lines.items()):
            ordered = sorted((side(size), value) for size, value in points)
            axes.plot(
                *zip(*ordered, strict=True),
                marker="o",
                ms=4,
                color=LINES[i % len(LINES)],
                label=name,
            )
        axes.set_xticks(
            [side(size) for size in sizes],
            [str(h) if h == w else f"{h}x{w}" for h, w in sizes],
            rotation=90 if len(sizes) > 8 or any(h != w for h, w in sizes) else 0,
        )
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="resolution (dashed: the checkpoint's)", ylabel="top-1 accuracy")
        if len(lines) > 1:
            axes.legend(loc="best")
        _save(figure, path)


def accuracy_by_rate(
    trials: Sequence[tuple[float, float | None]], best: float, path: str | Path
) -> None:
    """Draws a sweep: validation accuracy against the peak learning rate.

    Args:
        trials: (learning rate, drawn on a logarithmic axis; accuracy in [0, 1], or None where the
            loss diverged, which is told below the axis).
        best: the rate that was chosen.
        path: the image, written whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    sound = sorted((rate, accuracy) for rate, accuracy in trials if accuracy is not None)
    rates = sorted(rate for rate, _ in trials)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.plot(*zip(*sound, strict=True), "-o", color=TRAINING, ms=4)
        chosen = dict(sound)[best]
        inward = {rates[-1]: "right", rates[0]: "left"}  # beside an axis the label would cross it
        axes.plot([best], [chosen], "o", color=VALIDATION, ms=7)
        axes.annotate(
            f"{best:g}: {chosen:.1%}",
            (best, chosen),
            xytext=(0, 7),
            textcoords="offset points",
            ha=inward.get(best, "center"),
            color=VALIDATION,
        )
        axes.margins(0.1, 0.15)
        axes.set_xscale("log")
        diverged = {rate for rate, accuracy in trials if accuracy is None}
        axes.set_xticks(rates, [f"{r:g}" + "\ndiverged" * (r in diverged) for r in rates])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set(xlabel="peak learning rate", ylabel="validation accuracy")
        _save(figure, path)


def position_similarity(
    tables: Sequence[tuple[str, npt.NDArray[np.float64]]], path: str | Path
) -> None:
    """Draws cosine similarities of position embeddings side by side, one title and one square of
    tiles each: a tile shows one position's similarity with all others (the paper's Figure 7).

    Raises:
        OutputError: it cannot be written.
    """
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(4.2 * len(tables) + 0.6, 4.2), layout="constrained")
        grid = figure.subplots(1, len(tables), squeeze=False)
        for axes, (title, tiles) in zip(grid[0], tables, strict=True):
            image = axes.imshow(tiles, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
            axes.set(title=title, xticks=[], yticks=[], xlabel="patch column", ylabel="patch row")
            rows, columns = (math.isqrt(size) for size in tiles.shape)
            edges = {"color": "white", "linewidth": 0.6}
            for row in range(1, rows):
                axes.axhline(row * rows - 0.5, **edges)
            for column in range(1, columns):
                axes.axvline(column * columns - 0.5, **edges)
        figure.colorbar(image, ax=grid[0].tolist(), label="cosine similarity", shrink=0.8)
        _save(figure, path)


def _save(figure: Figure, path: str | Path) -> None:
    """Writes a figure, whole or not at all."""
    path = Path(path)
    drawn = io.BytesIO()
    # No date and no version: the same figures give the same file.
    kind = path.suffix.lower().removeprefix(".") or "png"
    stamps = {"png": ("Software",), "svg": ("Date", "Creator"), "pdf": ("CreationDate", "Producer")}
    nothing = dict.fromkeys(stamps.get(kind, ()))
    with warnings.catch_warnings():
        # Names may be in any script; who looks at the image sees what the font lacks.
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        figure.savefig(drawn, format=kind, dpi=200, metadata=nothing)
    with whole_file(path) as file:
        file.write(drawn.getvalue())
