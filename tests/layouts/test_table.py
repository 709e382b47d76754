"""Merging tensors of several types."""

import numpy as np

from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype
from vitcli.layouts import table
from vitcli.layouts.table import Op, Row


def test_merged_tensors_get_a_common_dtype() -> None:
    def tensor(dtype: str) -> LazyTensor:
        array = np.full((2, 3), 1 / 3, numpy_dtype(dtype))
        return LazyTensor(dtype, array.shape, lambda: array)

    row = Row(("qkv",), ("q", "k", "v"), Op())
    for types, common in (
        (("float16", "bfloat16", "float16"), "float32"),
        (("float64", "float32", "bfloat16"), "float64"),
        (("bfloat16", "bfloat16", "bfloat16"), "bfloat16"),
    ):
        theirs = {name: tensor(dtype) for name, dtype in zip(row.theirs, types, strict=True)}
        ((_, ours),) = table.load(row, {"qkv": (6, 3)}, theirs)
        expected = np.concatenate([t.read().astype(np.float64) for t in theirs.values()])
        assert ours.dtype == common == ours.read().dtype.name
        assert np.array_equal(ours.read().astype(np.float64), expected)
