"""`vit evaluate` as it is typed: every form of output, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

FP32 = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture(scope="module")
def data(tmp_path_factory, picture_folder, timm_logits):
    """timm's two pictures: a.png under its own best class, b.png under the name "dog"."""
    from conftest import CLASSES

    root = tmp_path_factory.mktemp("labelled")
    best = CLASSES[timm_logits[0].argmax()]
    for label, name in ((best.id, "a.png"), ("dog", "b.png")):
        (root / label).mkdir(exist_ok=True)
        shutil.copy(picture_folder / name, root / label)
    return root


@pytest.fixture
def evaluate(vit, tiny_checkpoint, data):
    return lambda *words: vit("evaluate", "--data", data, "-m", tiny_checkpoint, *FP32, *words)


def test_json(evaluate, tiny_checkpoint, data, timm_logits):
    result = evaluate("--json")
    assert result.exit_code == 0 and result.stderr == ""
    told = json.loads(result.stdout)
    rows, pairs = told.pop("classes"), told.pop("confusion")
    loss, ece, macro_f1 = (told.pop(name) for name in ("loss", "ece", "macro_f1"))
    first, second = timm_logits.argmax(axis=1).tolist()
    right = sum([True, second == 3]) / 2
    among = [3 in np.argsort(-timm_logits[1])[:5], True]
    assert told == {
        "model": str(tiny_checkpoint),
        "data": str(data),
        "part": "all pictures",
        "pictures": 2,
        "unreadable": 0,
        "top1": right,
        "top5": sum(among) / 2,
    }
    scores = timm_logits.astype(float)
    expected = np.log(np.exp(scores).sum(axis=1)) - [scores[0, first], scores[1, 3]]
    assert loss == pytest.approx(expected.mean(), abs=1e-5)
    assert {(p["label"], p["prediction"], p["pictures"]) for p in pairs} == {
        (first, first, 1),
        (3, second, 1),
    }
    exact = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    gaps = np.abs(exact.max(axis=1) - [True, second == 3])  # each in a bin of its own
    assert ece == pytest.approx(gaps.mean(), abs=1e-5)
    assert set(rows[0]) == {"index", "id", "label", "pictures", "recall", "precision", "f1"}
    assert {row["index"] for row in rows} == {first, second, 3}
    assert macro_f1 == sum(row["f1"] for row in rows) / len(rows)
    # A class that nothing was taken for has no precision, and JSON has no NaN.
    assert "NaN" not in result.stdout


def test_tables_for_people(evaluate, tiny_checkpoint, data):
    result = evaluate()
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tiny_checkpoint} on {data}: all pictures, 2 pictures"
    assert re.fullmatch(
        r"top-1 \S+%   top-5 \S+%   macro F1 \S+%   ECE \S+%   loss \d\.\d{4}", lines[1]
    )
    assert lines[3].split() == ["class", "pictures", "recall", "precision", "F1"]
    assert any(line.split()[:3] == ["dog", "1", "0.0%"] for line in lines[4:6])
    assert lines[7].startswith("label \\ prediction")


def test_many_classes_are_summed_up_by_their_mistakes(evaluate, monkeypatch):
    from vitcli.cli import evaluate as command

    monkeypatch.setattr(command, "TABLE", 1)
    lines = evaluate().stdout.splitlines()
    assert lines[7].split() == ["label", "taken", "for", "pictures"]
    assert lines[8].startswith("dog ") and lines[8].endswith(" 1") and len(lines) == 9


def test_the_picture(evaluate, tmp_path):
    file = tmp_path / "confusion.png"
    result = evaluate("--plot", file, "--json")
    assert result.exit_code == 0 and len(result.stdout.splitlines()) == 1
    assert result.stderr == f"the confusion matrix is in {file}\n"
    assert min(Image.open(file).size) > 300
    (tmp_path / "file").touch()
    result = evaluate("--plot", tmp_path / "file" / "confusion.png")
    assert result.exit_code == 1
    place = tmp_path / "file" / "confusion.png"
    assert f"error: {place}: cannot be written: Not a directory\n" in result.stderr
    result = evaluate("--plot", tmp_path / "confusion.txt")
    assert result.exit_code == 2 and "does not end in .png, .pdf or .svg" in result.stderr


def test_an_unreadable_picture(vit, tiny_checkpoint, data, tmp_path):
    root = shutil.copytree(data, tmp_path / "data")
    (root / "dog" / "c.jpg").write_text("no picture")
    result = vit("evaluate", "--data", root, "-m", tiny_checkpoint, *FP32, "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["unreadable"] == 1 and told["pictures"] == 2
    errors = result.stderr.splitlines()
    assert errors[0].startswith(f"error: {root / 'dog' / 'c.jpg'}: is not a picture")
    assert errors[1] == "1 pictures could not be read and are not counted"


def test_data_that_is_none(vit, tiny_checkpoint, tmp_path):
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "nowhere", tmp_path / "empty"):
        result = vit("evaluate", "--data", place, "-m", tiny_checkpoint)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith(f"error: {place}: ")


def test_a_part_that_is_not_there(evaluate):
    result = evaluate("--split", "test")
    assert result.exit_code == 1
    assert "there is no test part" in result.stderr
    assert evaluate("--split", "tset").exit_code == 2
