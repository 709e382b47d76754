"""Accuracy, F1, calibration and confusion matrices against plain loops over images."""

import math

import numpy as np
import pytest
import torch

from vitcli.metrics import BINS, Evaluation, MetricAccumulator


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(1000, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    """Class 11 has no images."""
    return np.random.default_rng(1).integers(0, 11, 1000)


def evaluate(
    logits: np.ndarray | torch.Tensor, labels: list[int] | np.ndarray, score: str = "softmax"
) -> Evaluation:
    """The metrics of one batch."""
    accumulator = MetricAccumulator(logits.shape[1], score)
    accumulator.add(torch.as_tensor(logits), np.array(labels))
    return accumulator.result()


@pytest.fixture(scope="module")
def evaluation(logits, labels) -> Evaluation:
    return evaluate(logits, labels)


def test_metrics_match_numpy(evaluation, logits, labels):
    order = np.argsort(-logits, axis=1)
    assert evaluation.count == 1000
    assert evaluation.top1 == np.mean(order[:, 0] == labels)
    assert evaluation.top5 == np.mean((order[:, :5] == labels[:, None]).any(axis=1))
    exponents = np.exp(logits.astype(float))
    likelihood = exponents[np.arange(1000), labels] / exponents.sum(axis=1)
    assert evaluation.loss == pytest.approx(-np.log(likelihood).mean(), rel=1e-6)
    table = np.zeros((12, 12), int)
    np.add.at(table, (labels, order[:, 0]), 1)
    np.testing.assert_array_equal(evaluation.confusion_matrix(range(12)), table)
    np.testing.assert_array_equal(evaluation.confusion_matrix([3, 0]), table[[3, 0]][:, [3, 0]])
    wrong = table - np.diag(np.diag(table))
    worst = evaluation.top_confusions(3)
    assert [count for *_, count in worst] == sorted(wrong.ravel())[:-4:-1]
    assert all(wrong[label, prediction] == count for label, prediction, count in worst)


def test_per_class_metrics_match_loops(evaluation, logits, labels):
    predictions = logits.argmax(axis=1)
    scores = []
    assert [row.index for row in evaluation.by_class] == list(range(12))
    for row in evaluation.by_class:
        hits = misses = false = 0
        for label, prediction in zip(labels.tolist(), predictions.tolist(), strict=True):
            hits += label == prediction == row.index
            misses += label == row.index != prediction
            false += prediction == row.index != label
        assert row.count == hits + misses
        assert row.precision == hits / (hits + false)
        if row.index == 11:  # predicted, but has no images
            assert math.isnan(row.recall) and row.f1 == 0 and row.confused_with is None
        else:
            assert row.recall == hits / (hits + misses)
            assert row.f1 == pytest.approx(2 / (1 / row.precision + 1 / row.recall))
            others = np.bincount(predictions[labels == row.index], minlength=12)
            others[row.index] = 0
            assert others[row.confused_with] == others.max()
        scores.append(row.f1)
    assert evaluation.macro_f1 == pytest.approx(sum(scores) / 12, abs=1e-12)


def test_macro_f1_ignores_absent_classes():
    evaluation = evaluate(torch.eye(100)[[3, 3, 7]], [3, 7, 7])
    assert [row.index for row in evaluation.by_class] == [3, 7] == evaluation.seen
    assert evaluation.macro_f1 == pytest.approx(2 / 3)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_result_is_independent_of_batching(logits, labels, score):
    """In any order, since ranks finish in any order."""
    batched = MetricAccumulator(12, score)
    for part in np.split(np.random.default_rng(2).permutation(1000), [10, 500, 993]):
        batched.add(torch.from_numpy(logits[part]), labels[part])
    one, other = batched.result(), evaluate(logits, labels, score)
    assert one.metrics() == other.metrics() and one.loss == other.loss
    assert np.array_equal(one.confusion_matrix(range(12)), other.confusion_matrix(range(12)))
    assert np.array_equal(one.calibration.confidence, other.calibration.confidence)


def test_sigmoid_loss_is_binary_cross_entropy(logits, labels):
    z, y = logits.astype(float), np.eye(12)[labels]
    expected = (np.log1p(np.exp(z)) - y * z).sum(axis=1).mean()
    assert evaluate(logits, labels, "sigmoid").loss == pytest.approx(expected, rel=1e-6)


def expected_calibration_error(confidence: list[float], right: list[bool]) -> float:
    """Guo et al. 2017, equations 1 to 3, with loops over bins and predictions."""
    error = 0.0
    for m in range(1, BINS + 1):
        inside = [i for i, c in enumerate(confidence) if (m - 1) / BINS < c <= m / BINS]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            mean = sum(confidence[i] for i in inside) / len(inside)
            error += len(inside) / len(confidence) * abs(accuracy - mean)
    return error


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_calibration_matches_loops(logits, labels, score):
    sharp = 3 * logits.astype(float)
    if score == "softmax":
        scores = np.exp(sharp) / np.exp(sharp).sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-sharp))
    right = (sharp.argmax(axis=1) == labels).tolist()
    found = evaluate(3 * logits, labels, score)
    calibration = found.calibration
    expected = expected_calibration_error(scores.max(axis=1).tolist(), right)
    assert found.ece == pytest.approx(expected, abs=1e-6) and expected > 0.5
    bins = [next(m for m in range(BINS) if c <= (m + 1) / BINS) for c in scores.max(axis=1)]
    assert calibration.counts.tolist() == np.bincount(bins, minlength=BINS).tolist()
    assert (calibration.accuracy * calibration.counts).sum() == pytest.approx(sum(right))


def test_confidence_of_one_falls_in_last_bin():
    certain = evaluate(np.array([[1000.0, 0.0]]), [1])
    assert certain.ece == 1.0 and certain.calibration.counts[-1] == 1


@pytest.mark.parametrize("classes", [2, 5, 6])
def test_top5_needs_more_than_five_classes(classes):
    evaluation = evaluate(torch.eye(classes), np.arange(classes))
    assert (evaluation.top5 is not None) is (classes > 5)
    assert ("val_top5" in evaluation.metrics("val_")) is (classes > 5)
    assert evaluation.metrics()["top1"] == 1.0


def test_confusion_counts_are_sparse():
    scores = torch.zeros(4, 21_843)
    scores[:, 20_000] = 1
    evaluation = evaluate(scores, [20_000, 5, 5, 21_842])
    assert evaluation.top1 == 0.25 and len(evaluation.counts) == 3
    assert evaluation.top_confusions(1) == [(5, 20_000, 2)]


def test_empty_and_nan_input():
    nothing = MetricAccumulator(3).result()
    assert (nothing.count, nothing.top1, nothing.macro_f1, nothing.ece) == (0, 0.0, 0.0, 0.0)
    found = evaluate(np.full((2, 7), np.nan), [5, 6])
    assert found.count == 2 and math.isnan(found.ece) and math.isnan(found.loss)
