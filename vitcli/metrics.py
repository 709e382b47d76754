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
        right = self.counts[self.labels == self.predictions].sum()
        return float(right / max(self.count, 1))

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur as a label or a prediction, like scikit-learn's
        `f1_score(average="macro")`. A class that is predicted but has no images counts as 0."""
        return float(np.mean([row.f1 for row in self.by_class] or [0.0]))

    @property
    def ece(self) -> float:
        """Expected calibration error: mean |accuracy - confidence| over the bins, weighted by their
        counts (Guo et al. 2017, equation 3)."""
        counts, confidence, accuracy = self.calibration
        return float((counts * np.abs(accuracy - confidence)).sum() / max(counts.sum(), 1))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Return the values of `METRICS`, with prefixed keys; top5 only if it is not None."""
        known = {name: getattr(self, name) for name in METRICS}
        return {prefix + name: value for name, value in known.items() if value is not None}

    @property
    def seen(self) -> list[int]:
        """Indices of the classes that occur as a label or a prediction, sorted."""
        return [int(i) for i in np.union1d(self.labels, self.predictions)]

    def confusion_matrix(self, classes: Sequence[int]) -> Ints:
        """Return the (n, n) confusion matrix of `classes`: rows are labels, columns predictions."""
        place = np.full(self.num_classes, -1)
        place[list(classes)] = np.arange(len(classes))
        rows, columns = place[self.labels], place[self.predictions]
        inside = (rows >= 0) & (columns >= 0)
        table = np.zeros((len(classes), len(classes)), np.int64)
        table[rows[inside], columns[inside]] = self.counts[inside]
        return table

    @cached_property
    def by_class(self) -> list[ClassMetrics]:
        """Metrics of each class in `seen`."""

        def totals(of: Ints, counts: Ints) -> list[int]:
            return list(np.bincount(of, counts, self.num_classes).astype(int).tolist())

        def share(of: int, all: int) -> float:
            return of / all if all else math.nan

        images, answers = totals(self.labels, self.counts), totals(self.predictions, self.counts)
        hits = totals(self.labels, np.where(self.labels == self.predictions, self.counts, 0))
        others = {label: other for label, other, _ in reversed(self.top_confusions())}
        return [
            ClassMetrics(
                index=i,
                count=images[i],
                recall=share(hits[i], images[i]),
                precision=share(hits[i], answers[i]),
                f1=2 * hits[i] / (images[i] + answers[i]),  # TP + FN, and TP + FP
                confused_with=others.get(i),
            )
            for i in self.seen
        ]

    def top_confusions(self, most: int | None = None) -> list[tuple[int, int, int]]:
        """Return (label, prediction, count) of up to `most` confusions, most frequent first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:most]
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
        answers, target = best.indices.numpy(), torch.from_numpy(labels)[:, None]
        own = logits.gather(1, target)[:, 0]
        if self.score == "sigmoid":
            losses = F.softplus(logits).sum(1) - own
            scores = best.values.sigmoid()
        else:
            total = logits.logsumexp(1, keepdim=True)
            losses = total[:, 0] - own
            scores = (best.values - total).exp()
        self.pairs.update((labels * self.num_classes + answers[:, 0]).tolist())
        self.add_losses(losses)
        self.top5_correct += int((answers == labels[:, None]).sum())
        confidence = np.nan_to_num(scores[:, 0].double().numpy())
        place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        for row, values in enumerate((1, np.rint(confidence * UNIT), answers[:, 0] == labels)):
            np.add.at(self.bins[row], place, np.asarray(values, np.int64))
        return [
            list(zip(*row, strict=True))
            for row in zip(answers.tolist(), scores.tolist(), strict=True)
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
        images = max(self.count, 1)
        answers, confidence, right = self.bins
        filled = np.maximum(answers, 1)
        return Evaluation(
            self.num_classes,
            labels,
            predictions,
            counts,
            self.top5_correct / images if self.num_classes > 5 else None,
            self.loss / UNIT / images,
            Calibration(answers, confidence / UNIT / filled, right / filled),
        )
