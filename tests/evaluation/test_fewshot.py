"""Sampling of shots."""

import numpy as np
import pytest

from data.conftest import labeled
from vitcli.config import ClassLabel
from vitcli.errors import DataError
from vitcli.evaluation.fewshot import check_shots, sample_shots

LABELS = np.random.default_rng(0).integers(0, 5, 300)


def test_shots_are_nested_and_balanced():
    fewer, more = (sample_shots(LABELS, 5, shots, seed=1) for shots in (5, 10))
    assert set(fewer) < set(more) and len(set(more)) == 50
    assert LABELS[more].tolist() == [label for label in range(5) for _ in range(10)]
    assert set(sample_shots(LABELS, 5, 5, seed=2)) != set(fewer)


def test_unreadable_image_is_replaced_within_its_class():
    before, more = (sample_shots(LABELS, 5, shots, seed=1) for shots in (5, 6))
    unreadable = {int(before[2]): None}
    after = sample_shots(LABELS, 5, 5, 1, unreadable)
    assert set(after) - set(before) == {more[5]} and set(before) - set(after) == {before[2]}


def test_too_few_images_per_class_are_rejected():
    classes = [ClassLabel(name, name) for name in "abcd"]  # d has no images
    train = labeled([0] * 9 + [1] * 4 + [2] * 3, classes)
    check_shots(train, 3)
    with pytest.raises(DataError) as caught:
        check_shots(train, 4)
    assert "'c'" in caught.value.what and "use --shots 3" in (caught.value.hint or "")
    with pytest.raises(DataError):
        check_shots(train, 3, unreadable=[13])
