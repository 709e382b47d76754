"""Least squares against big_vision's evaluator (tests/golden/fewshot_lsr) and plain algebra."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from vitcli import ridge
from vitcli.errors import ConfigError
from vitcli.fewshot import choose_shots
from vitcli.ridge import BIAS, LinearHead, RidgeSolver

GOLDEN = Path(__file__).parent / "golden" / "fewshot_lsr"
ARRAYS = dict(np.load(GOLDEN / "fewshot.npz"))
CASES = json.loads((GOLDEN / "accuracies.json").read_text())
X, Y = ARRAYS["x_train"], ARRAYS["y_train"].astype(np.int64)


def solved(seed: int, shots: int) -> tuple[np.ndarray, RidgeSolver]:
    chosen = choose_shots(Y, 10, shots, seed)
    return chosen, RidgeSolver(X[chosen], Y[chosen], 10)


def whitened(solver: RidgeSolver) -> tuple[np.ndarray, np.ndarray]:
    """X and Y as a whole, in the order of the examples."""
    targets = np.where(solver.labels[:, None] == np.arange(solver.num_classes), 1.0, -1.0)
    return solver.whitened(solver.features), targets


def normal_equations(x: np.ndarray, targets: np.ndarray, l2: float) -> np.ndarray:
    return np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"l2={c['l2']:g},{c['seed']},{c['shots']}")
def test_accuracies_are_the_originals(case):
    chosen, solver = solved(case["seed"], case["shots"])
    assert np.array_equal(chosen, ARRAYS[f"idx_seed{case['seed']}_shots{case['shots']}"])
    right = solver.solve(case["l2"]).predict(ARRAYS["x_test"]) == ARRAYS["y_test"]
    assert right.mean() == pytest.approx(case["accuracy_float64"], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name.endswith("_weights")])
def test_weights_are_the_originals(name):
    l2, seed, shots = (int("".join(filter(str.isdigit, part))) for part in name.split("_")[1:4])
    _, solver = solved(seed, shots)
    head = solver.solve(l2)
    expected = ARRAYS[name].astype(np.float64)  # (65, 10), for whitened features and the constant
    weight = expected[:-1] / solver.std[:, None]
    bias = BIAS * expected[-1] - solver.mean @ weight
    assert np.allclose(head.weight.T, weight, atol=1e-5 * np.abs(weight).max())
    assert np.allclose(head.bias, bias, atol=1e-4 * np.abs(bias).max())


@pytest.mark.parametrize("shots", [2, 20], ids=["fewer examples than features", "more"])
@pytest.mark.parametrize("l2", [0.5, 300.0])
def test_the_solution_is_that_of_the_normal_equations(shots, l2):
    chosen, solver = solved(0, shots)
    x, targets = whitened(solver)
    head = solver.solve(l2)
    expected = x @ normal_equations(x, targets, l2)
    assert np.allclose(X[chosen] @ head.weight.T + head.bias, expected, atol=1e-6)


def test_chunks_change_nothing(monkeypatch):
    chosen, whole = solved(1, 20)
    monkeypatch.setattr(ridge, "CHUNK", 37)  # classes straddle chunks
    monkeypatch.setattr(ridge, "LOGITS", 70)  # seven predictions at a time
    shuffled = np.random.default_rng(0).permutation(chosen)
    parts = RidgeSolver(X[shuffled], Y[shuffled], 10)
    assert np.allclose(parts.solve(10.0).weight, whole.solve(10.0).weight, atol=1e-9)
    head = whole.solve(10.0)
    assert np.array_equal(head.predict(X), (X @ head.weight.T + head.bias).argmax(1))
    np.testing.assert_allclose(
        parts.left_out_errors([1.0, 99.0]), whole.left_out_errors([1.0, 99.0])
    )


@pytest.mark.parametrize("shots", [3, 12], ids=["fewer examples than features", "more"])
def test_left_out_predictions_are_those_of_leaving_out(shots):
    _, solver = solved(0, shots)
    x, targets = whitened(solver)
    l2s = [1e-3, 1.0, 40.0, 1e5]
    rows = np.arange(0, len(x), 5)
    for l2, found in zip(l2s, solver.left_out(l2s, rows), strict=True):
        for i, row in zip(rows, found, strict=True):
            rest = np.arange(len(x)) != i
            expected = x[i] @ normal_equations(x[rest], targets[rest], l2)
            # Where a system of few examples is nearly singular, so are the normal equations.
            np.testing.assert_allclose(row, expected, atol=1e-4 if l2 < 1 else 1e-7)


def test_the_best_l2_has_the_least_left_out_error():
    _, solver = solved(0, 12)
    candidates = [1e-3, 1.0, 32.0, 1024.0, 1e7]
    targets, everyone = whitened(solver)[1], np.arange(len(solver.labels))
    expected = [np.square(p - targets).mean() for p in solver.left_out(candidates, everyone)]
    np.testing.assert_allclose(solver.left_out_errors(candidates), expected)
    assert solver.best_l2(candidates) == candidates[int(np.argmin(expected))]


def test_one_example_of_each_class_says_nothing_of_certainty():
    _, solver = solved(0, 1)
    assert solver.sharpness(1024.0) == 1.0


def test_of_many_examples_some_are_left_out(monkeypatch):
    _, solver = solved(0, 20)
    monkeypatch.setattr(ridge, "LEFT_OUT", 50)
    (found,) = solver.left_out([3.0], np.arange(0, 200, 4))
    square = np.square(found - whitened(solver)[1][::4]).mean()
    np.testing.assert_allclose(solver.left_out_errors([3.0]), [square])
    monkeypatch.setattr(ridge, "LEFT_OUT", 10_000)
    monkeypatch.setattr(ridge, "LEFT_OUT_LOGITS", 50 * solver.num_classes)
    np.testing.assert_allclose(solver.left_out_errors([3.0]), [square])


def test_sharpness_is_where_the_cross_entropy_of_left_out_predictions_is_least():
    _, solver = solved(0, 15)
    l2 = 100.0
    (left_out,) = solver.left_out([l2], np.arange(150))
    smooth = np.full((150, 10), 1 / 1510)  # one example more, of any class
    smooth[np.arange(150), solver.labels] += 1 - 10 / 1510

    def cross_entropy(factor):
        logits = factor * left_out
        return -(smooth * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))).sum(1).mean()

    factors = 2.0 ** np.arange(-4, 10, 0.01)
    best = factors[np.argmin([cross_entropy(factor) for factor in factors])]
    assert solver.sharpness(l2) == pytest.approx(best, rel=0.02)
    head = solver.solve(l2)
    assert np.array_equal(head.scaled(best).predict(X), head.predict(X))


def test_a_singular_system_needs_an_l2():
    twice, still = np.concatenate([X[:20], X[:20]]), X.copy()
    still[:, 5] = 3.0  # a feature that never changes
    for features, labels in ((twice, np.concatenate([Y[:20], Y[:20]])), (still, Y)):
        with pytest.raises(ConfigError):
            RidgeSolver(features, labels, 10).solve(0.0)


def test_l2_0_is_least_squares_where_there_is_one_solution():
    _, solver = solved(0, 20)
    x, targets = whitened(solver)
    head = solver.solve(0.0)
    expected = np.linalg.lstsq(x, targets, rcond=None)[0]
    weights = np.concatenate([head.weight.T * solver.std[:, None]])
    assert np.allclose(weights, expected[:-1], atol=1e-8)


def traced(count: int, size: int, classes: int) -> tuple[int, LinearHead]:
    """Bytes at the peak of a solution and its predictions, beside the features."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((count, size), np.float32)
    labels = np.arange(count) % classes
    tracemalloc.start()
    try:
        solver = RidgeSolver(features, labels, classes)
        head = solver.solve(solver.best_l2([1.0, 1024.0]))
        head.predict(features)
        return tracemalloc.get_traced_memory()[1], head
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_examples(monkeypatch):
    monkeypatch.setattr(ridge, "CHUNK", 256)
    monkeypatch.setattr(ridge, "LOGITS", 1 << 16)
    monkeypatch.setattr(ridge, "LEFT_OUT", 500)
    few, _ = traced(4_000, 32, 100)
    many, _ = traced(40_000, 32, 100)
    # What is left are predictions, 8 bytes an example; one hot targets would take 800.
    assert many - few < 36_000 * 20


@pytest.mark.slow
def test_21k_classes_take_a_few_matrices(monkeypatch):
    """ImageNet-21k's classes, three shots, in a sixth of the width of a B/16: targets alone would
    take 21,843 x 65,529 x 8 bytes = 11 GB."""
    monkeypatch.setattr(ridge, "LEFT_OUT", 500)
    classes, size = 21_843, 128
    peak, head = traced(3 * classes, size, classes)
    assert head.weight.shape == (classes, size)
    matrices = peak / (8 * classes * (size + 1))
    assert matrices < 24, f"{peak / 1e6:.0f} MB, {matrices:.1f} matrices of classes x features"
