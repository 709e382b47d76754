"""A small data set that can be learnt, and a run on it that takes a second."""

import functools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitcli import plots
from vitcli.config import AugmentConfig, DataConfig
from vitcli.train.loop import train
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


@pytest.fixture(scope="session")
def make_run(colours):
    """Makes the TrainConfig of a run of 12 steps from scratch; fields can be overridden."""

    def make(**fields) -> TrainConfig:
        defaults = {
            "data": DataConfig(str(colours), val_fraction=0.2),
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
    """As `make_run`, into a directory of the test."""
    return functools.partial(make_run, output=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def finished(make_run, tmp_path_factory) -> Path:
    """The directory of a finished run: for tests that start from one, or copy it."""
    run = make_run(output=str(tmp_path_factory.mktemp("finished") / "run"))
    with pytest.MonkeyPatch.context() as patch:
        leave_out_figures(patch)
        train(run)
    return Path(run.output)


def leave_out_figures(patch: pytest.MonkeyPatch) -> None:
    """Most of the time of a short run would be its figures: empty files of their names will do."""

    def draw(*arguments) -> None:
        next(value for value in arguments if isinstance(value, Path)).touch()

    names = ("training_curves", "confusion_matrix", "reliability", "accuracy_by_rate")
    for name in (*names, "reconstructions"):
        patch.setattr(plots, name, draw)


@pytest.fixture(autouse=True)
def figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/test_plots.py tests the figures; here, only tests that ask for `drawn` have them."""
    if "drawn" not in request.fixturenames:
        leave_out_figures(monkeypatch)


@pytest.fixture
def drawn() -> None:
    """Figures are drawn."""
