"""Metrics of classification: accuracy, F1, calibration, class by class.

A `Tally` adds up logits batch by batch; its result is an `Evaluation`.
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
"""Of equal width, over the confidence (Guo et al. 2017, arXiv 1706.04599, section 5)."""

UNIT = 1 << 32
"""Losses and confidences are summed in units of 1 / UNIT: finer than float32 computes them."""


@dataclass(frozen=True, slots=True)
class ClassMetrics:
    """The metrics of one class."""

    index: int
    count: int
    """Images of the class: its support."""
    recall: float
    """The share of them that is recognised, the accuracy of the class; NaN without images."""
    precision: float
    """The share of the images predicted as this class that are of it; NaN where none was."""
    f1: float
    """The harmonic mean of both, 2 TP / (2 TP + FP + FN): 0 where either is 0 or NaN."""
    taken_for: int | None
    """The class that its other images are most often taken for."""


class Calibration(NamedTuple):
    """Confidence against accuracy. The confidence of a prediction is its score; bin m of `BINS`
    holds those with a confidence in ((m - 1) / BINS, m / BINS]."""

    counts: Ints
    """(BINS,): predictions."""
    confidence: Floats
    """(BINS,): their mean confidence; 0 in an empty bin."""
    accuracy: Floats
    """(BINS,): the share of them that is right; 0 in an empty bin."""


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one pass over labelled images; all but the loss are in [0, 1]."""

    num_classes: int
    labels: Ints
    """(P,), with `predictions` and `counts`: how many images of a class are predicted as another.
    Pairs that never occur are left out: 21,843 classes have 477 million."""
    predictions: Ints
    counts: Ints
    top5: float | None
    """The share of the images whose label is among the five best classes; None where there are no
    more than five."""
    loss: float
    """Mean loss of the labels, as the model was trained: softmax or binary cross-entropy, without
    label smoothing and weights of classes. NaN where one is not a finite number."""
    calibration: Calibration

    @property
    def count(self) -> int:
        """Images seen."""
        return int(self.counts.sum())

    @property
    def top1(self) -> float:
        """The share of the images whose best class is their label."""
        right = self.counts[self.labels == self.predictions].sum()
        return float(right / max(self.count, 1))

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that occur, as a label or as an answer: scikit-learn's
        `f1_score(average="macro")`. A class without images that is answered counts with 0."""
        return float(np.mean([row.f1 for row in self.by_class] or [0.0]))

    @property
    def ece(self) -> float:
        """The expected calibration error: the bins' |accuracy - confidence|, weighted by their
        answers (Guo et al. 2017, equation 3)."""
        counts, confidence, accuracy = self.calibration
        return float((counts * np.abs(accuracy - confidence)).sum() / max(counts.sum(), 1))

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Those of `METRICS`, each with the prefix; top5 only where there is one."""
        known = {name: getattr(self, name) for name in METRICS}
        return {prefix + name: value for name, value in known.items() if value is not None}

    @property
    def seen(self) -> list[int]:
        """The classes that occur, as a label or as an answer, in index order."""
        return [int(i) for i in np.union1d(self.labels, self.predictions)]

    def confusion_of(self, classes: Sequence[int]) -> Ints:
        """(n, n): the confusion matrix of some classes: row is the label, column the prediction."""
        place = np.full(self.num_classes, -1)
        place[list(classes)] = np.arange(len(classes))
        rows, columns = place[self.labels], place[self.predictions]
        inside = (rows >= 0) & (columns >= 0)
        table = np.zeros((len(classes), len(classes)), np.int64)
        table[rows[inside], columns[inside]] = self.counts[inside]
        return table

    @cached_property
    def by_class(self) -> list[ClassMetrics]:
        """The metrics of each class that occurs, in index order."""

        def totals(of: Ints, counts: Ints) -> list[int]:
            return list(np.bincount(of, counts, self.num_classes).astype(int).tolist())

        def share(of: int, all: int) -> float:
            return of / all if all else math.nan

        images, answers = totals(self.labels, self.counts), totals(self.predictions, self.counts)
        hits = totals(self.labels, np.where(self.labels == self.predictions, self.counts, 0))
        others = {label: other for label, other, _ in reversed(self.mistakes())}
        return [
            ClassMetrics(
                index=i,
                count=images[i],
                recall=share(hits[i], images[i]),
                precision=share(hits[i], answers[i]),
                f1=2 * hits[i] / (images[i] + answers[i]),  # TP + FN, and TP + FP
                taken_for=others.get(i),
            )
            for i in self.seen
        ]

    def mistakes(self, most: int | None = None) -> list[tuple[int, int, int]]:
        """(label, prediction, images) of the most frequent confusions, worst first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:most]
        return [(int(self.labels[i]), int(self.predictions[i]), int(self.counts[i])) for i in order]


class Tally:
    """Adds up logits batch by batch, in memory that the number of images does not change.

    All sums are integers (of losses and confidences: in units of 1 / `UNIT`), so they are exact:
    in whatever order or parts images are added, the metrics are the same to the last digit.

    Args:
        score: what makes a confidence of a logit, and which loss is meant: softmax cross-entropy,
            or binary cross-entropy summed over the classes.
    """

    def __init__(self, num_classes: int, score: Score = "softmax") -> None:
        self.num_classes, self.score = num_classes, score
        self.pairs = Counter[int]()
        """How often (label, prediction) occurs, as label * num_classes + prediction."""
        self.count = self.among_five = 0
        self.loss: float = 0
        """An integer; NaN once a loss is not a finite number."""
        self.bins = np.zeros((3, BINS), np.int64)
        """Rows: answers, the sum of their confidences, how many are right."""

    def add(self, logits: Tensor, labels: Ints) -> list[list[tuple[int, float]]]:
        """Counts a batch.

        Args:
            logits: float32 (B, num_classes), on the CPU.
            labels: (B,)

        Returns:
            For each image at most five classes with their scores, the best first.
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
        self.among_five += int((answers == labels[:, None]).sum())
        confidence = np.nan_to_num(scores[:, 0].double().numpy())
        place = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
        for row, values in enumerate((1, np.rint(confidence * UNIT), answers[:, 0] == labels)):
            np.add.at(self.bins[row], place, np.asarray(values, np.int64))
        return [
            list(zip(*row, strict=True))
            for row in zip(answers.tolist(), scores.tolist(), strict=True)
        ]

    def add_losses(self, losses: Tensor) -> None:
        """Counts images (B,) of which the loss is all that there is."""
        self.count += len(losses)
        for loss in losses.tolist():
            self.loss += round(loss * UNIT) if math.isfinite(loss) else math.nan

    def result(self) -> Evaluation:
        """The metrics of all that was added."""
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
            self.among_five / images if self.num_classes > 5 else None,
            self.loss / UNIT / images,
            Calibration(answers, confidence / UNIT / filled, right / filled),
        )
