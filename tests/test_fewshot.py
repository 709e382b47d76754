"""Few-shot against big_vision's evaluator (tests/golden/fewshot_lsr) and scikit-free algebra."""

import json
from pathlib import Path

import numpy as np
import pytest

from vitcli.errors import ConfigError, DataError
from vitcli.fewshot import BIAS, RidgeSolver, choose_shots

GOLDEN = Path(__file__).parent / "golden" / "fewshot_lsr"
ARRAYS = dict(np.load(GOLDEN / "fewshot.npz"))
CASES = json.loads((GOLDEN / "accuracies.json").read_text())
NAMES = "0123456789"
X, Y = ARRAYS["x_train"], ARRAYS["y_train"].astype(np.int64)


def solved(seed: int, shots: int) -> tuple[np.ndarray, RidgeSolver]:
    chosen = choose_shots(Y, NAMES, shots, seed)
    return chosen, RidgeSolver(X[chosen], Y[chosen], 10)


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
    _, solver = solved(0, shots)
    targets = np.where(solver.labels[:, None] == np.arange(10), 1.0, -1.0)
    x = solver.x
    expected = np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ targets)
    head = solver.solve(l2)
    raw = X[choose_shots(Y, NAMES, shots, 0)]
    assert np.allclose(raw @ head.weight.T + head.bias, x @ expected, atol=1e-6)


@pytest.mark.parametrize("shots", [3, 12])
def test_left_out_errors_are_those_of_leaving_out(shots):
    _, solver = solved(0, shots)
    x, labels, l2 = solver.x, solver.labels, 40.0
    targets = np.where(labels[:, None] == np.arange(10), 1.0, -1.0)
    wrong = 0
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        gram = x[rest].T @ x[rest] + l2 * np.eye(x.shape[1])
        weights = np.linalg.solve(gram, x[rest].T @ targets[rest])
        wrong += (x[i] @ weights).argmax() != labels[i]
    assert solver.left_out_errors(l2) == pytest.approx(wrong / len(x))


def test_shots_are_nested():
    fewer, more = choose_shots(Y, NAMES, 5, 1), choose_shots(Y, NAMES, 10, 1)
    assert set(fewer) < set(more)


def test_what_cannot_be_solved():
    with pytest.raises(DataError, match="'0' has 20 examples, too few for 21 shots"):
        choose_shots(Y, NAMES, 21, 0)
    twice = np.concatenate([X[:20], X[:20]])
    solver = RidgeSolver(twice, np.concatenate([Y[:20], Y[:20]]), 10)
    with pytest.raises(ConfigError, match="with l2 0 the system is singular"):
        solver.solve(0.0)
    with pytest.raises(ConfigError, match="from 0 on"):
        solver.solve(-1.0)
    broken = X[:20].copy()
    broken[3, 4] = np.nan
    with pytest.raises(DataError, match="features of 1 pictures are not finite"):
        RidgeSolver(broken, Y[:20], 10)
