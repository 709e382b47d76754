"""Regularised least squares onto classes, in closed form.

Features are whitened with the mean and standard deviation of the training examples, a constant
feature is appended, and a linear map sends them to targets in {-1, 1}:

    W = argmin |X W - Y|^2 + l2 |W|^2          X: (N, D + 1), Y: (N, K), W: (D + 1, K)
      = Q (L + l2)^-1 Q^T X^T Y                X^T X = Q L Q^T    where N > D
      = X^T Q (L + l2)^-1 Q^T Y                X X^T = Q L Q^T    otherwise

One decomposition, in the smaller of the two sizes, serves every l2. Neither X nor Y is ever formed
where N is large: X comes in chunks, and as Y = 2 onehot - 1, A^T Y is twice the sums of A's rows by
class, less the sum of all. Beside the features that are given, memory is that of a few (D, K) and
(D, D). (big_vision/evaluators/fewshot_lsr.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitcli.errors import ConfigError, DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BIAS = 100.0
"""The constant feature. It is regularised like the others, so a large one is a free offset."""
STD_FLOOR = 1e-5
"""Added to the standard deviations that features are divided by."""
CHUNK = 1024
"""Examples that are whitened at a time."""
LOGITS = 1 << 23
"""Numbers in a chunk of predictions, 64 MB."""
LEFT_OUT = 10_000
"""Examples, at most, that are left out in turn."""
LEFT_OUT_LOGITS = 1 << 24
"""Of many classes, as many examples as have so many predictions."""


@dataclass(frozen=True)
class LinearHead:
    """Logits of raw features x: x @ weight.T + bias, with whitening and solution in one."""

    weight: Floats
    """(K, D)"""
    bias: Floats
    """(K,)"""

    def predict(self, features: npt.NDArray[np.floating]) -> Ints:
        """The best class of each row of features (N, D)."""
        chunk = _rows(len(self.bias))
        parts = [
            np.argmax(features[start : start + chunk] @ self.weight.T + self.bias, axis=1)
            for start in range(0, len(features), chunk)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def scaled(self, factor: float) -> LinearHead:
        """The head with logits so many times as large; above 0, its decisions stay."""
        return LinearHead(factor * self.weight, factor * self.bias)


class RidgeSolver:
    """Regularised least squares on one training subset, for any number of l2.

    Args:
        features: (N, D), finite; kept, not copied.
        labels: (N,), in [0, num_classes).

    Raises:
        DataError: a feature is not finite.
    """

    def __init__(self, features: npt.NDArray[np.floating], labels: Ints, num_classes: int) -> None:
        self.features, self.labels, self.num_classes = features, labels, num_classes
        count, size = features.shape
        self.mean = features.mean(axis=0, dtype=np.float64)
        if not np.isfinite(self.mean).all():
            bad = np.count_nonzero(~np.isfinite(features).all(axis=1))
            raise DataError(f"the features of {bad} examples are not finite numbers")
        chunks = (features[start : start + CHUNK] for start in range(0, count, CHUNK))
        squares = sum(((chunk - self.mean) ** 2).sum(axis=0) for chunk in chunks)
        self.std = np.sqrt(squares / count) + STD_FLOOR
        self.primal = count > size
        if self.primal:
            gram, sums = np.zeros((size + 1, size + 1)), np.zeros((num_classes, size + 1))
            for start in range(0, count, CHUNK):
                chunk = slice(start, start + CHUNK)
                x = self.whitened(features[chunk])
                gram += x.T @ x
                self._add_by_class(sums, x, labels[chunk])
            self.eigenvalues, self.basis = np.linalg.eigh(gram)
            self.left = self.basis  # (D + 1, D + 1)
            self.target = self.basis.T @ _times_targets(sums)
        else:
            x = self.whitened(features)
            self.eigenvalues, self.basis = np.linalg.eigh(x @ x.T)  # basis: (N, N)
            self.left = x.T @ self.basis  # (D + 1, N)
            sums = np.zeros((num_classes, count))
            self._add_by_class(sums, self.basis, labels)
            self.target = _times_targets(sums)
        self.eigenvalues = np.maximum(self.eigenvalues, 0.0)

    def whitened(self, features: npt.NDArray[np.floating]) -> Floats:
        """X of any features (n, D): (n, D + 1)."""
        x = np.full((len(features), len(self.mean) + 1), BIAS)
        np.subtract(features, self.mean, out=x[:, :-1])
        x[:, :-1] /= self.std
        return x

    def _add_by_class(self, sums: Floats, rows: Floats, labels: Ints) -> None:
        """Adds rows (n, columns) to those of their classes in sums (K, columns)."""
        if (labels[1:] < labels[:-1]).any():  # shots come class by class
            order = np.argsort(labels, kind="stable")
            rows, labels = rows[order], labels[order]
        present, starts = np.unique(labels, return_index=True)
        sums[present] += np.add.reduceat(rows, starts, axis=0)

    def solve(self, l2: float) -> LinearHead:
        """The solution at one l2.

        Raises:
            ConfigError: l2 is negative, or 0 where the system is singular.
        """
        weights = self.left @ (self.target * self._inverse(l2)[:, None])
        weight = weights[:-1] / self.std[:, None]
        bias = BIAS * weights[-1] - self.mean @ weight
        return LinearHead(weight.T, bias)

    def _inverse(self, l2: float) -> Floats:
        """1 / (L + l2)."""
        smallest = self.eigenvalues[-1] * len(self.eigenvalues) * np.finfo(float).eps
        if l2 < 0 or not np.isfinite(l2):
            raise ConfigError(f"l2 must be a number from 0 on, not {l2}")
        if l2 == 0 and self.eigenvalues[0] <= smallest:
            raise ConfigError(
                "with l2 0 the system is singular: examples or features depend on each other",
                hint="take an l2 above 0, or auto",
            )
        inverse: Floats = 1.0 / (self.eigenvalues + l2)
        return inverse

    # -----------------------------------------------------------------------------------------
    # Leave-one-out

    def left_out(self, l2s: Sequence[float], rows: Ints) -> Iterator[Floats]:
        """For each l2 in turn the predictions (n, K) for these examples, each by the solution of
        all others; the whitening stays that of all examples.

        With H = X (X^T X + l2)^-1 X^T and G = (X X^T + l2)^-1, the prediction for example i is
        y_i - (y - H y)_i / (1 - H_ii), which is y_i - (G y)_i / G_ii.
        """
        turned = (
            self.whitened(self.features[rows]) @ self.basis if self.primal else self.basis[rows]
        )
        squared = turned * turned
        targets = self._targets(rows)
        for l2 in l2s:
            inverse = self._inverse(l2)
            product, diagonal = (turned * inverse) @ self.target, squared @ inverse
            if self.primal:
                product, diagonal = targets - product, np.maximum(1.0 - diagonal, 1e-12)
            yield targets - product / diagonal[:, None]

    def _targets(self, rows: Ints) -> Floats:
        """Y of these examples, (n, K)."""
        targets = np.full((len(rows), self.num_classes), -1.0)
        targets[np.arange(len(rows)), self.labels[rows]] = 1.0
        return targets

    def left_out_errors(self, l2s: Sequence[float]) -> Floats:
        """For each l2 the mean square of what each example, left out, is predicted wrong by; of
        many examples, some spread evenly over them are left out in turn (`LEFT_OUT`)."""
        most = max(1, min(LEFT_OUT, LEFT_OUT_LOGITS // self.num_classes))
        chosen, chunk = self._spread(most), _rows(self.num_classes)
        squares = np.zeros(len(l2s))
        for start in range(0, len(chosen), chunk):
            rows = chosen[start : start + chunk]
            targets = self._targets(rows)
            for i, predicted in enumerate(self.left_out(l2s, rows)):
                predicted -= targets
                squares[i] += np.vdot(predicted, predicted)
        return squares / (len(chosen) * self.num_classes)

    def best_l2(self, candidates: Sequence[float]) -> float:
        """The candidate with the least left-out error. (Wrong answers are not counted: of some
        tens of examples they say too little to choose by.)"""
        return candidates[int(self.left_out_errors(candidates).argmin())]

    def sharpness(self, l2: float) -> float:
        """The factor of the logits at which the softmax of left-out predictions fits the labels
        best (the least cross-entropy), within [1/16, 1024].

        Least squares puts logits near -1 and 1, whose softmax says little.
        """
        rows = self._spread(min(LEFT_OUT, _rows(self.num_classes)))
        (predicted,) = self.left_out([l2], rows)
        labels = self.labels[rows]
        if not (predicted.argmax(axis=1) == labels).any():
            return 1.0  # one example of each class: nothing to learn from
        # Logits less those of the labels: cross-entropy log sum exp(s z) is convex in the factor s.
        # As if one example more were of any class, lest a few that are all right mean certainty.
        z = predicted - predicted[np.arange(len(rows)), labels][:, None]
        any_class = z.mean() / (len(rows) + 1)
        low, high = -4.0, 10.0
        for _ in range(20):
            middle = (low + high) / 2
            shares = np.exp(2**middle * (z - z.max(axis=1, keepdims=True)))
            shares /= shares.sum(axis=1, keepdims=True)
            slope = (shares * z).sum(axis=1).mean() - any_class
            low, high = (low, middle) if slope > 0 else (middle, high)
        return float(2**middle)

    def _spread(self, most: int) -> Ints:
        """Indices of `most` examples, evenly spaced; all, where there are no more."""
        taken = min(len(self.labels), most)
        return np.arange(taken, dtype=np.int64) * len(self.labels) // taken


def _times_targets(sums: Floats) -> Floats:
    """A^T Y, (columns, K), from the sums of A's rows by class, (K, columns)."""
    product: Floats = (2 * sums - sums.sum(axis=0)).T
    return product


def _rows(num_classes: int) -> int:
    """How many predictions are made at once."""
    return max(1, min(CHUNK, LOGITS // num_classes))
