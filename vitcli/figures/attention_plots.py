"""Figures for `vit inspect`: attention maps, heads, filters, attention distances.

Each function draws arrays to an image file, as in `plots.py`, and raises OutputError if it cannot
be written. Maps are drawn in viridis, which is perceptually uniform.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitcli.figures.figure_file import ORANGE, figure_file, one_line

Floats = npt.NDArray[np.floating[Any]]
Pixels = npt.NDArray[np.uint8]

COLORMAP = "viridis"
OPACITY = 0.6
"""Opacity of a map drawn over its image."""
MAX_SHEET_IMAGES = 64
"""Maximum number of images on a contact sheet."""
TAIL = 20
"""Characters kept at the end of a title that is too long: the predicted class and its score."""


class Panel(NamedTuple):
    """One image and its map."""

    title: str
    image: Pixels
    """(h, w, 3)."""
    map: Floats
    """(rows, columns), or (rows, columns, 3) colors in [0, 1]."""

    def smaller(self) -> Panel:
        """Return the panel with the image downscaled for a contact sheet, to save memory."""
        image = Image.fromarray(self.image)
        image.thumbnail((400, 400))
        return self._replace(image=np.asarray(image))


INK, PAPER = "#e8e8e8", "#111111"
DARK: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), PAPER),
}


def background(dark: bool) -> contextlib.AbstractContextManager[Any]:
    """Context manager that sets the background of all figures, also those of `plots.py`."""
    return mpl.rc_context(DARK if dark else {})


def _overlay(axes: Axes, image: Pixels, values: Floats, scale: Normalize | None = None) -> None:
    """Draw a map over its image, interpolated between patches; RGB maps are not interpolated."""
    height, width = image.shape[:2]
    extent = (0.0, float(width), float(height), 0.0)
    if values.ndim == 3:
        axes.imshow(values, extent=extent, interpolation="nearest")
    else:
        gray = np.asarray(Image.fromarray(image).convert("L"))  # keeps the map's colors accurate
        axes.imshow(gray, extent=extent, cmap="gray", vmin=0, vmax=255)
        style: Any = {"cmap": COLORMAP, "norm": scale, "alpha": OPACITY}
        axes.imshow(values, extent=extent, interpolation="bilinear", **style)
    axes.set(xlim=extent[:2], ylim=extent[2:])
    axes.set_axis_off()


def _add_colorbar(figure: Figure, axes: Any, scale: Normalize, label: str) -> None:
    bar = figure.colorbar(ScalarMappable(scale, COLORMAP), ax=axes, shrink=0.8, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(label)


def _height_ratio(image: Pixels) -> float:
    """Height of an image's cell for a width of 1; a figure of a very tall image would fill the
    memory."""
    return min(4.0, float(image.shape[0] / image.shape[1]))


def side_by_side(panel: Panel, label: str, path: str | Path) -> None:
    """Draw an image and its map side by side, as in Figure 6 of the paper.

    Args:
        label: label of the color bar; RGB maps have none.
        path: .png, .pdf or .svg; written atomically.
    """
    ratio = _height_ratio(panel.image)
    with figure_file(path, 8.0, 3.6 * ratio + 0.4, grid=False) as figure:
        left, right = figure.subplots(1, 2)
        left.imshow(panel.image)
        left.set_axis_off()
        scale = None if panel.map.ndim == 3 else Normalize(panel.map.min(), panel.map.max())
        _overlay(right, panel.image, panel.map, scale)
        if scale is not None:
            _add_colorbar(figure, right, scale, label)
        figure.suptitle(one_line(panel.title, 90, TAIL), fontsize=10)


def contact_sheet(panels: Sequence[Panel], path: str | Path) -> None:
    """Draw up to `MAX_SHEET_IMAGES` images next to their maps, each map on its own color scale."""
    panels = panels[:MAX_SHEET_IMAGES]
    columns = min(len(panels), 2 if len(panels) <= 8 else 3 if len(panels) <= 24 else 4)
    rows = math.ceil(len(panels) / columns)
    ratio = float(np.median([_height_ratio(panel.image) for panel in panels]))
    with figure_file(path, 4.0 * columns, (2.0 * ratio + 0.3) * rows, grid=False) as figure:
        cells = figure.subplots(rows, 2 * columns, squeeze=False)
        for cell in cells.flat:
            cell.set_axis_off()
        for i, panel in enumerate(panels):
            row, column = divmod(i, columns)
            cells[row, 2 * column].imshow(panel.image)
            title = one_line(panel.title, 40, TAIL)
            cells[row, 2 * column].set_title(title, loc="left", fontsize=7)
            _overlay(cells[row, 2 * column + 1], panel.image, panel.map)


def head_grid(image: Pixels, maps: Floats, title: str, path: str | Path) -> None:
    """Draw the attention of every head of one block over an image.

    Args:
        maps: (heads, rows, columns), all on one color scale.
    """
    columns = min(len(maps), 4)
    rows = math.ceil(len(maps) / columns)
    ratio = _height_ratio(image)
    with figure_file(
        path, 2.2 * columns + 0.8, (2.2 * ratio + 0.25) * rows + 0.4, grid=False
    ) as figure:
        cells = figure.subplots(rows, columns, squeeze=False)
        scale = Normalize(maps.min(), maps.max())
        for head, cell in enumerate(cells.flat):
            cell.set_axis_off()
            if head < len(maps):
                _overlay(cell, image, maps[head], scale)
                cell.set_title(f"head {head}", fontsize=8)
        _add_colorbar(figure, cells, scale, "attention")
        figure.suptitle(one_line(title, 90, TAIL), fontsize=10)


def filter_tiles(filters: Floats, path: str | Path) -> None:
    """Draw principal components of filters, (n, height, width, 3) in [0, 1] (Figure 7, left)."""
    columns = 7
    rows = math.ceil(len(filters) / columns)
    with figure_file(path, columns * 0.85, rows * 0.85 + 0.35, grid=False) as figure:
        cells = figure.subplots(rows, columns, squeeze=False)
        for i, cell in enumerate(cells.flat):
            cell.set_axis_off()
            if i < len(filters):
                cell.imshow(filters[i], interpolation="nearest")
        figure.suptitle(f"first {len(filters)} principal components of the filters", fontsize=9)


def distance_by_depth(distances: Floats, path: str | Path) -> None:
    """Plot the mean attention distance of each head against its block (Figure 7, right).

    Args:
        distances: (blocks, heads), in pixels.
    """
    blocks, heads = distances.shape
    with figure_file(path, 5.0, 3.6) as figure:
        axes = figure.subplots()
        block_indices = np.repeat(np.arange(blocks), heads)
        style: Any = {"s": 18, "alpha": 0.75, "lw": 0, "clip_on": False}
        axes.scatter(block_indices, distances.reshape(-1), label="one head", **style)
        axes.plot(distances.mean(axis=1), color=ORANGE, label="mean of the heads")
        axes.set(xlabel="block", ylabel="mean attention distance (pixels)")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.legend(loc="lower right")


def faithfulness_curves(
    deletion: tuple[Floats, Floats], insertion: tuple[Floats, Floats], title: str, path: str | Path
) -> None:
    """Plot the score of a class as patches are removed or revealed, most relevant first.

    Args:
        deletion, insertion: the curves of the map and of random maps, (steps + 1,) each.
    """
    with figure_file(path, 7.0, 3.0) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        headings = ("deletion (lower is better)", "insertion (higher is better)")
        for axes, heading, curves in zip(panels, headings, (deletion, insertion), strict=True):
            percent = np.linspace(0, 100, len(curves[0]))
            for curve, name, style in zip(curves, ("map", "random maps"), ("-", "--"), strict=True):
                area = float(np.trapezoid(curve, dx=1 / (len(curve) - 1)))
                axes.plot(percent, curve, style, label=f"{name}, area {area:.3f}")
            axes.set(title=heading, xlabel="patches (%)")
            axes.legend()
        panels[0].set_ylabel("score")
        if min(float(curve.min()) for curve in (*deletion, *insertion)) >= 0:
            panels[0].set_ylim(bottom=0)
        figure.suptitle(one_line(title, 80, TAIL), fontsize=10)
