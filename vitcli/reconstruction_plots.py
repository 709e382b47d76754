"""Figures of masked images and their reconstructions. Arrays in, a file out, as in `plots.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.figure_file import figure_file

Colours = npt.NDArray[np.floating[Any]]


def reconstructions(original: Colours, hidden: Colours, filled: Colours, path: str | Path) -> None:
    """Draws images in three rows: as they are, as the model sees them, and as it completes them.

    Args:
        original, hidden, filled: (n, H, W, 3), RGB in [0, 1].
    """
    rows = {"original": original, "masked": hidden, "reconstructed": filled}
    count, (height, width) = len(original), original.shape[1:3]
    side = 1.3 * height / width
    with figure_file(path, 1.3 * count + 0.3, 3 * side, grid=False) as figure:
        panels = figure.subplots(3, count, squeeze=False)
        for line, (name, images) in zip(panels, rows.items(), strict=True):
            for axes, image in zip(line, images, strict=True):
                axes.imshow(np.clip(image, 0, 1), interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            line[0].set_ylabel(name)
