"""A small data set that can be learnt, and a run on it that takes a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from vitcli import plots
from vitcli.config import AugmentConfig, DataConfig
from vitcli.train_config import TrainConfig

COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}


@pytest.fixture(scope="session")
def colours(tmp_path_factory) -> Path:
    """Three classes of 20 noisy images of one colour each, in class folders."""
    root = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (root / name).mkdir()
        for i in range(20):
            noise = rng.normal(0, 40, (20, 24, 3))
            pixels = np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


TINY = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 32}


@pytest.fixture
def tiny_run(colours, tmp_path):
    """Makes the TrainConfig of a run of 12 steps from scratch; fields can be overridden."""

    def make(**fields) -> TrainConfig:
        defaults = {
            "data": DataConfig(str(colours), val_fraction=0.2),
            "output": str(tmp_path / "run"),
            "task": "pretrain",
            "variant": "Ti/8",
            "overrides": TINY,
            "resolution": (16, 16),
            "augment": AugmentConfig(crop_area=(0.5, 1.0)),
            "optimizer": "adamw",
            "lr": 3e-3,
            "steps": 12,
            "batch_size": 12,
            "eval_every": 4,
            "device": "cpu",
            "precision": "fp32",
            "workers": 0,
        }
        return TrainConfig(**(defaults | fields))

    return make


class RoughFigure(Figure):
    """A figure without a layout, at a tenth of the resolution."""

    def __init__(self, *arguments, layout=None, **more) -> None:
        super().__init__(*arguments, **more)

    def savefig(self, *arguments, dpi=200, **more) -> None:
        super().savefig(*arguments, dpi=dpi // 10, **more)


@pytest.fixture(autouse=True)
def rough_figures(monkeypatch) -> None:
    """Most of the time of a short run would be its figures, which tests/test_plots.py tests."""
    monkeypatch.setattr(plots, "Figure", RoughFigure)
