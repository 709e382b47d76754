"""Accuracy, F1 and calibration beside scikit-learn's."""

from __future__ import annotations

import warnings
from types import ModuleType

import numpy as np
import pytest
import torch

from vitcli.metrics import BINS, Evaluation, Tally

pytestmark = pytest.mark.peers


def random_answers(seed: int, classes: int) -> tuple[np.ndarray, np.ndarray, Evaluation]:
    """Logits that are somewhat right about labels that leave a third of the classes out."""
    rng = np.random.default_rng(seed)
    present = rng.choice(classes, max(2 * classes // 3, 1), replace=False)
    labels = rng.choice(present, 400)
    logits = rng.normal(size=(400, classes)).astype(np.float32)
    logits[np.arange(400), labels] += 2
    tally = Tally(classes)
    tally.add(torch.from_numpy(logits), labels)
    return logits, labels, tally.result()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [2, 3, 9, 300])
def test_figures_are_scikit_learns(sklearn: ModuleType, seed: int, classes: int) -> None:
    logits, labels, evaluation = random_answers(seed, classes)
    answers = logits.argmax(axis=1)
    assert evaluation.top1 == sklearn.metrics.accuracy_score(labels, answers)
    f1 = sklearn.metrics.f1_score(labels, answers, average="macro")
    assert evaluation.macro_f1 == pytest.approx(f1, abs=1e-12)
    if classes > 5:
        five = sklearn.metrics.top_k_accuracy_score(labels, logits, k=5, labels=np.arange(classes))
        assert evaluation.top5 == pytest.approx(five)
    with warnings.catch_warnings():  # of classes without images, or without answers
        warnings.simplefilter("ignore")
        rows = sklearn.metrics.precision_recall_fscore_support(
            labels, answers, labels=evaluation.seen, zero_division=np.nan
        )
    ours = [(r.precision, r.recall, r.f1, r.count) for r in evaluation.by_class]
    theirs = np.array(rows).T
    np.testing.assert_allclose(np.array(ours)[:, [0, 1, 3]], theirs[:, [0, 1, 3]])
    np.testing.assert_allclose(np.array(ours)[:, 2], np.nan_to_num(theirs[:, 2]))


@pytest.mark.parametrize("classes", [2, 9, 300])
def test_bins_of_the_confidence_are_scikit_learns(sklearn: ModuleType, classes: int) -> None:
    logits, labels, evaluation = random_answers(7, classes)
    scores = torch.from_numpy(logits).softmax(1).double().numpy()
    accuracy, confidence = sklearn.calibration.calibration_curve(
        scores.argmax(axis=1) == labels, scores.max(axis=1), n_bins=BINS, strategy="uniform"
    )
    full = evaluation.calibration.counts > 0
    np.testing.assert_allclose(evaluation.calibration.accuracy[full], accuracy)
    np.testing.assert_allclose(evaluation.calibration.confidence[full], confidence, atol=1e-6)
