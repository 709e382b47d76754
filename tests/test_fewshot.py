"""Drawing of shots, and what no few-shot classification can be made of."""

from pathlib import Path

import numpy as np
import pytest

from vitcli.config import ClassLabel, DataConfig, FewshotConfig
from vitcli.data.source import Names, Source
from vitcli.errors import ConfigError, DataError
from vitcli.fewshot import Draw, check_shots, choose_shots, run_trials

LABELS = np.random.default_rng(0).integers(0, 5, 300)


def source(labels: list[int], classes: int) -> Source:
    names = tuple(ClassLabel(name, name) for name in "abcdefgh"[:classes])
    images = Names.pack(f"{i}.jpg" for i in range(len(labels)))
    return Source(names, np.array(labels, np.int64), images, None, Path())  # type: ignore[arg-type]


def test_shots_are_nested_and_of_their_classes():
    fewer, more = (choose_shots(LABELS, 5, shots, seed=1) for shots in (5, 10))
    assert set(fewer) < set(more) and len(set(more)) == 50
    assert LABELS[more].tolist() == [label for label in range(5) for _ in range(10)]
    assert set(choose_shots(LABELS, 5, 5, seed=2)) != set(fewer)


def test_a_class_with_too_few_images():
    train = source([0] * 9 + [1] * 4 + [2] * 3, 3)
    check_shots(train, 3)
    with pytest.raises(DataError, match="'c' has 3 training images, too few for 4 shots") as one:
        check_shots(train, 4)
    assert one.value.hint == "take --shots up to 3"
    with pytest.raises(DataError, match=r"'c' has 3 training images.* \(2 such classes\)"):
        check_shots(train, 9)


def test_a_class_without_any_image_is_never_answered():
    train, test = source([0, 0, 2, 2], 4), source([0, 2], 4)
    check_shots(train, 2)
    features = np.array([[0.0, 1.0], [0.1, 1.2], [5.0, -1.0], [5.2, -1.1]], np.float32)
    draws = [Draw(2, 0, choose_shots(train.labels, 4, 2, 0))]
    ((trial, head, _),) = run_trials(
        draws, (features, train.labels), (features[::2], test.labels), 4, [0.1]
    )
    assert trial.accuracy == 1.0 and set(head.predict(features)) == {0, 2}


@pytest.mark.parametrize(
    "wrong",
    [{"shots": (0,)}, {"shots": (5, 5)}, {"seeds": ()}, {"l2": (-1.0,)}, {"l2": (float("nan"),)}]
    + [{"layer": 0}, {"pool": "cls"}, {"preprocess": "mine"}],
    ids=str,
)
def test_what_cannot_be_asked_for(wrong):
    with pytest.raises(ConfigError):
        FewshotConfig(DataConfig("flowers"), **wrong)
