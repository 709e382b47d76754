"""Fixtures: a small dataset that is easy to learn, and runs on it that take about a second."""

import functools
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import disable_figures
from train.runs import COLORS, TINY
from vitcli.config import AugmentConfig, DataConfig
from vitcli.train.config import TrainConfig
from vitcli.train.loop import train


@pytest.fixture(scope="session")
def colors(tmp_path_factory) -> Path:
    """Class folders for three colors, with 20 noisy images each."""
    root = tmp_path_factory.mktemp("colors")
    rng = np.random.default_rng(0)
    for name, color in COLORS.items():
        (root / name).mkdir()
        for i in range(20):
            noise = rng.normal(0, 40, (20, 24, 3))
            pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:02}.png")
    return root


@pytest.fixture
def make_splits(colors, tmp_path):
    """Factory of a dataset with the images of `colors` that have these numbers, by split (which may
    be ""). The files in `damaged` are no images."""

    def make(splits: dict[str, Iterable[int]], damaged: Iterable[str] = ()) -> Path:
        root = tmp_path / "data"
        for split, numbers in splits.items():
            for name in COLORS:
                (root / split / name).mkdir(parents=True)
                for i in numbers:
                    shutil.copy(colors / name / f"{i:02}.png", root / split / name)
        for file in damaged:
            (root / file).write_bytes(b"damaged")
        return root

    return make


@pytest.fixture(scope="session")
def make_run(colors):
    """Factory of the TrainConfig for 12 steps from scratch; keyword arguments override fields."""

    def make(**fields) -> TrainConfig:
        defaults = {
            "data": DataConfig(str(colors), val_fraction=0.2),
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


@pytest.fixture
def tiny_run(make_run, tmp_path):
    """`make_run` with its output in the test's temporary directory."""
    return functools.partial(make_run, output=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def finished(make_run, tmp_path_factory) -> Path:
    """The directory of a finished run, for tests to start from or copy."""
    run = make_run(output=str(tmp_path_factory.mktemp("finished") / "run"))
    with pytest.MonkeyPatch.context() as patch:
        disable_figures(patch)
        train(run)
    return Path(run.output)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for the disk: only a power failure shows the difference."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def no_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip figures, which tests/test_plots.py tests, unless the test requests `draw_figures`."""
    if "draw_figures" not in request.fixturenames:
        disable_figures(monkeypatch)


@pytest.fixture
def draw_figures() -> None:
    """Request this fixture to draw figures."""
