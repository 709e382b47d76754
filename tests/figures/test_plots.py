"""Plots: what they show, and that the same data gives the same file."""

import math
import warnings
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from vitcli.figures.attention_plots import Panel, contact_sheet, head_grid, side_by_side
from vitcli.figures.plots import (
    accuracy_by_rate,
    confusion_matrix,
    position_similarity,
    reliability,
    speed_by_resolution,
    training_curves,
)


def metrics(steps: int) -> list[dict]:
    """Lines of metrics.jsonl as the training loop writes them."""
    lines: list[dict] = []
    for step in range(1, steps + 1):
        t = step / steps
        line = {"event": "train", "step": step, "loss": 2 - t, "accuracy": t / 2}
        lines.append(line | {"lr": 0.01 * (1 + math.cos(math.pi * t))})
        if step % max(steps // 4, 1) == 0:
            lines.append({"event": "evaluation", "step": step, "val_loss": 2, "val_top1": t / 3})
    return lines


def texts(path) -> set[str]:
    """The text elements of an SVG."""
    return {"".join(e.itertext()) for e in ET.parse(path).iter() if e.tag.endswith("}text")}


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("steps", [0, 1, 60])
def test_training_curves(tmp_path, steps):
    path, lines = tmp_path / "curves.svg", metrics(steps)
    training_curves(lines, path, stored_step=steps or None)
    assert {"loss", "accuracy", "learning rate", "step"} <= texts(path)
    assert {"validation", f"stored weights: step {steps}"} <= texts(path) or not steps
    training_curves([line for line in lines if "loss" in line], path)  # without evaluations
    assert not {"training", "validation"} & texts(path)


def test_confusion_matrix_shows_counts_and_names(tmp_path):
    counts = np.array([[90, 10, 0], [1, 1234, 5], [0, 0, 0]])
    names = ["cat & dog", "a name that goes on and on and on", "<$nothing_$>"]
    confusion_matrix(counts, names, tmp_path / "confusion.svg")
    found = texts(tmp_path / "confusion.svg")
    assert {"90", "10", "1", "1,234", "5", "cat & dog", "<$nothing_$>"} <= found
    assert "a name that…nd on and on" in found and "0" not in found


@pytest.mark.parametrize("classes", [1, 30, 110])
def test_confusion_matrix_of_any_size(tmp_path, classes):
    counts, names = np.eye(classes, dtype=np.int64) * 5, [f"class {i}" for i in range(classes)]
    counts[classes // 2, 0] += 7
    confusion_matrix(counts, names, tmp_path / "confusion.svg")
    shown = texts(tmp_path / "confusion.svg") & set(names)
    assert len(shown) == classes if classes < 100 else 30 < len(shown) < 60
    assert names[classes // 2] in shown  # has the most errors


def test_characters_without_a_font_are_boxes(tmp_path, monkeypatch):
    def draw(name: str, kind: str = "png") -> bytes:
        path = tmp_path / f"confusion.{kind}"
        confusion_matrix(np.eye(2, dtype=np.int64), [name, "cat\t"], path)
        return path.read_bytes()

    own = [f for f in font_manager.fontManager.ttflist if f.name == "DejaVu Sans"]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    draw("猫", "pdf")
    assert draw("猫") != draw("a")
    assert "猫" in draw("猫", "svg").decode()  # the viewer may have a font


def test_reliability(tmp_path):
    counts = np.array([0] * 10 + [3, 0, 7, 20, 70])
    means = (np.arange(15) + 0.5) / 15 * (counts > 0)
    reliability(counts, means, means * 0.9, 0.094, tmp_path / "reliability.svg")
    assert "expected calibration error 9.4%" in texts(tmp_path / "reliability.svg")
    nothing = np.zeros(15)
    reliability(nothing, nothing, nothing, 0.0, tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").exists()


def test_sweep_marks_best_diverged_and_tied(tmp_path):
    trials, path = [(0.03, 0.61), (0.001, 0.2), (0.01, 0.713), (0.1, None)], tmp_path / "sweep.svg"
    accuracy_by_rate(trials, 0.01, path)
    assert {"0.01: 71.3%", "0.001"} <= texts(path)
    assert "diverged" in " ".join(texts(path)) and "tied" not in " ".join(texts(path))
    accuracy_by_rate([*trials, (0.3, 0.713)], 0.01, path)
    assert "tied" in " ".join(texts(path))
    accuracy_by_rate([(0.01, 0.5), (1.0, None)], 0.01, path)


def test_speed_by_resolution(tmp_path):
    slow = [((384, 384), 40.0, 96), ((224, 224), 150.0, 512)]
    lines = {("B/16", "inference"): slow, ("B/16", "training"): [((224, 224), 30.0, 64)]}
    speed_by_resolution(lines, tmp_path / "speed.svg")
    assert {"B/16", "B/16, training", "224", "384", "100"} <= texts(tmp_path / "speed.svg")


@pytest.mark.parametrize("grids", [[(4, 12), (8, 24)], [(12, 4)], [(7, 7), (12, 12)]], ids=str)
def test_position_similarity_fits_figure(grids, tmp_path):
    tables = [(f"{r} x {c}", np.zeros((r * r, c * c))) for r, c in grids]
    position_similarity(tables, tmp_path / "positions.svg")
    root = ET.parse(tmp_path / "positions.svg").getroot()
    assert {title for title, _ in tables} | {"patch row"} <= texts(tmp_path / "positions.svg")
    width, height = (float(root.attrib[side].removesuffix("pt")) for side in ("width", "height"))
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y = (float(text.attrib.get(k, "nan")) for k in "xy")
        assert not (x < 0 or x > width or y < 0 or y > height), text.text


def test_output_is_deterministic(tmp_path):
    counts = np.eye(3, dtype=np.int64)
    for kind in ("pdf", "png"):
        for name in ("a", "b"):
            confusion_matrix(counts, ["cat", "dog", "eel"], tmp_path / f"{name}.{kind}")
        one, other = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "ab")
        assert one == other


def test_very_tall_images(tmp_path):
    """A figure in proportion would take gigabytes."""
    panel = Panel("a strip", np.zeros((768, 1, 3), np.uint8), np.eye(2))
    side_by_side(panel, "attention", tmp_path / "a.png")
    contact_sheet([panel], tmp_path / "b.png")
    head_grid(panel.image, np.zeros((2, 2, 2)), "heads", tmp_path / "c.png")
    for name in "abc":
        with Image.open(tmp_path / f"{name}.png") as image:
            assert image.height < 4000
