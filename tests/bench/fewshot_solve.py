"""Few-shot's solution beside scikit-learn's `Ridge`; run in the peers' Python.

25,000 x 768 features of 1,000 classes, ten l2 values. Both get the same whitened features with the
constant column, and the same targets; ours whitens them within its time, from the raw features, and
theirs are made beforehand. They take turns, and a ratio is taken within each turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np
from sklearn.linear_model import Ridge

from vitcli.ridge import LinearHead, RidgeSolver

L2 = [2.0**power for power in range(-8, 20, 3)]
BAR, AGREE = 0.1, 0.999


def features(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Noisy clusters with features of very different sizes: what is learnt from, its labels, and a
    fifth as much to decide on."""
    rng = np.random.default_rng(0)
    centres = 0.25 * rng.standard_normal((classes, size), np.float32)
    scales = np.exp(rng.standard_normal(size)).astype(np.float32)
    labels = np.sort(np.arange(count) % classes)  # class by class, as shots are drawn
    seen, unseen = (
        (centres[drawn] + rng.standard_normal((len(drawn), size), np.float32)) * scales + 3
        for drawn in (labels, rng.integers(0, classes, count // 5))
    )
    return seen, labels, unseen


def ours(seen: np.ndarray, labels: np.ndarray, classes: int) -> list[LinearHead]:
    solver = RidgeSolver(seen, labels, classes)
    return [solver.solve(l2) for l2 in L2]


def theirs(x: np.ndarray, targets: np.ndarray) -> list[Ridge]:
    return [Ridge(alpha=l2, fit_intercept=False).fit(x, targets) for l2 in L2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", type=int, nargs=3, default=(25_000, 768, 1_000))
    arguments = parser.parse_args()
    count, size, classes = arguments.size
    seen, labels, unseen = features(count, size, classes)
    solver = RidgeSolver(seen, labels, classes)
    x, x_unseen = solver.whitened(seen), solver.whitened(unseen)
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)

    times: list[tuple[float, float]] = []
    for _ in range(arguments.runs):
        start = time.perf_counter()
        heads = ours(seen, labels, classes)
        middle = time.perf_counter()
        fits = theirs(x, targets)
        times.append((middle - start, time.perf_counter() - middle))
    ratio = statistics.median(mine / other for mine, other in times)
    mine, other = (statistics.median(column) for column in zip(*times, strict=True))
    same = [
        float((head.predict(unseen) == fit.predict(x_unseen).argmax(axis=1)).mean())
        for head, fit in zip(heads, fits, strict=True)
    ]
    print(f"\nFew-shot solution, {count:,} x {size} features, {classes:,} classes, {len(L2)} l2")
    print(f"  vit {mine:.2f} s, ten fits of Ridge {other:.2f} s (medians of {len(times)} turns)")
    print(f"  {ratio:.3f} of Ridge; at most {BAR}: {'met' if ratio <= BAR else 'MISSED'}")
    print(
        f"  the same decisions on {len(unseen):,} others, for each l2 from {L2[0]:g} to {L2[-1]:g}:"
    )
    print("  " + ", ".join(f"{part:.2%}" for part in same))
    print(f"  at least {AGREE:.1%}: {'met' if min(same) >= AGREE else 'MISSED'}")
    sys.exit(min(same) < AGREE)


if __name__ == "__main__":
    main()
