"""Class weights: from counts, from a file, and in the loss."""

import pytest
import torch
import torch.nn.functional as F

from data.conftest import labeled
from train.runs import make_config
from vitcli.config import ClassLabel
from vitcli.data.source import Source
from vitcli.errors import DataError
from vitcli.train.class_weights import class_weights, read_class_weights
from vitcli.train.objectives import classification_losses, soft_targets

CLASSES = (ClassLabel("n1", "crane"), ClassLabel("n2", "crane"), ClassLabel("dog", "dog"))


def source(labels: list[int]) -> Source:
    return labeled(labels, CLASSES)


def test_balanced_weights_are_inverse_class_frequencies():
    found = class_weights("balanced", source([0] * 6 + [1] * 3 + [2]))
    assert found == pytest.approx([10 / (3 * 6), 10 / (3 * 3), 10 / 3])
    absent = class_weights("balanced", source([0] * 3 + [2]))  # only classes with images count
    assert absent[[0, 2]] == pytest.approx([4 / (2 * 3), 4 / 2])


def test_weights_file_matches_classes_by_id_or_unique_name(tmp_path):
    (tmp_path / "w.csv").write_text("n2, 3\nDog,0.5\n\n")
    weights = read_class_weights(tmp_path / "w.csv")
    assert weights == {"n2": 3.0, "Dog": 0.5}
    assert class_weights(weights, source([0, 1, 2])).tolist() == [1.0, 3.0, 0.5]
    (tmp_path / "w.tsv").write_text("a, b\t2\n")
    assert read_class_weights(tmp_path / "w.tsv") == {"a, b": 2.0}


@pytest.mark.parametrize("text", ["dog 3\n", "dog,-1\n", "dog,nan\n", "dog,1\ndog,2\n", "\n"])
def test_malformed_weights_files_are_rejected(tmp_path, text):
    (tmp_path / "w").write_text(text)
    with pytest.raises(DataError) as caught:
        read_class_weights(tmp_path / "w")
    assert str(caught.value.where).partition(",")[0] == str(tmp_path / "w")


@pytest.mark.parametrize("weights", [{"cat": 1.0}, {"crane": 1.0}, {"n1": 0, "n2": 0, "dog": 0}])
def test_invalid_class_weights_are_rejected(weights):
    with pytest.raises(DataError):
        class_weights(weights, source([0, 1, 2]))


def test_losses_are_scaled_by_class_weight():
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    labels, weights = torch.tensor([0, 1, 2, 2, 1, 0, 0, 0]), torch.tensor([0.2, 1.0, 5.0])
    run = make_config()
    targets = soft_targets(labels, 3, run)
    found = classification_losses(logits, targets, run, weights)
    expected = F.cross_entropy(logits, labels, weights, reduction="sum")
    assert found.shape == (8,) and torch.allclose(found.sum(), expected)
    sigmoid = make_config(loss="sigmoid")
    expected = classification_losses(logits, targets, sigmoid) * weights[labels]
    assert torch.allclose(classification_losses(logits, targets, sigmoid, weights), expected)
