"""Tables that grow row by row, read back by numpy and by safetensors' own reader."""

import numpy as np
import pytest
from safetensors import safe_open

from vitcli.checkpoints.rows import row_file


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_rows_are_read_back(tmp_path, count, kind):
    values = np.random.default_rng(0).normal(size=(count, 7)).astype(np.float32)
    path = tmp_path / f"rows.{kind}"
    with row_file(path, 7, {"model": "ünï", "note": ""}) as add:
        for row in values:
            add(row)
    if kind == "npy":
        found = np.load(path)
    else:
        with safe_open(path, "np") as opened:
            found = opened.get_tensor("features")
            assert opened.metadata() == {"model": "ünï", "note": ""}
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
