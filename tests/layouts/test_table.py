"""Conversions of tensors between layouts, on random shapes."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype
from vitcli.layouts import table
from vitcli.layouts.table import Op, Row

OPS = [op for op in vars(table).values() if isinstance(op, Op)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(OPS),
    sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    heads=st.integers(1, 3),
    flat=st.booleans(),
)
def test_load_inverts_save(op: Op, sizes: list[int], heads: int, flat: bool) -> None:
    rank = len(op.order or "") - (op.heads is not None) if op.order else max(op.units, 1) + flat
    shape = sizes[:rank]
    for axis in range(op.units):  # the axes squeezed after the permutation
        shape[op.order[axis] if op.order else axis] = 1
    if op.heads is not None:
        shape[op.heads] *= heads
    array = np.arange(np.prod(shape)).reshape(shape)
    saved = op.save(array, heads)
    assert saved.ndim == len(shape) + (op.heads is not None) - op.units
    assert sorted(saved.ravel()) == sorted(array.ravel())
    assert np.array_equal(op.load(saved), array)


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


def test_choose_takes_the_names_in_the_file() -> None:
    """Or the first ones, to be named in an error."""
    rows = table.rows("blocks.{i}.fc.*  h.{i}.w12.*\nblocks.{i}.fc.*  h.{i}.[w1,w2].*")
    in_file, first = table.choose(rows, ["h.3.w1.weight", "h.3.w2.weight", "w12.bias"])
    assert in_file == Row(("blocks.{i}.fc.weight",), ("h.{i}.w1.weight", "h.{i}.w2.weight"))
    assert first == Row(("blocks.{i}.fc.bias",), ("h.{i}.w12.bias",))
