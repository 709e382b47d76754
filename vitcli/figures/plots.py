"""Plots of evaluations and training runs. Each function draws arrays to an image file."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from vitcli.figures.figure_file import BLUE, COLORS, GRAY, ORANGE, figure_file, short_names

MAX_WITH_COUNTS, MAX_LABELED, MAX_DRAWN = 25, 100, 2000
"""Maximum number of classes of a confusion matrix to print counts in cells, to label every class,
and to draw it at all."""
MARKERS = "osD^v<>"
"""Shapes of points, one for each of `COLORS`."""

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.integer[Any]]


def confusion_matrix(confusion: Ints, names: Sequence[str], path: str | Path) -> None:
    """Draw a confusion matrix.

    Args:
        confusion: (K, K) counts: rows are labels, columns predictions. Colors are normalized by
            row, so that classes of different sizes are comparable.
        names: names of the K classes; if there are many, only the most confused are labeled.
    """
    counts, k = np.asarray(confusion), len(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.4 + (0.42 * k if k <= MAX_WITH_COUNTS else 0.14 * k if k <= MAX_LABELED else 7.0)
    labels, ticks = short_names(names), _most_confused(counts)
    with figure_file(path, side + 0.8, side, grid=False) as figure:
        axes = figure.add_subplot()
        # The square root makes confusions of a few percent visible beside a strong diagonal.
        image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1))
        note = "" if k <= MAX_LABELED else f" ({len(ticks)} of {k:,} named: those confused most)"
        axes.set(xlabel="prediction", ylabel="label" + note)
        axes.spines[:].set_visible(False)
        style: dict[str, Any] = {"fontsize": 9 if k <= MAX_WITH_COUNTS else 6}
        axes.set_yticks(ticks, [labels[i] for i in ticks], **style)
        style |= {"rotation": 90, "va": "center"} if k > 6 else {"rotation": 30, "va": "top"}
        style |= {"ha": "right", "rotation_mode": "anchor"}
        axes.set_xticks(ticks, [labels[i] for i in ticks], **style)
        axes.tick_params(length=0 if k <= MAX_LABELED else 2)
        if k <= MAX_WITH_COUNTS:
            size = 8 if counts.max(initial=0) < 1000 else 6
            for row, column in np.argwhere(counts > 0):
                color = "white" if shares[row, column] > 0.4 else "#222222"
                text = axes.text(column, row, f"{counts[row, column]:,}", ha="center", va="center")
                text.set(fontsize=size, color=color)
        colorbar = figure.colorbar(image, ax=axes, shrink=0.75, aspect=25, pad=0.02)
        colorbar.ax.yaxis.set_major_formatter(_percent)
        colorbar.set_label("share of the label's images")
        colorbar.outline.set_visible(False)


def _percent(share: float, position: float) -> str:
    return f"{100 * share:g}%"


def _most_confused(counts: Ints) -> list[int]:
    """Return the most confused classes whose labels do not overlap; all if there are few."""
    k, chosen = len(counts), list[int]()
    errors = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    for i in np.argsort(-errors, kind="stable"):
        if k <= MAX_LABELED or all(abs(i - other) >= k / 60 for other in chosen):
            chosen.append(int(i))
    return sorted(chosen)


def reliability(
    counts: Ints, confidence: Floats, accuracy: Floats, error: float, path: str | Path
) -> None:
    """Draw a reliability diagram (Guo et al. 2017, figure 1).

    Args:
        counts, confidence, accuracy: (M,): number of predictions, mean confidence and accuracy of
            each of M equal-width confidence bins.
        error: the expected calibration error.
    """
    bins = len(counts)
    width, centers, nonempty = 1 / bins, (np.arange(bins) + 0.5) / bins, np.asarray(counts) > 0
    x, heights, gaps = centers[nonempty], accuracy[nonempty], (confidence - accuracy)[nonempty]
    with figure_file(path, 4.2, 5.2) as figure:
        axes, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[3.4, 1])
        axes.bar(x, heights, width, color=BLUE, edgecolor="white", label="accuracy")
        hatch = {"facecolor": "none", "edgecolor": ORANGE, "hatch": "////", "linewidth": 0.8}
        axes.bar(x, gaps, width, heights, label="gap to confidence", **hatch)
        dashes = {"color": GRAY, "linewidth": 0.8, "linestyle": "--"}
        axes.plot([0, 1], [0, 1], **dashes, label="perfect calibration")
        axes.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        axes.set_title(f"expected calibration error {error:.1%}", loc="left", pad=34)
        # Above the axes, as the bars may reach every corner.
        axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2)
        shares = counts / max(counts.sum(), 1)
        histogram.bar(centers, shares, width, color=GRAY, edgecolor="white")
        histogram.set(xlabel="confidence", ylabel="share of images")
        for axis in (axes.yaxis, histogram.xaxis, histogram.yaxis):
            axis.set_major_formatter(_percent)


def training_curves(
    metrics: Iterable[Mapping[str, Any]], path: str | Path, stored_step: int | None = None
) -> None:
    """Plot loss, accuracy (if there is any) and learning rate of a run against the step.

    Args:
        metrics: records of metrics.jsonl: {"step", "loss", "accuracy", "lr"} of training,
            {"step", "val_loss", "val_top1"} of evaluations, with "ema_val_loss" and "ema_val_top1"
            of averaged weights, {"step", "probe_5shot", ...} of probes; accuracies in [0, 1].
        stored_step: step of the saved weights, which is marked.
    """
    records = list(metrics)
    probes = sorted({k for row in records for k in row if k.startswith("probe_")}, key=_parse_shots)
    heights = {"loss": 3.0, "accuracy": 3.0, "few-shot accuracy": 2.4, "learning rate": 1.6}
    if records and all(row.get("accuracy") is None for row in records):
        del heights["accuracy"]
    if not probes:
        del heights["few-shot accuracy"]
    with figure_file(path, 6.4, 0.4 + 0.74 * sum(heights.values())) as figure:
        layout: dict[str, Any] = {"sharex": True, "height_ratios": list(heights.values())}
        panels = dict(zip(heights, figure.subplots(len(heights), 1, **layout), strict=True))
        for name, train, val in (
            ("loss", "loss", "val_loss"),
            ("accuracy", "accuracy", "val_top1"),
        ):
            if name not in panels:
                continue
            axes = panels[name]
            steps, values = _series(records, train)
            if (window := len(steps) // 30) >= 2:  # noisy: plot it pale, and its moving average
                axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
                values = _running_mean(values, window)
            axes.plot(steps, values, color=BLUE, label="training")
            averaged = ("validation, EMA", f"ema_{val}", COLORS[2])
            for label, key, color in (("validation", val, ORANGE), averaged):
                steps, values = _series(records, key)
                style = {"marker": "o" if len(steps) <= 30 else "", "ms": 3}
                if len(steps):
                    axes.plot(steps, values, color=color, label=label, **style)
        for key, color in zip(probes, COLORS, strict=False):
            points = _series(records, key)
            label = f"{_parse_shots(key)} image{'s' * (_parse_shots(key) != 1)} per class"
            panels["few-shot accuracy"].plot(*points, "-o", ms=3, color=color, label=label)
        lr_axes = panels["learning rate"]
        lr_axes.plot(*_series(records, "lr"), color=GRAY)
        for name, axes in panels.items():
            axes.margins(x=0.01)
            axes.set_ylabel(name)
            if stored_step is not None:
                label = f"stored weights: step {stored_step:,}"
                axes.axvline(stored_step, color=GRAY, linewidth=0.8, linestyle=":", label=label)
            if axes is not lr_axes and len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(loc="best")
            if "accuracy" in name:
                _scale_accuracy(axes)
        lr_axes.set_xlabel("step")
        lr_axes.set_ylim(bottom=0)
        lr_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
        lr_axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        figure.align_ylabels()


def _parse_shots(key: str) -> int:
    """Parse the number of shots: 10 for "probe_10shot"."""
    return int(key.removeprefix("probe_").removesuffix("shot"))


def _series(records: Iterable[Mapping[str, Any]], key: str) -> tuple[Floats, Floats]:
    """Return (steps, values) of the records that have a value for `key`."""
    points = [(row["step"], row[key]) for row in records if row.get(key) is not None]
    steps, values = np.array(points, np.float64).reshape(-1, 2).T
    return steps, values


def _running_mean(values: Floats, window: int) -> Floats:
    """Centered moving average, with up to `window` values on each side."""
    kernel, ones = np.ones(2 * window + 1), np.ones_like(values)
    mean: Floats = np.convolve(values, kernel, "same") / np.convolve(ones, kernel, "same")
    return mean


def accuracy_by_shots(
    shots: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]], path: str | Path
) -> None:
    """Plot few-shot accuracy: a dot for each seed, and a line through the means.

    Args:
        shots: training images per class.
        curves: accuracies in [0, 1] by name, then shots, then seed.
    """
    colors: Any = [BLUE]
    if len(curves) > 1:
        colors = mpl.colormaps["viridis"](np.linspace(0.0, 0.85, len(curves)))
    with figure_file(path, 4.6, 3.4) as figure:
        axes = figure.subplots()
        for (name, accuracies), color in zip(curves.items(), colors, strict=True):
            for count, values in zip(shots, accuracies, strict=True):
                axes.plot([count] * len(values), values, "o", color=color, alpha=0.4, ms=4)
            means = [float(np.mean(values)) for values in accuracies]
            label = name if len(curves) > 1 else "mean of the seeds"
            axes.plot(shots, means, "_-", color=color, label=label)
        color = BLUE if len(curves) == 1 else GRAY
        axes.plot([], [], "o", color=color, alpha=0.4, ms=4, label="one seed")
        axes.legend(loc="best")
        _scale_log(axes, shots, [str(count) for count in shots])
        axes.set(xlabel="training images per class", ylabel="accuracy")


def accuracy_by_resolution(
    curves: Mapping[str, Sequence[tuple[tuple[int, int], float]]],
    own_size: tuple[int, int],
    path: str | Path,
    metric: str = "top-1",
) -> None:
    """Plot accuracy against image resolution, one line per dataset.

    Args:
        curves: maps dataset names to ((height, width), accuracy in [0, 1]) for each resolution.
        own_size: the model's own resolution, which is marked.
    """
    sizes = {size for points in curves.values() for size, _ in points} | {own_size}
    sides = {size: math.sqrt(math.prod(size)) for size in sizes}
    with figure_file(path, 4.6, 3.4) as figure:
        axes = figure.subplots()
        axes.axvline(sides[own_size], color=GRAY, linewidth=0.8, linestyle="--")
        for i, (name, points) in enumerate(zip(short_names(curves), curves.values(), strict=True)):
            x, y = zip(*sorted((sides[size], value) for size, value in points), strict=True)
            axes.plot(x, y, "-o", ms=4, color=COLORS[i % len(COLORS)], label=name)
        axes.set_xticks(
            list(sides.values()),
            [str(h) if h == w else f"{h}x{w}" for h, w in sides],
            rotation=90 if len(sizes) > 8 or any(h != w for h, w in sizes) else 0,
        )
        _scale_accuracy(axes)
        axes.set(xlabel="resolution (dashed: the checkpoint's own)", ylabel=f"{metric} accuracy")
        if len(curves) > 1:
            axes.legend(loc="best")


def speed_by_resolution(
    curves: Mapping[tuple[str, str], Sequence[tuple[tuple[int, int], float, int]]], path: str | Path
) -> None:
    """Plot images per second and largest batch size against image resolution, as in the paper's
    Figure 12 (appendix D.5): one color per model, dashed lines for training.

    Args:
        curves: maps (model, "inference" or "training") to ((height, width), images per second,
            largest batch) for each resolution.
    """
    models = list(dict.fromkeys(model for model, _ in curves))
    names = dict(zip(models, short_names(models), strict=True))
    height = 2.8 + 0.17 * (1 + len(curves) // 2)
    with figure_file(path, 7.2, height) as figure:
        panels = figure.subplots(1, 2)
        for (model, work), points in curves.items():
            index = models.index(model)
            style: Any = {"color": COLORS[index % len(COLORS)], "ms": 5}
            # Open markers of different shapes, as values of several models may be equal.
            style |= {"marker": MARKERS[index % len(MARKERS)], "mfc": "none"}
            style |= {"label": names[model] + f", {work}" * (work != "inference")}
            side, *values = zip(
                *sorted((math.sqrt(math.prod(size)), *y) for size, *y in points), strict=True
            )
            for axes, value in zip(panels, values, strict=True):
                axes.plot(side, value, "-" if work == "inference" else "--", **style)
        for axes, label in zip(panels, ("images per second", "largest batch"), strict=True):
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(
                LogLocator(subs=(1, 2, 5) if high > 10 * low else range(1, 10))
            )
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_xticks(sorted({x for line in axes.lines for x in line.get_xdata()}))
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel="input size in pixels", ylabel=label)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def accuracy_by_rate(
    trials: Sequence[tuple[float, float | None]], best: float, path: str | Path
) -> None:
    """Plot validation accuracy of a sweep against peak learning rate.

    Args:
        trials: (learning rate, accuracy in [0, 1], or None if the loss diverged).
        best: the selected learning rate.
    """
    converged = sorted((rate, accuracy) for rate, accuracy in trials if accuracy is not None)
    rates = sorted(rate for rate, _ in trials)
    best_accuracy = dict(converged)[best]
    tied = [accuracy for _, accuracy in converged].count(best_accuracy) > 1
    with figure_file(path, 4.6, 3.4) as figure:
        axes = figure.subplots()
        axes.plot(*zip(*converged, strict=True), "-o", color=BLUE, ms=4)
        axes.plot([best], [best_accuracy], "o", color=ORANGE, ms=7)
        alignment: dict[float, Literal["left", "right"]] = {rates[-1]: "right", rates[0]: "left"}
        axes.annotate(
            f"{best:g}: {best_accuracy:.1%}" + "\n(tied; lowest loss)" * tied,
            (best, best_accuracy),
            xytext=(0, 7),
            textcoords="offset points",
            ha=alignment.get(best, "center"),  # centered text would cross the axis
            color=ORANGE,
        )
        axes.margins(0.1, 0.25 if tied else 0.15)
        diverged = {rate for rate, accuracy in trials if accuracy is None}
        _scale_log(axes, rates, [f"{r:g}" + "\ndiverged" * (r in diverged) for r in rates])
        axes.set(xlabel="peak learning rate", ylabel="validation accuracy")


def _scale_log(axes: Axes, values: Sequence[float], labels: Sequence[str]) -> None:
    """Set a logarithmic x axis with the given ticks, and a y axis of accuracy."""
    axes.set_xscale("log")
    axes.set_xticks(values, labels)
    axes.minorticks_off()
    _scale_accuracy(axes)


def _scale_accuracy(axes: Axes) -> None:
    """Set a y axis in percent that does not reach below 0, once everything is drawn."""
    axes.yaxis.set_major_formatter(_percent)
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))
    for line in axes.lines:  # points at 0% would be cut in half
        line.set(clip_on=False, zorder=3)


def position_similarity(
    tables: Sequence[tuple[str, npt.NDArray[np.float64]]], path: str | Path
) -> None:
    """Draw cosine similarities of position embeddings as titled grids of tiles; each tile shows
    one position's similarity to all others (the paper's Figure 7). The tiles of a single row or
    column of patches are stacked.

    Args:
        tables: (title, (rows * rows, columns * columns)).
    """
    grids = [[math.isqrt(size) for size in tiles.shape] for _, tiles in tables]
    ratios = [1 if 1 in grid else grid[1] / grid[0] for grid in grids]
    widths, heights = [3.6 * ratio for ratio in ratios], [3.6 / ratio for ratio in ratios]
    layout: dict[str, Any]
    if max(ratios) > 1:  # stack wide grids vertically
        width, height = max(widths), sum(heights) + 0.7 * (len(tables) - 1)
        layout = {"nrows": len(tables), "height_ratios": heights}
    else:
        width, height = sum(widths) + 0.6 * (len(tables) - 1), max(heights)
        layout = {"ncols": len(tables), "width_ratios": widths}
    with figure_file(path, width + 1.5, height + 0.7, grid=False) as figure:
        panels = list(np.ravel(figure.subplots(squeeze=False, **layout)))
        for axes, (title, tiles), (rows, columns) in zip(panels, tables, grids, strict=True):
            labels = {"xlabel": "patch column", "ylabel": "patch row"}
            if 1 in (rows, columns):
                labels = dict.fromkeys(labels, "patch row" if columns == 1 else "patch column")
                tiles, rows, columns = tiles.reshape(rows * columns, -1), 1, 1  # no edges
            image = axes.imshow(tiles, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
            axes.set(title=title, xticks=[], yticks=[], **labels)
            edges = {"color": "white", "linewidth": 0.6}
            for row in range(1, rows):
                axes.axhline(row * rows - 0.5, **edges)
            for column in range(1, columns):
                axes.axvline(column * columns - 0.5, **edges)
        figure.colorbar(image, ax=panels, label="cosine similarity", shrink=0.8)


def reconstructions(original: Floats, masked: Floats, filled: Floats, path: str | Path) -> None:
    """Draw images in three rows: original, masked, and with masked patches filled in by the model.

    Args:
        original, masked, filled: (n, H, W, 3), RGB in [0, 1].
    """
    rows = {"original": original, "masked": masked, "reconstructed": filled}
    count, (height, width) = len(original), original.shape[1:3]
    side = 1.3 * height / width
    with figure_file(path, 1.3 * count + 0.3, 3 * side, grid=False) as figure:
        panels = figure.subplots(3, count, squeeze=False)
        for row, (name, images) in zip(panels, rows.items(), strict=True):
            for axes, image in zip(row, images, strict=True):
                axes.imshow(np.clip(image, 0, 1), interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            row[0].set_ylabel(name)
