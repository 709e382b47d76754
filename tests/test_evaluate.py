"""A checkpoint on labelled pictures: classes matched by id and name, what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vitcli.config import DataConfig
from vitcli.errors import ConfigError, DataError
from vitcli.evaluate import evaluate
from vitcli.prediction import Predictor

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
