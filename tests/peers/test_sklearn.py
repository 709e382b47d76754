"""scikit-learn's Ridge makes the same decisions as our least squares."""

from __future__ import annotations

import numpy as np
import pytest

from vitcli.ridge import RidgeSolver

Ridge = pytest.importorskip("sklearn.linear_model").Ridge
pytestmark = pytest.mark.peers


@pytest.mark.parametrize(("count", "size"), [(2_000, 64), (300, 400)], ids=["tall", "wide"])
def test_ridge_decides_alike(count, size):
    classes, rng = 50, np.random.default_rng(0)
    labels = np.arange(count) % classes
    centres = 0.5 * rng.standard_normal((classes, size), np.float32)
    seen, unseen = (
        centres[drawn] + rng.standard_normal((len(drawn), size), np.float32)
        for drawn in (labels, rng.integers(0, classes, 2_000))
    )
    solver = RidgeSolver(seen, labels, classes)
    x, others = solver.whitened(seen), solver.whitened(unseen)
    targets = np.where(labels[:, None] == np.arange(classes), 1.0, -1.0)
    for l2 in 2.0 ** np.arange(-8, 20, 3):
        fit = Ridge(alpha=l2, fit_intercept=False).fit(x, targets)
        theirs = fit.predict(others)
        head = solver.solve(l2)
        np.testing.assert_allclose(unseen @ head.weight.T + head.bias, theirs, atol=1e-6)
        assert (head.predict(unseen) == theirs.argmax(axis=1)).mean() >= 0.999
