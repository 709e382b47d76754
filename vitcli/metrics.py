"""Classification metrics: accuracy, F1, calibration, per-class metrics.

`MetricAccumulator` accumulates logits batch by batch; its result is an `Evaluation`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from vitcli.config import METRICS, Score

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BINS = 15
"""Number of equal-width confidence bins (Guo et al. 2017, arXiv 1706.04599, section 5)."""

UNIT = 1 << 32
"""Losses and confidences are summed in units of 1 / UNIT, finer than the precision of float32."""


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """Metrics of one class."""

    index: int
    count: int
    """Number of images of the class (its support)."""
    recall: float
    """Fraction of them predicted correctly (accuracy of the class); NaN if there are none."""
    precision: float
    """Fraction of the predictions of this class that is correct; NaN if there are none."""
    f1: float
    """Their harmonic mean, 2 TP / (2 TP + FP + FN); 0 if either is 0 or NaN."""
    confused_with: int | None
    """The class most often predicted instead."""


class Calibration(NamedTuple):
    """Confidence and accuracy by bin. The confidence of a prediction is its score; bin m of `BINS`
    contains those with confidence in ((m - 1) / BINS, m / BINS]."""

    counts: Ints
    """(BINS,): number of predictions."""
    confidence: Floats
    """(BINS,): their mean confidence; 0 in an empty bin."""
    accuracy: Floats
    """(BINS,): fraction of them that is correct; 0 in an empty bin."""


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one pass over labeled images; all but the loss are in [0, 1]."""

    num_classes: int
    labels: Ints
    """(P,), with `predictions` and `counts` a sparse confusion matrix: pairs that never occur are
    left out, as 21,843 classes have 477 million."""
    predictions: Ints
    counts: Ints
    top5: float | None
    """Top-5 accuracy: fraction of images whose label is among the top five classes; None if there
    are no more than five."""
    loss: float
    """Mean loss that matches the model's score function: softmax or binary cross-entropy, without
    label smoothing or class weights. NaN if any loss is not finite."""
    calibration: Calibration

    @property
    def count(self) -> int:
        """Number of images."""
        return int(self.counts.sum())

    @property
    def top1(self) -> float:
        """Top-1 accuracy: fraction of images whose top class is their label."""
        correct = self.counts[self.labels == self.predictions].sum()
        return float(correct / max(self.count, 1))

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur as a label or a prediction, like scikit-learn's
        `f1_score(average="macro")`. A class that is predicted but has no images counts as 0."""
        return float(np.mean([row.f1 for row in self.by_class] or [0.0]))

    @property
    def ece(self) -> float:
        """Expected calibration error: mean |accuracy - confidence| over the bins, weighted by their
        counts (Guo et al. 2017, equation 3); NaN if the loss is."""
        if math.isnan(self.loss):
            return math.nan
        counts, confidence, accuracy = self.calibration
        return float((counts * np.abs(accuracy - confidence)).sum() / max(counts.sum(), 1))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the values of `METRICS`, with prefixed keys; top5 only if it is not None."""
        values = {name: getattr(self, name) for name in METRICS}
        return {prefix + name: value for name, value in values.items() if value is not None}

    @property
    def seen(self) -> list[int]:
        """Indices of the classes that occur as a label or a prediction, sorted."""
        return [int(i) for i in np.union1d(self.labels, self.predictions)]

    def confusion_matrix(self, classes: Sequence[int]) -> Ints:
        """Return the (n, n) confusion matrix of `classes`: rows are labels, columns predictions."""
        positions = np.full(self.num_classes, -1)
        positions[list(classes)] = np.arange(len(classes))
        rows, columns = positions[self.labels], positions[self.predictions]
        mask = (rows >= 0) & (columns >= 0)
        matrix = np.zeros((len(classes), len(classes)), np.int64)
        matrix[rows[mask], columns[mask]] = self.counts[mask]
        return matrix

    @cached_property
    def by_class(self) -> list[ClassMetrics]:
        """Metrics of each class in `seen`."""

        def totals(indices: Ints, counts: Ints) -> list[int]:
            return list(np.bincount(indices, counts, self.num_classes).astype(int).tolist())

        def ratio(part: int, total: int) -> float:
            return part / total if total else math.nan

        support, predicted = totals(self.labels, self.counts), totals(self.predictions, self.counts)
        correct = totals(self.labels, np.where(self.labels == self.predictions, self.counts, 0))
        confused_with = {label: wrong for label, wrong, _ in reversed(self.top_confusions())}
        return [
            ClassMetrics(
                index=i,
                count=support[i],
                recall=ratio(correct[i], support[i]),
                precision=ratio(correct[i], predicted[i]),
                f1=2 * correct[i] / (support[i] + predicted[i]),  # TP + FN, and TP + FP
                confused_with=confused_with.get(i),
            )
            for i in self.seen
        ]

    def top_confusions(self, limit: int | None = None) -> list[tuple[int, int, int]]:
        """Return (label, prediction, count) of up to `limit` confusions, most frequent first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:limit]
        return [(int(self.labels[i]), int(self.predictions[i]), int(self.counts[i])) for i in order]


class MetricAccumulator:
    """Accumulates metrics batch by batch, in memory independent of the number of images.

    All sums are integers (losses and confidences in units of 1 / `UNIT`) and therefore exact: the
    metrics do not depend on the order of images or on how they are batched.

    Args:
        score: maps logits to confidences and determines the loss: softmax cross-entropy, or binary
            cross-entropy summed over classes.
    """

    def __init__(self, num_classes: int, score: Score = "softmax") -> None:
        self.num_classes, self.score = num_classes, score
        self.pairs = Counter[int]()
        """Counts of (label, prediction) pairs, encoded as label * num_classes + prediction."""
        self.count = self.top5_correct = 0
        self.loss: float = 0
        """An integer; NaN once a loss is not finite."""
        self.bins = np.zeros((3, BINS), np.int64)
        """Rows: number of predictions, sum of their confidences, number of correct ones."""

    def add(self, logits: Tensor, labels: Ints) -> list[list[tuple[int, float]]]:
        """Add a batch.

        Args:
            logits: float32 (B, num_classes), on the CPU.
            labels: (B,)

        Returns:
            Up to five top classes and their scores for each image, best first.
        """
        import torch
        import torch.nn.functional as F

        best = logits.topk(min(5, self.num_classes))
        predictions, target = best.indices.numpy(), torch.from_numpy(labels)[:, None]
        label_logits = logits.gather(1, target)[:, 0]
        if self.score == "sigmoid":
            losses = F.softplus(logits).sum(1) - label_logits
            scores = best.values.sigmoid()
        else:
            log_sum = logits.logsumexp(1, keepdim=True)
            losses = log_sum[:, 0] - label_logits
            scores = (best.values - log_sum).exp()
        self.pairs.update((labels * self.num_classes + predictions[:, 0]).tolist())
        self.add_losses(losses)
        self.top5_correct += int((predictions == labels[:, None]).sum())
        confidence = np.nan_to_num(scores[:, 0].double().numpy())
        bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        for row, values in enumerate((1, np.rint(confidence * UNIT), predictions[:, 0] == labels)):
            np.add.at(self.bins[row], bins, np.asarray(values, np.int64))
        return [
            list(zip(*row, strict=True))
            for row in zip(predictions.tolist(), scores.tolist(), strict=True)
        ]

    def add_losses(self, losses: Tensor) -> None:
        """Add images of which only the losses (B,) are known."""
        self.count += len(losses)
        for loss in losses.tolist():
            self.loss += round(loss * UNIT) if math.isfinite(loss) else math.nan

    def result(self) -> Evaluation:
        """Compute the metrics of everything added so far."""
        pairs = np.array(sorted(self.pairs), np.int64)
        labels, predictions = np.divmod(pairs, max(self.num_classes, 1))
        counts = np.array([self.pairs[int(pair)] for pair in pairs], np.int64)
        count = max(self.count, 1)
        bin_counts, confidence, correct = self.bins
        divisors = np.maximum(bin_counts, 1)
        return Evaluation(
            self.num_classes,
            labels,
            predictions,
            counts,
            self.top5_correct / count if self.num_classes > 5 else None,
            self.loss / UNIT / count,
            Calibration(bin_counts, confidence / UNIT / divisors, correct / divisors),
        )
