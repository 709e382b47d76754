"""Least squares against plain algebra. (Against big_vision's evaluator: tests/test_golden.py.)"""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from vitcli import ridge
from vitcli.errors import ConfigError
from vitcli.fewshot import choose_shots
from vitcli.ridge import RidgeSolver

ARRAYS = np.load(Path(__file__).parent / "golden" / "fewshot_lsr" / "fewshot.npz")
X, Y = ARRAYS["x_train"], ARRAYS["y_train"].astype(np.int64)
FEW_AND_MANY = pytest.mark.parametrize("shots", [3, 12], ids=["fewer examples than D", "more"])


def solved(seed: int, shots: int) -> tuple[np.ndarray, RidgeSolver]:
    chosen = choose_shots(Y, 10, shots, seed)
    return chosen, RidgeSolver(X[chosen], Y[chosen], 10)


def whitened(solver: RidgeSolver) -> tuple[np.ndarray, np.ndarray]:
    """X and Y as a whole, in the order of the examples."""
    targets = np.where(solver.labels[:, None] == np.arange(solver.num_classes), 1.0, -1.0)
    return solver.whitened(solver.features), targets


def normal_equations(x: np.ndarray, targets: np.ndarray, l2: float) -> np.ndarray:
    return np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)


@FEW_AND_MANY
def test_the_solution_is_that_of_the_normal_equations(shots):
    chosen, solver = solved(0, shots)
    x, targets = whitened(solver)
    for l2 in (0.5, 300.0):
        head = solver.solve(l2)
        expected = x @ normal_equations(x, targets, l2)
        assert np.allclose(X[chosen] @ head.weight.T + head.bias, expected, atol=1e-6)


def test_l2_0_is_least_squares_if_there_is_one_solution():
    _, solver = solved(0, 20)
    expected = np.linalg.lstsq(*whitened(solver), rcond=None)[0]
    weights = solver.solve(0.0).weight.T * solver.std[:, None]
    assert np.allclose(weights, expected[:-1], atol=1e-8)
    twice, constant = np.concatenate([X[:20], X[:20]]), X.copy()
    constant[:, 5] = 3.0
    for features, labels in ((twice, np.concatenate([Y[:20], Y[:20]])), (constant, Y)):
        with pytest.raises(ConfigError):
            RidgeSolver(features, labels, 10).solve(0.0)


def test_chunks_change_nothing(monkeypatch):
    chosen, whole = solved(1, 20)
    monkeypatch.setattr(ridge, "CHUNK", 37)  # classes straddle chunks
    monkeypatch.setattr(ridge, "LOGITS", 70)  # seven predictions at a time
    shuffled = np.random.default_rng(0).permutation(chosen)
    chunked = RidgeSolver(X[shuffled], Y[shuffled], 10)
    head = whole.solve(10.0)
    assert np.allclose(chunked.solve(10.0).weight, head.weight, atol=1e-9)
    assert np.array_equal(head.predict(X), (X @ head.weight.T + head.bias).argmax(1))
    errors = whole.left_out_errors([1.0, 99.0])
    np.testing.assert_allclose(chunked.left_out_errors([1.0, 99.0]), errors)


@FEW_AND_MANY
def test_left_out_predictions_are_those_of_solutions_without_the_example(shots):
    _, solver = solved(0, shots)
    x, targets = whitened(solver)
    l2s = [1e-3, 1.0, 40.0, 1e5]
    rows = np.arange(0, len(x), 5)
    for l2, found in zip(l2s, solver.left_out(l2s, rows), strict=True):
        for i, row in zip(rows, found, strict=True):
            rest = np.arange(len(x)) != i
            expected = x[i] @ normal_equations(x[rest], targets[rest], l2)
            # If a system of few examples is nearly singular, so are the normal equations.
            np.testing.assert_allclose(row, expected, atol=1e-4 if l2 < 1 else 1e-7)


def test_the_best_l2_has_the_least_left_out_error(monkeypatch):
    _, solver = solved(0, 20)
    candidates = [1e-3, 1.0, 32.0, 1024.0, 1e7]
    targets = whitened(solver)[1]

    def errors(rows: np.ndarray) -> list[float]:
        return [np.square(p - targets[rows]).mean() for p in solver.left_out(candidates, rows)]

    expected = errors(np.arange(200))
    np.testing.assert_allclose(solver.left_out_errors(candidates), expected)
    assert solver.best_l2(candidates) == candidates[int(np.argmin(expected))]
    for name, most in (("LEFT_OUT", 50), ("LEFT_OUT_LOGITS", 50 * 10)):  # of many, some
        with monkeypatch.context() as patch:
            patch.setattr(ridge, name, most)
            np.testing.assert_allclose(
                solver.left_out_errors(candidates), errors(np.arange(0, 200, 4))
            )


def test_sharpness_has_the_least_cross_entropy_of_left_out_predictions():
    _, solver = solved(0, 15)
    l2 = 100.0
    (left_out,) = solver.left_out([l2], np.arange(150))
    smooth = np.full((150, 10), 1 / 1510)  # one more example, of any class
    smooth[np.arange(150), solver.labels] += 1 - 10 / 1510

    def cross_entropy(factor):
        logits = factor * left_out
        return -(smooth * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()

    factors = 2.0 ** np.arange(-4, 10, 0.01)
    best = factors[np.argmin([cross_entropy(factor) for factor in factors])]
    assert solver.sharpness(l2) == pytest.approx(best, rel=0.02)
    _, solver = solved(0, 1)  # one example per class says nothing
    assert solver.sharpness(1024.0) == 1.0


def traced(count: int, size: int, classes: int) -> int:
    """Bytes at the peak of a solution and its predictions, beside the features."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((count, size), np.float32)
    labels = np.arange(count) % classes
    tracemalloc.start()
    try:
        solver = RidgeSolver(features, labels, classes)
        solver.solve(solver.best_l2([1.0, 1024.0])).predict(features)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_examples(monkeypatch):
    monkeypatch.setattr(ridge, "CHUNK", 256)
    monkeypatch.setattr(ridge, "LOGITS", 1 << 16)
    monkeypatch.setattr(ridge, "LEFT_OUT", 500)
    few = traced(4_000, 32, 100)
    many = traced(40_000, 32, 100)
    # Predictions are left, 8 bytes an example; one-hot targets would take 800.
    assert many - few < 36_000 * 20
