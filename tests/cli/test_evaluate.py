"""The `vit evaluate` command: output formats and errors."""

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import CLASSES
from vitcli.cli import evaluation_display
from vitcli.hub import registry
from vitcli.metrics import MetricAccumulator

FP32 = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def data(tmp_path_factory, image_folder, timm_logits):
    """timm's two images: a.png labeled with its top-1 class, b.png labeled "dog"."""
    root = tmp_path_factory.mktemp("labeled")
    best = CLASSES[timm_logits[0].argmax()]
    for label, name in ((best.id, "a.png"), ("dog", "b.png")):
        (root / label).mkdir(exist_ok=True)
        shutil.copy(image_folder / name, root / label)
    return root


@pytest.fixture
def evaluate(vit, tiny_checkpoint, data):
    return lambda *words: vit("evaluate", "--data", data, "-m", tiny_checkpoint, *FP32, *words)


def test_json(evaluate, tiny_checkpoint, data, timm_logits):
    """Metrics are those of timm's logits; a.png is labeled with its top-1 class, b.png with 3."""
    result = evaluate("--json")
    assert result.exit_code == 0 and result.stderr == ""
    printed = json.loads(result.stdout)
    rows, pairs = printed.pop("classes"), printed.pop("confusion")
    first, second = timm_logits.argmax(axis=1).tolist()
    tally = MetricAccumulator(10)
    tally.add(torch.from_numpy(timm_logits), np.array([first, 3]))
    figures = tally.result()
    for name, expected in {**figures.metrics(), "loss": figures.loss}.items():
        assert printed.pop(name) == pytest.approx(expected, abs=1e-5)
    assert printed == {
        "model": str(tiny_checkpoint),
        "data": str(data),
        "split": "all images",
        "resolution": [64, 64],
        "device": "cpu",
        "precision": "float32",
        "images": 2,
        "unreadable": 0,
        "among": 10,
    }
    assert {(p["label"], p["prediction"], p["images"]) for p in pairs} == {
        (first, first, 1),
        (3, second, 1),
    }
    assert set(rows[0]) == {"index", "id", "label", "images", "recall", "precision", "f1"}
    assert {row["index"] for row in rows} == {first, second, 3}
    # A class that was never predicted has no precision, and JSON has no NaN.
    assert "NaN" not in result.stdout


def test_many_classes_show_most_frequent_mistakes(evaluate, monkeypatch):
    monkeypatch.setattr(evaluation_display, "MAX_MATRIX_CLASSES", 1)
    lines = evaluate().stdout.splitlines()
    assert lines[8].startswith("dog ") and lines[8].endswith(" 1") and len(lines) == 9


@pytest.mark.parametrize("option", ["--plot", "--reliability"])
def test_plots(evaluate, tmp_path, option):
    file = tmp_path / "plot.png"
    result = evaluate(option, file, "--json")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert str(file) in result.stderr and min(Image.open(file).size) > 300


def test_plots_cannot_share_a_file(evaluate, tmp_path):
    file = tmp_path / "plot.png"
    assert evaluate("--plot", file, "--reliability", file).exit_code == 2
    assert not file.exists()


def test_multiple_datasets(evaluate, data, tmp_path, tiny_checkpoint):
    other = shutil.copytree(data, tmp_path / "other")
    for file in (other / "dog").iterdir():
        shutil.copy(file, other / "dog" / "again.png")
    result = evaluate("--data", other)
    assert result.exit_code == 0
    lines = [re.split(r"  +", line) for line in result.stdout.splitlines()]
    assert lines[0] == [str(tiny_checkpoint)]
    assert lines[1] == ["data", "split", "images", "top-1", "top-5", "macro F1", "ECE"]
    assert [line[:3] for line in lines[2:]] == [
        [str(data), "all images", "2"],
        [str(other), "all images", "3"],
    ]
    result = evaluate("--data", other, "--data", "nowhere")
    assert result.exit_code == 1 and result.stderr.count("\n") == 2  # before evaluating any image
    printed = [json.loads(line) for line in evaluate("--data", other, "--json").stdout.splitlines()]
    assert [(one["data"], one["images"]) for one in printed] == [(str(data), 2), (str(other), 3)]


def test_plot_does_not_overwrite_dataset_image(evaluate, data):
    image = data / "dog" / "b.png"
    before = image.read_bytes()
    assert evaluate("--plot", image).exit_code == 2 and image.read_bytes() == before


def test_multiple_resolutions(evaluate, data, tmp_path):
    file = tmp_path / "resolutions.png"
    result = evaluate("--resolution", "48,64,64x96", "--plot", file)
    assert result.exit_code == 0
    assert result.stderr == f"accuracy against resolution: {file}\n"
    lines = [re.split(r"  +", line) for line in result.stdout.splitlines()]
    assert lines[1][:4] == ["data", "split", "resolution", "images"]
    assert [line[2] for line in lines[2:5]] == ["48", "64 *", "64x96"]
    assert result.stdout.splitlines()[-1].startswith("* the checkpoint's own resolution")
    assert min(Image.open(file).size) > 300
    assert result.stdout.endswith("are resized (bilinear)\n")
    bicubic = evaluate("--resolutions", "48,64", "--posemb-method", "bicubic", "--json").stdout
    plain = evaluate("--resolutions", "48,64", "--json").stdout
    losses = [[json.loads(row)["loss"] for row in t.splitlines()] for t in (bicubic, plain)]
    assert losses[0][0] != losses[1][0] and losses[0][1] == losses[1][1]
    for sizes in ("48", "48,48x48"):
        assert evaluate("--resolution", sizes, "--json").stdout == plain.splitlines(True)[0]


def test_predictions(evaluate, data, tmp_path, timm_logits):
    file, lines = tmp_path / "predictions.csv", tmp_path / "predictions.jsonl"
    assert evaluate("--predictions", file, "--workers", 1).exit_code == 0
    assert evaluate("--predictions", lines).exit_code == 0
    with file.open(newline="") as opened:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(opened)}
    assert set(rows) == {"a.png", "b.png"}
    for (name, label), logits in zip(
        {"a.png": CLASSES[timm_logits[0].argmax()].id, "b.png": CLASSES[3].id}.items(),
        timm_logits.astype(float),
        strict=True,
    ):
        row, scores = rows[name], np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-logits)[:5]
        named = [row["prediction"], *(row[f"prediction{i}"] for i in range(2, 6))]
        assert named == [CLASSES[i].id for i in order]
        found = [float(row["score"]), *(float(row[f"score{i}"]) for i in range(2, 6))]
        np.testing.assert_allclose(found, scores[order], rtol=1e-4)
        assert row["data"] == str(data) and row["label"] == label and row["real"] == ""
        assert row["correct"] == str(int(named[0] == label)) and row["error"] == ""
        (same,) = (row for row in map(json.loads, lines.open()) if Path(row["file"]).name == name)
        assert [best["id"] for best in same["predictions"]] == named
        assert (same["label"], same["correct"]) == (label, named[0] == label)


@pytest.fixture
def real_labels(monkeypatch):
    """Replaces the ReaL labels of the first images."""

    def replace(*labels: list[int]) -> None:
        accepted = [*labels, *[[]] * (50_000 - len(labels))]
        monkeypatch.setattr(registry, "real_labels", lambda: accepted)

    return replace


def test_predictions_with_real_labels_and_unreadable_image(
    data, tmp_path, vit, tiny_checkpoint, real_labels
):
    root = shutil.copytree(data, tmp_path / "data")
    (root / "dog" / "b.png").rename(root / "dog" / "ILSVRC2012_val_00000001.JPEG")  # no labels
    (image,) = root.glob("*/a.png")
    image.rename(image.with_name("ILSVRC2012_val_00000002.JPEG"))
    (root / "dog" / "ILSVRC2012_val_00000003.JPEG").write_text("no image")
    file = tmp_path / "predictions.csv"
    real_labels([], [134])
    words = ["evaluate", "--data", root, "-m", tiny_checkpoint, *FP32, "--real-labels"]
    result = vit(*words, "--predictions", file, "--json")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)["real"]
    assert printed == {"top1": printed["top1"], "images": 1, "left_out": 1}
    with file.open(newline="") as opened:
        rows = {Path(row["file"]).name[-10:-5]: row for row in csv.DictReader(opened)}
    assert rows["00001"]["real"] == "" and rows["00002"]["real"] == str(int(printed["top1"]))
    assert rows["00003"]["error"].startswith("not an image")
    assert rows["00003"]["prediction"] == rows["00003"]["correct"] == ""
    text = vit(*words).stdout.splitlines()[2]
    assert re.fullmatch(
        r"ReaL accuracy \S+% on 1 image, leaving out 1 without a correct class", text
    )


@pytest.fixture
def unlabeled(image_folder, tmp_path):
    """ImageNet validation images 1 and 2 in one folder, as in the archive; 3 is unreadable."""
    root = tmp_path / "val"
    root.mkdir()
    for number, name in enumerate(("a.png", "b.png"), 1):
        shutil.copy(image_folder / name, root / f"ILSVRC2012_val_0000000{number}.JPEG")
    (root / "ILSVRC2012_val_00000003.JPEG").write_text("no image")
    (root / "notes.txt").write_text("no image either")
    return root


def test_real_labels_for_unlabeled_images(
    vit, unlabeled, tiny_checkpoint, tmp_path, timm_logits, real_labels
):
    """ReaL labels go by file name; of ImageNet's classes, the model knows both cranes."""
    right, file = timm_logits[0].argmax() == 0, tmp_path / "p.csv"
    real_labels([134, 7], [7], [134])
    words = ["evaluate", "--data", unlabeled, "-m", tiny_checkpoint, *FP32, "--real-labels"]
    result = vit(*words, "--json", "--predictions", file, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 1
    printed = json.loads(result.stdout)
    assert printed["real"] == {"top1": float(right), "images": 1, "left_out": 1}
    assert (printed["images"], printed["unreadable"], printed["split"]) == (2, 1, "all images")
    assert {printed[name] for name in ("top1", "top5", "macro_f1", "ece", "loss")} == {None}
    assert printed["classes"] == printed["confusion"] == []
    assert "nothing to plot: these images have no labels of their own" in result.stderr
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["label"] + row["correct"] for row in rows] == ["", "", ""]
    assert [row["real"] for row in rows] == [str(int(right)), "", ""]
    assert rows[0]["prediction"] and rows[2]["error"].startswith("not an image")
    text = vit(*words).stdout.splitlines()
    assert text == [
        f"{tiny_checkpoint} on {unlabeled}: all images (2)",
        f"ReaL accuracy {right:.2%} on 1 image, leaving out 1 without a correct class",
    ]
    real_labels([7], [7], [134])  # none that the model knows
    assert vit(*words).stdout.splitlines()[1].startswith("ReaL accuracy - on 0 images")
    result = vit(*words, "--resolutions", "48,64", "--plot", tmp_path / "by-resolution.png")
    assert result.exit_code == 1 and (tmp_path / "by-resolution.png").exists()
    assert re.split("  +", result.stdout.splitlines()[1])[-1] == "ReaL"


def test_warns_about_training_data_and_nan_outputs(vit, data, tiny_checkpoint, diverged, tmp_path):
    """Images the model was trained on (after a sweep, the final run trains on all data), and
    outputs that are not finite."""
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    (run / "split.json").write_text(json.dumps({"data": str(data), "kind": "merged"}))
    result = vit("evaluate", "--data", data, "-m", run, *FP32)
    assert result.exit_code == 0 and result.stderr.startswith("warning: the model was trained on")
    other = shutil.copytree(data, tmp_path / "other")
    assert vit("evaluate", "--data", other, "-m", run, *FP32).stderr == ""
    result = vit("evaluate", "--data", other, "-m", diverged, *FP32, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["loss"] is None
    assert result.stderr.startswith("warning: ") and "not finite" in result.stderr


def test_no_readable_images(vit, tiny_checkpoint, tmp_path):
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "c.jpg").write_text("no image")
    result = vit("evaluate", "--data", tmp_path, "-m", tiny_checkpoint, *FP32, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(tmp_path / "dog" / "c.jpg") in result.stderr


def test_class_only_in_validation_split(vit, tiny_checkpoint, data, tmp_path):
    """It cannot be learned from this data, but the model may know it."""
    for split, name in (("train", "dog"), ("val", "dog"), ("val", "horse")):
        shutil.copytree(data / "dog", tmp_path / split / name)
    result = vit("evaluate", "--data", tmp_path, "-m", tiny_checkpoint, *FP32, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["images"] == 2
