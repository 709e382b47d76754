"""The few-shot solver compared with scikit-learn's `Ridge`, with the peers installed.

    python fewshot_solve.py [COUNT SIZE CLASSES]

25,000 x 768 features of 1,000 classes, with ten l2 values. Both get the same features and targets,
but vit's time includes whitening, while Ridge gets features that are whitened and have the constant
feature. The two alternate, and ratios are taken within a round.
"""

import statistics
import sys
import time

import numpy as np
from sklearn.linear_model import Ridge

from vitcli.evaluation.ridge import RidgeSolver

L2 = [2.0**power for power in range(-8, 20, 3)]
BAR, AGREE, RUNS = 0.1, 0.999, 3


def features(count: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return training features, their labels, and a fifth as many test features: noisy clusters
    whose features have very different scales."""
    rng = np.random.default_rng(0)
    centers = 0.25 * rng.standard_normal((classes, size), np.float32)
    scales = np.exp(rng.standard_normal(size)).astype(np.float32)
    labels = np.sort(np.arange(count) % classes)  # sorted by class, as shots are
    train, test = (
        (centers[drawn] + rng.standard_normal((len(drawn), size), np.float32)) * scales + 3
        for drawn in (labels, rng.integers(0, classes, count // 5))
    )
    return train, labels, test


def main() -> None:
    count, size, classes = map(int, sys.argv[1:] or (25_000, 768, 1_000))
    train, labels, test = features(count, size, classes)
    solver = RidgeSolver(train, labels, classes)
    x, x_test = solver.standardize(train), solver.standardize(test)
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)

    times: list[tuple[float, float]] = []
    for _ in range(RUNS):
        start = time.perf_counter()
        solver = RidgeSolver(train, labels, classes)
        heads = [solver.solve(l2) for l2 in L2]
        middle = time.perf_counter()
        fits = [Ridge(alpha=l2, fit_intercept=False).fit(x, targets) for l2 in L2]
        times.append((middle - start, time.perf_counter() - middle))
    ratio = statistics.median(ours / theirs for ours, theirs in times)
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    same = [
        float((head.predict(test) == fit.predict(x_test).argmax(axis=1)).mean())
        for head, fit in zip(heads, fits, strict=True)
    ]
    print(f"\nFew-shot solution, {count:,} x {size} features, {classes:,} classes, {len(L2)} l2")
    print(
        f"  vit {ours:.2f} s, {len(L2)} fits of Ridge {theirs:.2f} s ({len(times)} runs, medians)"
    )
    print(f"  {ratio:.3f} of Ridge (at most {BAR}: {'met' if ratio <= BAR else 'MISSED'})")
    print(
        f"  same predictions of {len(test):,} test features, l2 {L2[0]:g} to {L2[-1]:g}:", end=" "
    )
    print(*(f"{share:.2%}" for share in same), sep=", ", end=" ")
    print(f"(at least {AGREE:.1%}: {'met' if min(same) >= AGREE else 'MISSED'})")
    sys.exit(min(same) < AGREE)


if __name__ == "__main__":
    main()
