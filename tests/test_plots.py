"""Images of figures: that they are drawn, hold what they should, and are written whole."""

from __future__ import annotations

import math
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from vitcli.errors import OutputError
from vitcli.metrics import Calibration
from vitcli.plots import (
    accuracy_by_rate,
    accuracy_by_shots,
    confusion_matrix,
    reliability,
    training_curves,
)


def metrics(steps: int) -> list[dict]:
    """Lines as the training loop writes them."""
    lines: list[dict] = []
    for step in range(1, steps + 1):
        done = step / steps
        line = {"event": "train", "step": step, "loss": 2 - done, "accuracy": done / 2}
        lines.append(line | {"lr": 0.01 * (1 + math.cos(math.pi * done))})
        if step % max(steps // 4, 1) == 0:
            lines.append({"event": "evaluation", "step": step, "val_loss": 2, "val_top1": done / 3})
    return lines


def words(path) -> set[str]:
    """The texts of an SVG."""
    return {"".join(e.itertext()) for e in ET.parse(path).iter() if e.tag.endswith("}text")}


@pytest.mark.parametrize("steps", [1, 3, 500])
def test_curves(tmp_path, steps):
    training_curves(metrics(steps), tmp_path / "curves.svg")
    assert {"loss", "accuracy", "learning rate", "step", "validation"} <= words(
        tmp_path / "curves.svg"
    )
    training_curves(metrics(steps), tmp_path / "curves.png")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1280, 1200)
        assert len(image.convert("RGB").getcolors(1 << 24)) > 10


def test_a_run_without_evaluations_has_no_legend(tmp_path):
    lines = [line for line in metrics(20) if line["event"] == "train"]
    training_curves(lines, tmp_path / "curves.svg")
    assert not {"training", "validation"} & words(tmp_path / "curves.svg")


def test_no_lines_at_all(tmp_path):
    training_curves([], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").exists()


def test_confusion_shows_counts_and_names(tmp_path):
    counts = np.array([[90, 10, 0], [1, 1234, 5], [0, 0, 0]])
    names = ["cat & dog", "a name that goes on and on and on", "<$nothing_$>"]
    confusion_matrix(counts, names, tmp_path / "confusion.svg")
    found = words(tmp_path / "confusion.svg")
    assert {"90", "10", "1", "1,234", "5", "cat & dog", "<$nothing_$>"} <= found
    assert "a name that goes on and…" in found
    assert {"label", "prediction"} <= found and "0" not in found


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_names_that_the_font_lacks_are_no_warning(tmp_path, kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        confusion_matrix(np.eye(2, dtype=np.int64), ["猫", "\t🐕"], tmp_path / f"confusion.{kind}")
    assert not caught


def test_other_warnings_are_heard(tmp_path, monkeypatch):
    def savefig(*_, **__):
        warnings.warn("something else", stacklevel=2)

    monkeypatch.setattr("vitcli.plots.Figure.savefig", savefig)
    with pytest.warns(UserWarning, match="something else"):
        training_curves([], tmp_path / "curves.png")


@pytest.mark.parametrize("classes", [1, 30, 150])
def test_confusion_of_any_size(tmp_path, classes):
    counts = np.eye(classes, dtype=np.int64) * 5
    confusion_matrix(counts, [f"c{i}" for i in range(classes)], tmp_path / "confusion.png")
    with Image.open(tmp_path / "confusion.png") as image:
        width, height = image.size
        assert 400 < height < 4000 and width >= height
        # The diagonal's darkest blue is there, and what is beside it is nearly white.
        colours = {c for _, c in image.convert("RGB").getcolors(1 << 24)}
        assert any(r < 20 and b > 90 for r, _, b in colours)


def test_reliability(tmp_path):
    counts = np.array([0] * 10 + [3, 0, 7, 20, 70])
    means = (np.arange(15) + 0.5) / 15 * (counts > 0)
    reliability(Calibration(counts, means, means * 0.9), tmp_path / "reliability.svg")
    assert {"accuracy", "gap to the mean confidence", "confidence", "share of answers"} <= words(
        tmp_path / "reliability.svg"
    )
    assert "expected calibration error 9.4%" in words(tmp_path / "reliability.svg")
    nothing = np.zeros(15, np.int64)
    reliability(
        Calibration(nothing, nothing.astype(float), nothing.astype(float)), tmp_path / "a.png"
    )
    with Image.open(tmp_path / "a.png") as image:
        assert min(image.size) > 700


def test_accuracy_by_shots_names_its_curves(tmp_path):
    ten, tied = [[0.2, 0.3], [0.5, 0.6]], [[0.2, 0.2], [0.4, 0.4]]
    accuracy_by_shots((1, 25), {"l2 10": ten, "l2 1000": tied}, tmp_path / "two.svg")
    accuracy_by_shots((1, 25), {"l2 10": ten}, tmp_path / "one.svg")
    two, one = words(tmp_path / "two.svg"), words(tmp_path / "one.svg")
    assert {"l2 10", "l2 1000"} <= two and "l2 10" not in one
    assert {"training images of each class", "1", "25"} <= one


def test_a_sweep_marks_its_choice_and_what_diverged(tmp_path):
    trials = [(0.03, 0.61), (0.001, 0.2), (0.01, 0.713), (0.1, None)]
    accuracy_by_rate(trials, 0.01, tmp_path / "sweep.svg")
    found = words(tmp_path / "sweep.svg")
    assert {"peak learning rate", "validation accuracy", "0.01: 71.3%"} <= found
    assert {"0.001", "0.01", "0.03"} <= found and "diverged" in " ".join(found)
    accuracy_by_rate([(0.01, 0.5), (1.0, None)], 0.01, tmp_path / "sweep.png")


def test_the_same_figures_give_the_same_file(tmp_path):
    for name in ("a", "b"):
        training_curves(metrics(50), tmp_path / f"{name}.pdf")
        training_curves(metrics(50), tmp_path / f"{name}.png")
    for kind in ("pdf", "png"):
        one, other = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert one == other


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(OutputError, match="cannot be written") as caught:
        training_curves(metrics(3), tmp_path / "nowhere" / "curves.png")
    assert caught.value.where == str(tmp_path / "nowhere" / "curves.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        training_curves(metrics(3), tmp_path / "folder.png")
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]
