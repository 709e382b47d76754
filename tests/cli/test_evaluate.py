"""The `vit evaluate` command: output formats and errors."""

import csv
import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cli.training_runs import FP32, vit
from conftest import CLASSES, VitProcess
from vitcli.cli import evaluation_display
from vitcli.hub import registry
from vitcli.metrics import MetricAccumulator


@pytest.fixture(scope="module")
def data(tmp_path_factory, image_folder, timm_logits):
    """timm's two images: a.png labeled with its top-1 class, b.png labeled "dog"."""
    root = tmp_path_factory.mktemp("labeled")
    best = CLASSES[timm_logits[0].argmax()]
    for label, name in ((best.id, "a.png"), ("dog", "b.png")):
        (root / label).mkdir(exist_ok=True)
        shutil.copy(image_folder / name, root / label)
    return root


def read_csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture
def evaluate(tiny_checkpoint, data):
    """`vit evaluate` in float32, by default with the tiny model and its two images."""
    return lambda *args, data=data, model=tiny_checkpoint: vit(
        "evaluate", "--data", data, "-m", model, *FP32, *args
    )


def test_json(evaluate, tiny_checkpoint, data, timm_logits):
    """Metrics are those of timm's logits; a.png is labeled with its top-1 class, b.png with 3."""
    result = evaluate("--json")
    assert result.exit_code == 0 and result.stderr == ""
    output = json.loads(result.stdout)
    rows, pairs = output.pop("classes"), output.pop("confusion")
    first, second = timm_logits.argmax(axis=1).tolist()
    metrics = MetricAccumulator(10)
    metrics.add(torch.from_numpy(timm_logits), np.array([first, 3]))
    evaluation = metrics.result()
    for name, expected in {**evaluation.metrics(), "loss": evaluation.loss}.items():
        assert output.pop(name) == pytest.approx(expected, abs=1e-5)
    assert output == {
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


def test_unusable_plot_paths_are_rejected(evaluate, data, tmp_path):
    """The same file for both plots, and an image of the dataset."""
    file, image = tmp_path / "plot.png", data / "dog" / "b.png"
    before = image.read_bytes()
    assert evaluate("--plot", file, "--reliability", file).exit_code == 2 and not file.exists()
    assert evaluate("--plot", image).exit_code == 2 and image.read_bytes() == before


def test_closed_pipe_does_not_discard_predictions(data, tiny_checkpoint, tmp_path):
    file, both = tmp_path / "predictions.csv", ("--data", data, "--data", data)
    args = ("evaluate", *both, "-m", tiny_checkpoint, "--json", "--predictions", file)
    with VitProcess(*args) as process:
        process.stdout.close()
        assert "Error" not in process.stderr.read()
        assert process.wait(600) == 141
    assert len(read_csv(file)) == 4


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
    output = evaluate("--data", other, "--json").stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert [(row["data"], row["images"]) for row in rows] == [(str(data), 2), (str(other), 3)]


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
    bilinear = evaluate("--resolutions", "48,64", "--json").stdout
    losses = [[json.loads(line)["loss"] for line in t.splitlines()] for t in (bicubic, bilinear)]
    assert losses[0][0] != losses[1][0] and losses[0][1] == losses[1][1]
    for sizes in ("48", "48,48x48"):
        assert evaluate("--resolution", sizes, "--json").stdout == bilinear.splitlines(True)[0]


def test_predictions(evaluate, data, tmp_path, timm_logits):
    csv_file, json_file = tmp_path / "predictions.csv", tmp_path / "predictions.jsonl"
    assert evaluate("--predictions", csv_file, "--workers", 1).exit_code == 0
    assert evaluate("--predictions", json_file).exit_code == 0
    rows = {Path(row["file"]).name: row for row in read_csv(csv_file)}
    json_rows = {Path(row["file"]).name: row for row in map(json.loads, json_file.open())}
    assert set(rows) == {"a.png", "b.png"}
    for (name, label), logits in zip(
        {"a.png": CLASSES[timm_logits[0].argmax()].id, "b.png": CLASSES[3].id}.items(),
        timm_logits.astype(float),
        strict=True,
    ):
        row, scores = rows[name], np.exp(logits) / np.exp(logits).sum()
        order = np.argsort(-logits)[:5]
        ids = [row["prediction"], *(row[f"prediction{i}"] for i in range(2, 6))]
        assert ids == [CLASSES[i].id for i in order]
        top_scores = [float(row["score"]), *(float(row[f"score{i}"]) for i in range(2, 6))]
        np.testing.assert_allclose(top_scores, scores[order], rtol=1e-4)
        assert row["data"] == str(data) and row["label"] == label and row["real"] == ""
        assert row["correct"] == str(int(ids[0] == label)) and row["error"] == ""
        json_row = json_rows[name]
        assert [prediction["id"] for prediction in json_row["predictions"]] == ids
        assert (json_row["label"], json_row["correct"]) == (label, ids[0] == label)


@pytest.fixture
def real_labels(monkeypatch):
    """Replaces the ReaL labels of the first images."""

    def replace(*first: list[int]) -> None:
        labels = [*first, *[[]] * (50_000 - len(first))]
        monkeypatch.setattr(registry, "real_labels", lambda: labels)

    return replace


def test_predictions_with_real_labels(evaluate, data, tmp_path, real_labels):
    root = shutil.copytree(data, tmp_path / "data")
    (root / "dog" / "b.png").rename(root / "dog" / "ILSVRC2012_val_00000001.JPEG")  # no labels
    (image,) = root.glob("*/a.png")
    image.rename(image.with_name("ILSVRC2012_val_00000002.JPEG"))
    file = tmp_path / "predictions.csv"
    real_labels([], [134])
    result = evaluate("--real-labels", "--predictions", file, "--json", data=root)
    assert result.exit_code == 0
    real = json.loads(result.stdout)["real"]
    assert real == {"top1": real["top1"], "images": 1, "left_out": 1}
    rows = {Path(row["file"]).name[-10:-5]: row for row in read_csv(file)}
    assert rows["00001"]["real"] == "" and rows["00002"]["real"] == str(int(real["top1"]))
    line = evaluate("--real-labels", data=root).stdout.splitlines()[2]
    assert re.fullmatch(r"ReaL accuracy \S+% on 1 image, leaving out 1 .*", line)


def test_real_labels_for_unlabeled_images(
    evaluate, tiny_checkpoint, image_folder, tmp_path, timm_logits, real_labels
):
    """ImageNet validation images in one folder, as in the archive; the third is unreadable. ReaL
    labels go by file name; of ImageNet's classes, the model knows both cranes."""
    unlabeled = tmp_path / "val"
    unlabeled.mkdir()
    for number, name in enumerate(("a.png", "b.png"), 1):
        shutil.copy(image_folder / name, unlabeled / f"ILSVRC2012_val_0000000{number}.JPEG")
    (unlabeled / "ILSVRC2012_val_00000003.JPEG").write_text("no image")
    (unlabeled / "notes.txt").write_text("no image either")
    correct, file = timm_logits[0].argmax() == 0, tmp_path / "p.csv"
    real_labels([134, 7], [7], [134])
    evaluate = functools.partial(evaluate, "--real-labels", data=unlabeled)
    result = evaluate("--json", "--predictions", file, "--plot", tmp_path / "plot.png")
    assert result.exit_code == 1
    output = json.loads(result.stdout)
    assert output["real"] == {"top1": float(correct), "images": 1, "left_out": 1}
    assert (output["images"], output["unreadable"], output["split"]) == (2, 1, "all images")
    assert {output[name] for name in ("top1", "top5", "macro_f1", "ece", "loss")} == {None}
    assert output["classes"] == output["confusion"] == []
    assert "nothing to plot: these images have no labels of their own" in result.stderr
    rows = read_csv(file)
    assert [row["label"] + row["correct"] for row in rows] == ["", "", ""]
    assert [row["real"] for row in rows] == [str(int(correct)), "", ""]
    assert rows[0]["prediction"] and not rows[2]["prediction"]
    assert rows[2]["error"].startswith("not an image")
    assert evaluate().stdout.splitlines() == [
        f"{tiny_checkpoint} on {unlabeled}: all images (2)",
        f"ReaL accuracy {correct:.2%} on 1 image, leaving out 1 without a correct class",
    ]


def test_warns_about_training_data_and_nan_outputs(
    evaluate, data, tiny_checkpoint, nan_checkpoint, tmp_path
):
    """Images the model was trained on (after a sweep, the final run trains on all data), and
    outputs that are not finite."""
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    (run / "split.json").write_text(json.dumps({"data": str(data), "kind": "merged"}))
    result = evaluate(model=run)
    assert result.stderr.startswith(f"warning: {data}: the model was trained on")
    damaged = {"data": str(data), "kind": "held out", "fraction": 0.1, "seed": 0, "val": [[]]}
    for text in (json.dumps(damaged), "[" * 100_000):
        (run / "split.json").write_text(text)
        assert evaluate(model=run).stderr == ""
    other = shutil.copytree(data, tmp_path / "other")
    assert evaluate(data=other, model=run).stderr == ""
    result = evaluate("--json", data=other, model=nan_checkpoint)
    assert result.exit_code == 0 and json.loads(result.stdout)["loss"] is None
    assert result.stderr.startswith("warning: ") and "not finite" in result.stderr


def test_no_readable_images(evaluate, tmp_path):
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "c.jpg").write_text("no image")
    result = evaluate("--json", data=tmp_path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert str(tmp_path / "dog" / "c.jpg") in result.stderr
