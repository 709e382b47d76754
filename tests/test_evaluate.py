"""Accuracy, top-5 and confusion, counted by hand and by numpy; classes matched by id and name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from vitcli.config import DataConfig
from vitcli.errors import ConfigError, DataError
from vitcli.evaluate import Evaluation, Tally, evaluate
from vitcli.prediction import Predictor


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1000, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    """Class 11 has no pictures."""
    return np.random.default_rng(1).integers(0, 11, 1000)


@pytest.fixture(scope="module")
def figures(logits, labels) -> Evaluation:
    tally = Tally(12)
    for part in np.array_split(np.arange(1000), 7):
        tally.add(torch.from_numpy(logits[part]), labels[part])
    return tally.result()


def test_figures_are_those_of_numpy(figures, logits, labels):
    order = np.argsort(-logits, axis=1)
    assert figures.count == 1000
    assert figures.top1 == np.mean(order[:, 0] == labels)
    assert figures.top5 == np.mean((order[:, :5] == labels[:, None]).any(axis=1))
    exponents = np.exp(logits.astype(float))
    likelihood = exponents[np.arange(1000), labels] / exponents.sum(axis=1)
    assert figures.loss == pytest.approx(-np.log(likelihood).mean(), rel=1e-6)
    table = np.zeros((12, 12), int)
    np.add.at(table, (labels, order[:, 0]), 1)
    np.testing.assert_array_equal(figures.confusion, table)
    np.testing.assert_array_equal(figures.confusion_of([3, 0]), table[[3, 0]][:, [3, 0]])
    for row in figures.by_class():
        assert row.count == table[row.index].sum()
        assert row.recall == table[row.index, row.index] / row.count
        assert row.precision == table[row.index, row.index] / table[:, row.index].sum()
    assert [row.index for row in figures.by_class()] == list(range(11))
    wrong = table - np.diag(np.diag(table))
    worst = figures.mistakes(3)
    assert [count for *_, count in worst] == sorted(wrong.ravel())[:-4:-1]
    assert all(wrong[label, prediction] == count for label, prediction, count in worst)


def test_fewer_than_five_classes():
    tally = Tally(2)
    tally.add(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), np.array([0, 1]))
    figures = tally.result()
    assert (figures.top1, figures.top5) == (0.5, 1.0)
    assert np.isnan(figures.by_class()[1].precision)


def test_many_classes_take_memory_for_what_occurs():
    tally = Tally(21_843)
    scores = torch.zeros(4, 21_843)
    scores[:, 20_000] = 1
    tally.add(scores, np.array([20_000, 5, 5, 21_842]))
    figures = tally.result()
    assert figures.top1 == 0.25 and len(figures.counts) == 3
    assert figures.mistakes(1) == [(5, 20_000, 2)]


def test_nothing_seen():
    figures = Tally(3).result()
    assert (figures.count, figures.top1, figures.top5) == (0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------
# A checkpoint on a folder


@pytest.fixture
def predictor(tiny_checkpoint) -> Predictor:
    return Predictor(tiny_checkpoint, device="cpu", precision="fp32")


@pytest.fixture
def labelled(tmp_path, picture_folder, timm_logits):
    """Makes class folders that hold timm's two pictures, by a name for each."""

    def make(of_a: str, of_b: str, root: Path = tmp_path / "data") -> Path:
        for label, name in ((of_a, "a.png"), (of_b, "b.png")):
            (root / label).mkdir(parents=True, exist_ok=True)
            shutil.copy(picture_folder / name, root / label)
        return root

    return make


def test_classes_are_matched_by_id_then_by_name(predictor, labelled, timm_logits):
    """Whatever order the folders come in, and under which of its names a class goes."""
    best, second = timm_logits.argmax(axis=1)
    names = {label.name: label for label in predictor.classes}
    assert len(names) == 9  # two cranes
    right = predictor.classes[best]
    other = next(c for i, c in enumerate(predictor.classes) if i not in (best, second) and i > 1)
    report = evaluate(predictor, DataConfig(str(labelled(right.id, other.name))))
    assert report.evaluation.top1 == 0.5
    found = report.evaluation.confusion
    assert found[best, best] == 1
    assert found[predictor.classes.index(other), second] == 1
    assert report.part == "all pictures" and report.errors == () and report.warnings == ()


def test_an_ambiguous_name_is_an_error_that_lists_it(predictor, labelled):
    with pytest.raises(DataError, match="'crane' could be more than one class"):
        evaluate(predictor, DataConfig(str(labelled("crane", "dog"))))


def test_a_class_that_the_model_does_not_know(predictor, labelled):
    with pytest.raises(DataError, match="'zebra' is not among the 10 classes"):
        evaluate(predictor, DataConfig(str(labelled("zebra", "dog"))))


def test_pictures_that_cannot_be_read_are_told_and_not_counted(predictor, labelled):
    root = labelled("dog", "cat")
    (root / "dog" / "broken.png").write_bytes(b"broken")
    progress: list[tuple[int, int]] = []
    report = evaluate(
        predictor,
        DataConfig(str(root)),
        batch_size=1,
        on_progress=lambda done, total: progress.append((done, total)),
    )
    assert [name for name, _ in report.errors] == [str(root / "dog" / "broken.png")]
    assert report.evaluation.count == 2
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_what_the_models_own_run_held_out_is_taken(predictor, labelled, tiny_checkpoint, tmp_path):
    """On the data it was trained on, and on no other."""
    from vitcli.data.sources import open_data

    root = labelled("dog", "cat")
    for label in ("dog", "cat"):
        (picture,) = (root / label).iterdir()
        for i in range(3):
            shutil.copy(picture, root / label / f"{i}.png")
    record = open_data(DataConfig(str(root), val_fraction=0.25)).record
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    (run / "split.json").write_text(json.dumps(record))
    trained = Predictor(run, device="cpu", precision="fp32")
    report = evaluate(trained, DataConfig(str(root)))
    assert report.evaluation.count == 2 and "held out" in report.part
    other = shutil.copytree(root, tmp_path / "other")
    assert evaluate(trained, DataConfig(str(other))).evaluation.count == 8
    assert evaluate(predictor, DataConfig(str(root))).evaluation.count == 8


def test_a_model_without_names_takes_the_datas_order(tiny_checkpoint, labelled, tmp_path):
    from safetensors.numpy import load_file, save_file

    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tiny_checkpoint / "model.safetensors"), bare)
    predictor = Predictor(bare, device="cpu", precision="fp32")
    with pytest.raises(ConfigError, match="does not name its 10 classes, and the data has 2"):
        evaluate(predictor, DataConfig(str(labelled("dog", "cat"))))
