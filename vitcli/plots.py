"""Arrays to pictures. Matplotlib is imported here and nowhere else, and draws without a screen."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitcli.checkpoints.atomic import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"
MOST_NAMES = 40
"""Classes from which a confusion matrix shows no names: they could not be read."""


def training_curves(lines: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Loss, accuracy and learning rate against the step.

    Args:
        lines: of metrics.jsonl: "train" and "evaluation" events.
        path: a .png; written whole or not at all.
    """
    trained = [line for line in lines if line["event"] == "train"]
    evaluated = [line for line in lines if line["event"] == "evaluation"]
    figure = _figure(11, 3.2)
    loss, accuracy, rate = figure.subplots(1, 3)
    steps = [line["step"] for line in trained]
    at = [line["step"] for line in evaluated]
    _curve(loss, steps, [line["loss"] for line in trained], BLUE, "training")
    loss.plot(at, [line["val_loss"] for line in evaluated], "o-", color=ORANGE, ms=3)
    _curve(accuracy, steps, [100 * line["accuracy"] for line in trained], BLUE, "training")
    top1 = [100 * line["val_top1"] for line in evaluated]
    accuracy.plot(at, top1, "o-", color=ORANGE, ms=3, label="validation")
    rate.plot(steps, [line["lr"] for line in trained], color=GREY)
    for axes, title in ((loss, "loss"), (accuracy, "accuracy, %"), (rate, "learning rate")):
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    accuracy.legend(frameon=False)
    _save(figure, path)


def confusion_matrix(
    counts: npt.NDArray[np.int64], names: Sequence[str], path: str | Path
) -> None:
    """How often pictures of each class (rows) were taken for each class (columns), in percent.

    Args:
        counts: (K, K) pictures by label and prediction.
        names: of the K classes.
        path: a .png; written whole or not at all.
    """
    k = len(names)
    percent = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = float(np.clip(0.45 * k + 1.5, 4, 12))
    figure = _figure(side + 1, side)
    axes = figure.subplots()
    shown = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    if k <= MOST_NAMES:
        axes.set_xticks(range(k), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(k), names)
    if k <= 20:
        for row, column in np.argwhere(counts > 0):
            value = percent[row, column]
            colour = "white" if value > 50 else "black"
            text = f"{value:.0f}" if value >= 0.5 else "<1"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(shown, label="% of the class", fraction=0.046, pad=0.03)
    _save(figure, path)


def _curve(axes: Any, x: Sequence[float], y: Sequence[float], colour: str, label: str) -> None:
    """A noisy curve: faint as measured, strong as a running mean over a fiftieth of it."""
    width = max(1, len(y) // 50)
    axes.plot(x, y, color=colour, alpha=0.25 if width > 1 else 1, lw=1)
    if width > 1:
        smooth = np.convolve(y, np.ones(width) / width, mode="valid")
        axes.plot(x[width - 1 :], smooth, color=colour)
    axes.plot([], [], color=colour, label=label)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _save(figure: Figure, path: str | Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    with whole_file(path) as file:
        file.write(buffer.getvalue())
