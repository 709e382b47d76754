"""Few-shot linear classification in closed form, big_vision's protocol (paper, section 4.1).

Frozen features are whitened with the mean and standard deviation of the training subset, a constant
feature is appended, and regularised least squares maps them to targets in {-1, 1}:

    W = argmin |X W - Y|^2 + l2 |W|^2          X: (N, D + 1), Y: (N, K), W: (D + 1, K)
      = Q (L + l2)^-1 Q^T X^T Y                X^T X = Q L Q^T    where N > D
      = X^T Q (L + l2)^-1 Q^T Y                X X^T = Q L Q^T    otherwise

One decomposition, in the smaller of the two sizes, serves every l2. The targets are never formed:
Y = 2 onehot - 1, so that A^T Y is twice the sums of A's rows by class, less the sum of all.
(big_vision/evaluators/fewshot_lsr.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitcli.errors import ConfigError, DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BIAS = 100.0
"""The constant feature. It is regularised like the others, so a large one is a free offset."""
STD_FLOOR = 1e-5
"""Added to the standard deviations that features are divided by."""
SHOTS, SEEDS, DEFAULT_L2 = (1, 5, 10, 25), (0, 1, 2), 2.0**10
"""The protocol's."""
AUTO_L2 = tuple(2.0**power for power in range(-10, 20))
"""What l2 "auto" chooses from: the sweep of the authors' code."""


def choose_shots(labels: Ints, classes: Sequence[str], shots: int, seed: int) -> Ints:
    """Indices of `shots` examples of each class, class by class.

    One generator permutes the examples of all classes in order, so more shots with the same seed
    hold the fewer ones.

    Raises:
        DataError: a class has fewer examples.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label, name in enumerate(classes):
        members = rng.permutation(np.flatnonzero(labels == label))
        if len(members) < shots:
            raise DataError(f"'{name}' has {len(members)} examples, too few for {shots} shots")
        chosen.append(members[:shots])
    return np.concatenate(chosen)


@dataclass(frozen=True)
class LinearHead:
    """Logits of raw features x: x @ weight.T + bias, with whitening and solution in one."""

    weight: Floats
    """(K, D)"""
    bias: Floats
    """(K,)"""

    def predict(self, features: npt.NDArray[np.floating], chunk: int = 4096) -> Ints:
        """The best class of each row of features (N, D)."""
        parts = [
            np.argmax(features[start : start + chunk] @ self.weight.T + self.bias, axis=1)
            for start in range(0, len(features), chunk)
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class RidgeSolver:
    """Regularised least squares on one training subset, for any number of l2.

    Args:
        features: (N, D), finite.
        labels: (N,), in [0, num_classes).

    Raises:
        DataError: a feature is not finite.
    """

    def __init__(self, features: npt.NDArray[np.floating], labels: Ints, num_classes: int) -> None:
        raw = np.asarray(features, np.float64)
        bad = np.flatnonzero(~np.isfinite(raw).all(axis=1))
        if len(bad):
            raise DataError(f"the features of {len(bad)} pictures are not finite numbers")
        self.labels, self.num_classes = labels, num_classes
        self.mean = raw.mean(axis=0)
        self.std = raw.std(axis=0) + STD_FLOOR
        whitened = (raw - self.mean) / self.std
        self.x = np.concatenate([whitened, np.full((len(raw), 1), BIAS)], axis=1)
        self.primal = self.x.shape[0] > self.x.shape[1]
        gram = self.x.T @ self.x if self.primal else self.x @ self.x.T
        eigenvalues, self.basis = np.linalg.eigh(gram)
        self.eigenvalues = np.maximum(eigenvalues, 0.0)
        # Rows in the eigenbasis: (N, D + 1) or, as Q^T of the kernel's, (N, N).
        self.rotated = self.x @ self.basis if self.primal else self.basis
        self.target = self._times_targets(self.rotated)

    def _times_targets(self, rows: Floats) -> Floats:
        """rows^T Y, (columns, K), without Y."""
        order = np.argsort(self.labels, kind="stable")
        sums = np.zeros((self.num_classes, rows.shape[1]))
        present, starts = np.unique(self.labels[order], return_index=True)
        sums[present] = np.add.reduceat(rows[order], starts, axis=0)
        product: Floats = (2 * sums - rows.sum(axis=0)).T
        return product

    def solve(self, l2: float) -> LinearHead:
        """The solution at one l2.

        Raises:
            ConfigError: l2 is negative, or 0 where the system is singular.
        """
        scaled = self.target / self._shrinkage(l2)[:, None]
        weights = self.basis @ scaled if self.primal else self.x.T @ (self.basis @ scaled)
        weight = weights[:-1] / self.std[:, None]
        bias = BIAS * weights[-1] - self.mean @ weight
        return LinearHead(weight.T, bias)

    def left_out_errors(self, l2: float, chunk: int = 4096) -> float:
        """Part of the examples that is wrong where each is predicted without itself.

        A left-out prediction is y - (y - f) / (1 - h) with h the diagonal of the hat matrix; the
        whitening is that of all examples.
        """
        shrunk = self._shrinkage(l2)
        scale = 1.0 / shrunk if self.primal else self.eigenvalues / shrunk
        scaled = self.target * scale[:, None]
        wrong = 0
        for start in range(0, len(self.labels), chunk):
            rows, labels = self.rotated[start : start + chunk], self.labels[start : start + chunk]
            hat = (rows * rows) @ scale
            fitted = rows @ scaled
            targets = np.full_like(fitted, -1.0)
            targets[np.arange(len(labels)), labels] = 1.0
            left_out = targets - (targets - fitted) / np.maximum(1.0 - hat, 1e-12)[:, None]
            wrong += int((left_out.argmax(axis=1) != labels).sum())
        return wrong / len(self.labels)

    def best_l2(self, candidates: Sequence[float] = AUTO_L2) -> float:
        """The candidate with the fewest left-out errors; of equals the largest."""
        return min(candidates, key=lambda l2: (self.left_out_errors(l2), -l2))

    def _shrinkage(self, l2: float) -> Floats:
        smallest = self.eigenvalues[-1] * len(self.eigenvalues) * np.finfo(float).eps
        if l2 < 0 or not np.isfinite(l2):
            raise ConfigError(f"l2 must be a number from 0 on, not {l2}")
        if l2 == 0 and self.eigenvalues[0] <= smallest:
            raise ConfigError(
                "with l2 0 the system is singular: examples or features depend on each other",
                hint="take an l2 above 0, or auto",
            )
        shrunk: Floats = self.eigenvalues + l2
        return shrunk


@dataclass(frozen=True)
class Trial:
    """One training subset: which, the l2 that was used, and the accuracy in [0, 1]."""

    shots: int
    seed: int
    l2: float
    accuracy: float
    head: LinearHead


def run_trials(
    train: tuple[npt.NDArray[np.floating], Ints],
    test: tuple[npt.NDArray[np.floating], Ints],
    classes: Sequence[str],
    shots: Sequence[int],
    seeds: Sequence[int],
    l2: float | Literal["auto"] = DEFAULT_L2,
) -> Iterator[Trial]:
    """The protocol: each number of shots with each seed, tested on all of `test`.

    Args:
        train, test: features (N, D) and labels (N,).
        l2: of all trials; auto: chosen for each by its left-out errors, never on the test part.

    Raises:
        DataError: a class has too few examples.
        ConfigError: the l2 cannot be used.
    """
    for count in shots:
        for seed in seeds:
            chosen = choose_shots(train[1], classes, count, seed)
            solver = RidgeSolver(train[0][chosen], train[1][chosen], len(classes))
            used = solver.best_l2() if l2 == "auto" else l2
            head = solver.solve(used)
            accuracy = float((head.predict(test[0]) == test[1]).mean())
            yield Trial(count, seed, used, accuracy, head)
