"""Ridge regression against plain algebra. (Against big_vision's: tests/test_golden.py.)"""

import numpy as np
import pytest

from checkpoints.golden_cases import GOLDEN
from vitcli.errors import ConfigError
from vitcli.evaluation import ridge
from vitcli.evaluation.fewshot import sample_shots
from vitcli.evaluation.ridge import RidgeSolver

ARRAYS = np.load(GOLDEN / "fewshot_lsr" / "fewshot.npz")
X, Y = ARRAYS["x_train"], ARRAYS["y_train"].astype(np.int64)
FEW_AND_MANY = pytest.mark.parametrize("shots", [3, 12], ids=["fewer examples than D", "more"])


def make_solver(seed: int, shots: int) -> tuple[np.ndarray, RidgeSolver]:
    chosen = sample_shots(Y, 10, shots, seed)
    return chosen, RidgeSolver(X[chosen], Y[chosen], 10)


def whitened(solver: RidgeSolver) -> tuple[np.ndarray, np.ndarray]:
    """Whitened features and targets of all examples, in order."""
    targets = np.where(solver.labels[:, None] == np.arange(solver.num_classes), 1.0, -1.0)
    return solver.standardize(solver.features), targets


def normal_equations(x: np.ndarray, targets: np.ndarray, l2: float) -> np.ndarray:
    return np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)


@FEW_AND_MANY
def test_solution_matches_normal_equations(shots):
    chosen, solver = make_solver(0, shots)
    x, targets = whitened(solver)
    for l2 in (0.5, 300.0):
        head = solver.solve(l2)
        expected = x @ normal_equations(x, targets, l2)
        assert np.allclose(X[chosen] @ head.weight.T + head.bias, expected, atol=1e-6)


def test_zero_l2_is_least_squares_if_unique():
    _, solver = make_solver(0, 20)
    expected = np.linalg.lstsq(*whitened(solver), rcond=None)[0]
    weights = solver.solve(0.0).weight.T * solver.std[:, None]
    assert np.allclose(weights, expected[:-1], atol=1e-8)
    twice, constant = np.concatenate([X[:20], X[:20]]), X.copy()
    constant[:, 5] = 3.0
    for features, labels in ((twice, np.concatenate([Y[:20], Y[:20]])), (constant, Y)):
        with pytest.raises(ConfigError):
            RidgeSolver(features, labels, 10).solve(0.0)


def test_chunking_does_not_change_results(monkeypatch):
    chosen, whole = make_solver(1, 20)
    monkeypatch.setattr(ridge, "CHUNK", 37)  # classes straddle chunks
    monkeypatch.setattr(ridge, "LOGITS", 70)  # seven predictions at a time
    shuffled = np.random.default_rng(0).permutation(chosen)
    chunked = RidgeSolver(X[shuffled], Y[shuffled], 10)
    head = whole.solve(10.0)
    assert np.allclose(chunked.solve(10.0).weight, head.weight, atol=1e-9)
    assert np.array_equal(head.predict(X), (X @ head.weight.T + head.bias).argmax(1))
    errors = whole.leave_one_out_errors([1.0, 99.0])
    np.testing.assert_allclose(chunked.leave_one_out_errors([1.0, 99.0]), errors)


@FEW_AND_MANY
def test_leave_one_out_matches_refitting(shots):
    _, solver = make_solver(0, shots)
    x, targets = whitened(solver)
    l2s = [1e-3, 1.0, 40.0, 1e5]
    rows = np.arange(0, len(x), 5)
    for l2, found in zip(l2s, solver.leave_one_out(l2s, rows), strict=True):
        for i, row in zip(rows, found, strict=True):
            rest = np.arange(len(x)) != i
            expected = x[i] @ normal_equations(x[rest], targets[rest], l2)
            # The normal equations of few examples are nearly singular if l2 is small.
            np.testing.assert_allclose(row, expected, atol=1e-4 if l2 < 1 else 1e-7)


def test_best_l2_minimizes_leave_one_out_error(monkeypatch):
    _, solver = make_solver(0, 20)
    candidates = [1e-3, 1.0, 32.0, 1024.0, 1e7]
    targets = whitened(solver)[1]

    def errors(rows: np.ndarray) -> list[float]:
        return [np.square(p - targets[rows]).mean() for p in solver.leave_one_out(candidates, rows)]

    expected = errors(np.arange(200))
    np.testing.assert_allclose(solver.leave_one_out_errors(candidates), expected)
    assert solver.best_l2(candidates) == candidates[int(np.argmin(expected))]
    for name, limit in (("LOO_EXAMPLES", 50), ("LOO_LOGITS", 50 * 10)):  # a subset of many rows
        with monkeypatch.context() as patch:
            patch.setattr(ridge, name, limit)
            np.testing.assert_allclose(
                solver.leave_one_out_errors(candidates), errors(np.arange(0, 200, 4))
            )


def test_sharpness_minimizes_leave_one_out_cross_entropy():
    _, solver = make_solver(0, 15)
    l2 = 100.0
    (left_out,) = solver.leave_one_out([l2], np.arange(150))
    smooth = np.full((150, 10), 1 / 1510)  # as if one more example had all classes
    smooth[np.arange(150), solver.labels] += 1 - 10 / 1510

    def cross_entropy(factor):
        logits = factor * left_out
        return -(smooth * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()

    factors = 2.0 ** np.arange(-4, 10, 0.01)
    best = factors[np.argmin([cross_entropy(factor) for factor in factors])]
    assert solver.logit_scale(l2) == pytest.approx(best, rel=0.02)
    _, solver = make_solver(0, 1)  # one example per class is not enough
    assert solver.logit_scale(1024.0) == 1.0
