"""Bytes that are no checkpoint, and changes of layout, drawn at random; see test_campaign.py."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitcli.checkpoints.read import open_checkpoint
from vitcli.errors import VitError
from vitcli.layouts import table
from vitcli.layouts.table import Op

OPS = [op for op in vars(table).values() if isinstance(op, Op)]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.binary(max_size=400))
def test_any_bytes_are_refused_in_words(tmp_path: Path, data: bytes) -> None:
    for name in ("x.safetensors", "x.npz", "x.pth"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(VitError):
            open_checkpoint(tmp_path / name)
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04" + data)
    with pytest.raises(VitError):
        open_checkpoint(tmp_path / "x.npz")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(OPS),
    sizes=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    heads=st.integers(1, 3),
    flat=st.booleans(),
)
def test_every_change_of_layout_is_undone_exactly(
    op: Op, sizes: list[int], heads: int, flat: bool
) -> None:
    rank = len(op.order or "") - (op.heads is not None) if op.order else max(op.units, 1) + flat
    shape = sizes[:rank]
    for axis in range(op.units):  # those that are trimmed, once the axes are in their order
        shape[op.order[axis] if op.order else axis] = 1
    if op.heads is not None:
        shape[op.heads] *= heads
    array = np.arange(np.prod(shape)).reshape(shape)
    saved = op.save(array, heads)
    assert saved.ndim == len(shape) + (op.heads is not None) - op.units
    assert sorted(saved.ravel()) == sorted(array.ravel())
    assert np.array_equal(op.load(saved), array)
