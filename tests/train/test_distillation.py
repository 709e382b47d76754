"""Distillation: a teacher's inputs and scores, and which teachers are rejected."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from peers.random_models import save_random
from train.runs import SIZES, filter_events
from vitcli.config import ClassLabel, DataConfig, Preprocess, model_config
from vitcli.errors import ConfigError, DataError
from vitcli.prediction import Predictor
from vitcli.train.config import TrainConfig
from vitcli.train.distillation import Teacher
from vitcli.train.loop import train

NAMES = ("gray", "red", "blue", "green")
STUDENT = Preprocess((16, 16))
HALVES = Preprocess((16, 16), (0.4, 0.5, 0.6), (0.2, 0.3, 0.4))


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Factory of checkpoints with random weights; by default, they normalize unlike the student."""
    folder = tmp_path_factory.mktemp("teachers")

    def save(
        name: str, preprocess: Preprocess = HALVES, named: bool = True, classes: int = 4
    ) -> Path:
        sizes = {**SIZES, "image_size": preprocess.size}
        labels = tuple(ClassLabel(name, name) for name in NAMES) if named else ()
        model = model_config("Ti/8", num_classes=classes, **sizes)
        return save_random(folder / name, model, preprocess=preprocess, classes=labels)

    return save


def config(model: Path, **fields) -> TrainConfig:
    return TrainConfig(
        data=DataConfig("flags"), output="run", teacher=str(model), precision="fp32", **fields
    )


def make_teacher(model: Path, classes=("blue", "green", "red"), **fields) -> Teacher:
    labels = tuple(ClassLabel(name, name) for name in classes)
    predictor = Predictor(model, "cpu", "fp32")
    return Teacher(predictor, labels, STUDENT, config(model, **fields))


def test_teacher_scores_match_predict(make_checkpoint, tmp_path) -> None:
    """For the same pixels, which `predict` normalizes with the teacher's mean and std."""
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    model = make_checkpoint("same")
    (result,) = Predictor(model, "cpu", "fp32").predict(tmp_path / "image.png", top_k=4)
    expected = {p.label: p.score for p in result.predictions}
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 127.5 - 1
    scores = make_teacher(model).scores(images)[0]
    total = expected["blue"] + expected["green"] + expected["red"]
    for name, score in zip(("blue", "green", "red"), scores.tolist(), strict=True):
        assert score == pytest.approx(expected[name] / total, abs=1e-5)

    warm = make_teacher(model, temperature=3.0).scores(images)[0]
    torch.testing.assert_close(warm.log().softmax(0), warm)
    torch.testing.assert_close((3 * warm.log()).softmax(0), scores)


def test_images_are_resized_for_teacher(make_checkpoint) -> None:
    large = make_teacher(make_checkpoint("large", dataclasses.replace(HALVES, size=(32, 24))))
    gray = torch.zeros(5, 3, 16, 16)
    expected = large.inference.model(
        (0.5 - torch.tensor(HALVES.mean))
        .div(torch.tensor(HALVES.std))
        .view(1, 3, 1, 1)
        .expand(5, 3, 32, 24)
    )
    torch.testing.assert_close(large.scores(gray), expected[:, [2, 3, 1]].softmax(1))


def test_teacher_must_name_all_classes(make_checkpoint) -> None:
    with pytest.raises(ConfigError, match="predicts no classes"):
        make_teacher(make_checkpoint("headless", classes=0))
    with pytest.raises(ConfigError, match="no class names"):
        make_teacher(make_checkpoint("nameless", named=False))
    with pytest.raises(DataError, match="'violet' is not among the 4 classes of the teacher"):
        make_teacher(make_checkpoint("colorful"), ("red", "violet"))


def test_student_learns_and_records_teacher(tiny_run, finished) -> None:
    """With a teacher weight of 1, no labels are used: the accuracy comes from the teacher."""
    run = tiny_run(teacher=str(finished), steps=60, eval_every=60, seed=5)
    events: list = []
    outcome = train(run, on_event=events.append)
    losses = [event.loss for event in filter_events(events, "train")]
    assert losses[-1] < losses[0] / 2
    assert outcome.metrics["val_top1"] > 0.9
    info = Predictor(run.output).info
    assert info.provenance["teacher"] == finished.name
    assert f"- Teacher: {finished.name}" in (Path(run.output) / "README.md").read_text()
