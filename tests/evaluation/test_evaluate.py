"""Evaluation on labeled images: matching of classes, held-out splits, skipped images."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from vitcli.checkpoints.convert import convert
from vitcli.config import DataConfig
from vitcli.data.alignment import MatchRules
from vitcli.errors import ConfigError, DataError, VitWarning
from vitcli.evaluation.evaluate import evaluate, open_labeled
from vitcli.prediction import Predictor


@pytest.fixture
def predictor(tiny_checkpoint) -> Predictor:
    return Predictor(tiny_checkpoint, device="cpu", precision="fp32")


@pytest.fixture
def labeled(tmp_path, image_folder, timm_logits):
    """Return a function that puts timm's two images into class directories of given names."""

    def make(of_a: str, of_b: str, root: Path = tmp_path / "data") -> Path:
        for label, name in ((of_a, "a.png"), (of_b, "b.png")):
            (root / label).mkdir(parents=True, exist_ok=True)
            shutil.copy(image_folder / name, root / label)
        return root

    return make


def run_evaluate(predictor, root, on_prediction=lambda prediction: None, **options):
    images = open_labeled(predictor, DataConfig(str(root)), **options)
    return evaluate(predictor, images, on_prediction=on_prediction)


def test_classes_match_by_id_then_name(predictor, labeled, timm_logits):
    """In any order of directories, and by ID or name."""
    best, second = timm_logits.argmax(axis=1)
    names = {label.name: label for label in predictor.classes}
    assert len(names) == 9  # two cranes
    right = predictor.classes[best]
    other = next(c for i, c in enumerate(predictor.classes) if i not in (best, second) and i > 1)
    report = run_evaluate(predictor, labeled(right.id, other.name))
    assert report.evaluation.top1 == 0.5
    found = report.evaluation.confusion_matrix(range(10))
    assert found[best, best] == 1
    assert found[predictor.classes.index(other), second] == 1
    assert report.split == "all images" and report.errors == ()


def test_uses_held_out_split_of_training_run(predictor, labeled, tiny_checkpoint, tmp_path):
    """On the data it was trained on, even if moved, and on no other; given the run directory, its
    weights file, or a converted copy."""
    from vitcli.data.dataset import open_splits

    root = labeled("dog", "cat")
    for label in ("dog", "cat"):
        (image,) = (root / label).iterdir()
        for i in range(3):
            shutil.copy(image, root / label / f"{i}.png")
    record = open_splits(DataConfig(str(root), val_fraction=0.25)).record
    run = shutil.copytree(tiny_checkpoint, tmp_path / "run")
    (run / "split.json").write_text(json.dumps(record))
    trained = Predictor(run, device="cpu", precision="fp32")
    report = run_evaluate(trained, root)
    assert report.evaluation.count == 2 and "held-out" in report.split
    root = root.rename(tmp_path / "moved")
    messages: list[str] = []
    copy = convert(run, tmp_path / "copy")
    from_file, converted = (
        Predictor(path, device="cpu", precision="fp32")
        for path in (run / "model.safetensors", copy)
    )
    for model in (trained, from_file, converted):
        report = run_evaluate(model, root, report=messages.append)
        assert report.evaluation.count == 2 and len(messages) == 1 and str(root) in messages.pop()
    other = shutil.copytree(root, tmp_path / "other")
    (other / "dog" / "0.png").rename(other / "dog" / "another.png")
    assert run_evaluate(trained, other).evaluation.count == 8
    assert run_evaluate(predictor, root).evaluation.count == 8


def test_wrong_number_of_unnamed_classes_is_rejected(tiny_checkpoint, labeled, tmp_path):
    from safetensors.numpy import load_file, save_file

    bare = tmp_path / "bare.safetensors"
    save_file(load_file(tiny_checkpoint / "model.safetensors"), bare)
    predictor = Predictor(bare, device="cpu", precision="fp32")
    with pytest.raises(ConfigError, match="10 classes without names, but the dataset has 2"):
        run_evaluate(predictor, labeled("dog", "cat"))


def test_predictions_among_dataset_classes(predictor, labeled, timm_logits):
    """The prediction is the best of the dataset's classes."""
    index = {label.id: i for i, label in enumerate(predictor.classes)}
    root = labeled("horse", "rocket")
    horse, rocket = index["horse"], index["rocket"]
    messages: list[str] = []
    predictions = []
    rules = MatchRules(among="data")
    report = run_evaluate(predictor, root, predictions.append, rules=rules, report=messages.append)
    expected = [bool(row[horse] > row[rocket]) for row in timm_logits]
    assert [prediction.best[0][0].id == "horse" for prediction in predictions] == expected
    assert report.evaluation.top1 == (expected[0] + (not expected[1])) / 2
    assert report.evaluation.top5 is None and report.indices == (horse, rocket)
    assert len(messages) == 1
    two = timm_logits[:, [horse, rocket]].astype(float)
    scores = np.exp(two) / np.exp(two).sum(axis=1, keepdims=True)
    found = [prediction.best[0][1] for prediction in predictions]
    np.testing.assert_allclose(found, scores.max(axis=1), rtol=1e-4)


def test_mapped_class_has_best_score_of_its_group(predictor, labeled, timm_logits):
    """Any class of the group counts as correct."""
    order = np.argsort(-timm_logits[0])
    group = [predictor.classes[i].id for i in order[:2]]
    other = predictor.classes[order[3]].id
    root = labeled("anything", other)
    predictions = []
    rules = MatchRules(mapping={"anything": group})
    report = run_evaluate(predictor, root, predictions.append, rules=rules)
    (prediction,) = (prediction for prediction in predictions if prediction.label.id == "anything")
    assert len(report.classes) == 9 and prediction.correct
    # The second of the group is not listed in addition to the first.
    assert [label.id for label, _ in prediction.best[:2]] == [
        "anything",
        predictor.classes[order[2]].id,
    ]


def test_mapping_overrides_class_of_same_name(predictor, labeled, timm_logits):
    """A dataset class maps to two other classes, though the model has one of the same name."""
    best, second, *_, low, lowest = [predictor.classes[i].id for i in np.argsort(-timm_logits[0])]
    predictions = []
    rules = MatchRules(mapping={best: [low, lowest]})
    run_evaluate(predictor, labeled(best, second), predictions.append, rules=rules)
    (prediction,) = (prediction for prediction in predictions if prediction.label.id == best)
    assert prediction.best[0][0].id == best and not prediction.correct


def test_unknown_classes_are_skipped_with_warning(predictor, labeled):
    root = labeled("zebra", "dog")
    with pytest.warns(VitWarning, match="left out: 1 image of 'zebra'"):
        report = run_evaluate(predictor, root, rules=MatchRules(skip_unknown=True))
    assert report.evaluation.count == 1
    rules = MatchRules(mapping={"zebbra": ["horse"]}, skip_unknown=True)
    with pytest.warns(VitWarning, match="'zebbra'"), pytest.warns(VitWarning, match="'zebra'"):
        run_evaluate(predictor, root, rules=rules)
    rules = MatchRules(mapping={"zebra": [], "dog": []})
    with pytest.raises(DataError):
        run_evaluate(predictor, root, rules=rules)
