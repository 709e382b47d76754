"""Tables that grow row by row, read back by numpy and by safetensors' own reader."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from vitcli.checkpoints.rows import row_file
from vitcli.errors import OutputError


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_rows_are_read_back(tmp_path, count, kind):
    values = np.random.default_rng(0).normal(size=(count, 7)).astype(np.float32)
    path = tmp_path / f"rows.{kind}"
    with row_file(path, 7, {"model": "ünï", "note": ""}) as rows:
        for row in values:
            rows.add(row)
    if kind == "npy":
        found = np.load(path)
    else:
        with safe_open(path, "np") as opened:
            found = opened.get_tensor("features")
            assert opened.metadata() == {"model": "ünï", "note": ""}
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)


def test_none_is_a_row_of_nan(tmp_path):
    with row_file(tmp_path / "rows.npy", 3, {}) as rows:
        rows.add(None)
        rows.add(np.arange(3, dtype=np.float64))
    found = np.load(tmp_path / "rows.npy")
    assert np.isnan(found[0]).all() and found[1].tolist() == [0, 1, 2]


def test_an_error_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), row_file(tmp_path / "rows.npy", 3, {}) as rows:
        rows.add(None)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(OutputError, match=r"\.npy or \.safetensors"):
        row_file(tmp_path / "rows.csv", 3, {}).__enter__()
