"""ReaL labels: several classes, or none, may be correct; images are matched by file name."""

from pathlib import Path

import numpy as np
import pytest

from vitcli.config import ClassLabel
from vitcli.data.alignment import Alignment
from vitcli.data.source import Names, Source
from vitcli.errors import DataError
from vitcli.evaluation.imagenet import IMAGES, ReaLAccuracy, correct_classes, imagenet_classes
from vitcli.hub import registry


def images(*numbers: object) -> Source:
    names = Names.pack(
        f"n0000/ILSVRC2012_val_{n:08}.JPEG" if isinstance(n, int) else str(n) for n in numbers
    )
    classes = (ClassLabel("n0000", "n0000"),)
    root = Path("/val")
    return Source(classes, np.zeros(len(names), np.int64), names, root)


def identity(count: int) -> Alignment:
    same = np.arange(count)
    return Alignment(imagenet_classes()[:count], same, np.zeros(1, np.int64), same)


def test_bundled_labels_match_paper():
    """3,163 images have no label (google-research/reassessed-imagenet); image 2 has two."""
    accepted = registry.real_labels()
    assert len(accepted) == IMAGES
    assert sum(not classes for classes in accepted) == 3163
    assert set(accepted[1]) == {970, 795}


def test_any_accepted_class_is_correct():
    classes = imagenet_classes()
    real = ReaLAccuracy(
        correct_classes(registry.real_labels(), images(2, 1, 3, 2), classes, identity(1000))
    )
    assert real.add(0, 970) is True
    assert real.add(1, 65) is None  # no class is correct
    assert real.add(2, 65) is False
    assert real.add(3, 795) is True
    assert (real.correct, real.count, real.left_out, real.accuracy) == (2, 3, 1, 2 / 3)


def test_model_with_reordered_subset_of_classes():
    """By synset: image 2 keeps only class 970; image 4 keeps none and is skipped."""
    alp, dog = imagenet_classes()[970], ClassLabel("dog", "dog")
    same = np.arange(2)
    aligned = Alignment((dog, alp), same, np.zeros(1, np.int64), same)
    labels = registry.real_labels()
    real = ReaLAccuracy(correct_classes(labels, images(2, 4, 2), (dog, alp), aligned))
    assert [real.add(0, 1), real.add(1, 0), real.add(2, 0)] == [True, None, False]
    with pytest.raises(DataError):
        correct_classes(labels, images(2), (dog,), identity(1))


@pytest.mark.parametrize("name", ["n01/cat.jpg", "ILSVRC2012_val_00050001.JPEG", 0])
def test_unexpected_image_names_are_rejected(name):
    with pytest.raises(DataError) as caught:
        correct_classes(registry.real_labels(), images(1, name), imagenet_classes(), identity(1000))
    assert caught.value.where == str(images(1, name).where(1))
