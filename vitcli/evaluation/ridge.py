"""Closed-form ridge regression from features to classes.

Features are standardized with the mean and standard deviation of the training examples, a constant
feature is appended, and a linear map is fitted to targets in {-1, 1}:

    W = argmin |X W - Y|^2 + l2 |W|^2          X: (N, D + 1), Y: (N, K), W: (D + 1, K)
      = Q (L + l2)^-1 Q^T X^T Y                X^T X = Q L Q^T    if N > D
      = X^T Q (L + l2)^-1 Q^T Y                X X^T = Q L Q^T    otherwise

One eigendecomposition, of the smaller of the two matrices, serves every l2. For large N neither X
nor Y is materialized: X is processed in chunks, and since Y = 2 onehot - 1, A^T Y is twice the sums
of A's rows by class, minus the sum of all rows. Besides the features, only a few matrices of (D, K)
and (D, D) are in memory. (big_vision/evaluators/fewshot_lsr.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitcli.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BIAS = 100.0
"""The constant feature. It is regularized too, so a large value makes the offset almost free."""
STD_FLOOR = 1e-5
"""Added to the standard deviations, to avoid division by zero."""
CHUNK = 1024
"""Maximum number of examples per chunk."""
LOGITS = 1 << 23
"""Maximum number of logits per chunk: 64 MB."""
LOO_EXAMPLES, LOO_LOGITS = 10_000, 1 << 24
"""Maximum number of examples, and of their logits, for leave-one-out."""


@dataclass(frozen=True)
class LinearHead:
    """Logits of raw features x: x @ weight.T + bias, with the standardization folded in."""

    weight: Floats
    """(K, D)"""
    bias: Floats
    """(K,)"""

    def predict(self, features: npt.NDArray[np.floating]) -> Ints:
        """Return the top class for each row of features (N, D)."""
        best = np.empty(len(features), np.int64)
        for rows in _chunks(len(features), len(self.bias)):
            best[rows] = np.argmax(features[rows] @ self.weight.T + self.bias, axis=1)
        return best

    def scaled(self, factor: float) -> LinearHead:
        """Return the head with its logits multiplied by `factor`."""
        return LinearHead(factor * self.weight, factor * self.bias)


class RidgeSolver:
    """Ridge regression on one training set, for any number of l2 values.

    Args:
        features: (N, D), finite; not copied.
        labels: (N,), in [0, num_classes).
    """

    def __init__(self, features: npt.NDArray[np.floating], labels: Ints, num_classes: int) -> None:
        self.features, self.labels, self.num_classes = features, labels, num_classes
        count, dim = features.shape
        self.mean = features.mean(axis=0, dtype=np.float64)
        chunks = _chunks(count)
        squares = sum(((features[rows] - self.mean) ** 2).sum(axis=0) for rows in chunks)
        self.std = np.sqrt(squares / count) + STD_FLOOR
        self.primal = count > dim
        if self.primal:
            gram, sums = np.zeros((dim + 1, dim + 1)), np.zeros((num_classes, dim + 1))
            for rows in chunks:
                x = self.standardize(features[rows])
                gram += x.T @ x
                _add_by_class(sums, x, labels[rows])
            eigenvalues, self.basis = np.linalg.eigh(gram)
            self.left_factor = self.basis  # (D + 1, D + 1)
            self.target = self.basis.T @ _times_targets(sums)
        else:
            x, sums = self.standardize(features), np.zeros((num_classes, count))
            eigenvalues, self.basis = np.linalg.eigh(x @ x.T)
            self.left_factor = x.T @ self.basis  # (D + 1, N)
            _add_by_class(sums, self.basis, labels)
            self.target = _times_targets(sums)
        self.eigenvalues = np.maximum(eigenvalues, 0.0)

    def standardize(self, features: npt.NDArray[np.floating]) -> Floats:
        """Standardize features (n, D) to rows of X, (n, D + 1)."""
        x = np.full((len(features), len(self.mean) + 1), BIAS)
        np.subtract(features, self.mean, out=x[:, :-1])
        x[:, :-1] /= self.std
        return x

    def solve(self, l2: float) -> LinearHead:
        """Solve for one l2.

        Raises:
            ConfigError: l2 is 0 and the system is singular.
        """
        weights = self.left_factor @ (self.target * self._inverse(l2)[:, None])
        weight = weights[:-1] / self.std[:, None]
        bias = BIAS * weights[-1] - self.mean @ weight
        return LinearHead(weight.T, bias)

    def _inverse(self, l2: float) -> Floats:
        """1 / (L + l2)."""
        tolerance = self.eigenvalues[-1] * len(self.eigenvalues) * np.finfo(float).eps
        if l2 == 0 and self.eigenvalues[0] <= tolerance:
            raise ConfigError(
                "the system is singular at l2 0: images or features are linearly dependent",
                hint="choose an l2 above 0, or auto",
            )
        inverse: Floats = 1.0 / (self.eigenvalues + l2)
        return inverse

    # -----------------------------------------------------------------------------------------
    # Leave-one-out

    def leave_one_out(self, l2s: Sequence[float], rows: Ints) -> Iterator[Floats]:
        """Yield leave-one-out predictions (n, K) for the examples `rows`, for each l2. The
        standardization is that of all examples.

        With H = X (X^T X + l2)^-1 X^T and G = (X X^T + l2)^-1, the prediction for example i is
        y_i - (y - H y)_i / (1 - H_ii), which is y_i - (G y)_i / G_ii.
        """
        x = self.standardize(self.features[rows])
        projected = x @ self.basis if self.primal else self.basis[rows]
        squares, targets = projected * projected, self._targets(rows)
        for l2 in l2s:
            inverse = self._inverse(l2)
            product, diagonal = (projected * inverse) @ self.target, squares @ inverse
            if self.primal:
                product, diagonal = targets - product, np.maximum(1.0 - diagonal, 1e-12)
            yield targets - product / diagonal[:, None]

    def leave_one_out_errors(self, l2s: Sequence[float]) -> Floats:
        """Return the leave-one-out mean squared error for each l2."""
        rows, squares = self._subsample(LOO_LOGITS), np.zeros(len(l2s))
        for chunk in _chunks(len(rows), self.num_classes):
            targets = self._targets(rows[chunk])
            for i, predicted in enumerate(self.leave_one_out(l2s, rows[chunk])):
                squares[i] += np.square(predicted - targets).sum()
        return squares / (len(rows) * self.num_classes)

    def best_l2(self, candidates: Sequence[float]) -> float:
        """Return the candidate with the lowest leave-one-out error. (Accuracy on a few dozen
        examples is too coarse a criterion.)"""
        return candidates[int(self.leave_one_out_errors(candidates).argmin())]

    def logit_scale(self, l2: float) -> float:
        """Return the factor for the logits, from 1/16 to 1024 (an inverse temperature), that
        minimizes the leave-one-out cross-entropy. Least squares yields logits near -1 and 1, whose
        softmax is almost uniform."""
        rows = self._subsample(LOGITS)
        (predicted,) = self.leave_one_out([l2], rows)
        labels = self.labels[rows]
        if not (predicted.argmax(axis=1) == labels).any():
            return 1.0  # as with one example per class: nothing to calibrate on
        # With logits z relative to the label's, the cross-entropy log sum exp(s z) is convex in s.
        # One more example, of any class, keeps a few correct predictions from implying certainty.
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

    def _targets(self, rows: Ints) -> Floats:
        """Return Y for the examples `rows`, (n, K)."""
        targets = np.full((len(rows), self.num_classes), -1.0)
        targets[np.arange(len(rows)), self.labels[rows]] = 1.0
        return targets

    def _subsample(self, logits: int) -> Ints:
        """Return the indices of all examples or, if there are many, of an evenly spaced subset."""
        count = max(1, min(len(self.labels), LOO_EXAMPLES, logits // self.num_classes))
        return np.arange(count, dtype=np.int64) * len(self.labels) // count


def _add_by_class(sums: Floats, rows: Floats, labels: Ints) -> None:
    """Add rows (n, columns) to the row of their class in sums (K, columns)."""
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    sums[present] += np.add.reduceat(rows[order], starts, axis=0)


def _times_targets(sums: Floats) -> Floats:
    """Return A^T Y, (columns, K), from the sums of A's rows by class, (K, columns)."""
    product: Floats = (2 * sums - sums.sum(axis=0)).T
    return product


def _chunks(count: int, num_classes: int = 1) -> list[slice]:
    """Split examples into chunks within the limits on examples and logits."""
    size = max(1, min(CHUNK, LOGITS // num_classes))
    return [slice(start, start + size) for start in range(0, count, size)]
