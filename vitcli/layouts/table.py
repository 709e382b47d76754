"""Tables that map tensors between our layout and another, in both directions.

A row is (ours, theirs, op): `ours`, concatenated along the first axis, are equal to `theirs`,
concatenated after undoing `op` on each. `{i}` is the block index. Our names are timm's.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vitcli.architectures.resnet import Shape
from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype

if TYPE_CHECKING:
    import numpy as np


class Op(NamedTuple):
    """How their array differs from ours. Each field can be undone exactly, so round trips are
    bit-exact."""

    heads: int | None = None
    """The axis of ours that is split into two in theirs: heads, and channels per head."""
    order: tuple[int, ...] | None = None
    """The permutation of our axes, after that split, in theirs."""
    units: int = 0
    """Number of leading axes of length 1 that only ours has (negative: that only theirs has)."""

    def save(self, array: Any, num_heads: int) -> Any:
        """Convert our array to theirs."""
        shape = tuple(array.shape)
        if self.heads is not None:
            split = (num_heads, shape[self.heads] // num_heads)
            array = array.reshape((*shape[: self.heads], *split, *shape[self.heads + 1 :]))
        if self.order is not None:
            array = array.transpose(self.order)
        shape = tuple(array.shape)
        return array.reshape(shape[self.units :] if self.units >= 0 else (1,) * -self.units + shape)

    def load(self, array: Any) -> Any:
        """Convert their array to ours."""
        shape = tuple(array.shape)
        array = array.reshape((1,) * self.units + shape if self.units > 0 else shape[-self.units :])
        if self.order is not None:
            array = array.transpose([self.order.index(k) for k in range(len(self.order))])
        if self.heads is not None:
            shape, k = tuple(array.shape), self.heads
            array = array.reshape((*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :]))
        return array


SAME = Op()
MATRIX = Op(order=(1, 0))  # (out, in) is (in, out) in flax
CONV = Op(order=(2, 3, 1, 0))  # OIHW is HWIO
QKV = Op(heads=0, order=(2, 0, 1))  # (heads * d, D) is (D, heads, d)
OUT = Op(heads=1, order=(1, 2, 0))  # (D, heads * d) is (heads, d, D)
HEADS = Op(heads=0)  # (heads * d,) is (heads, d)
TABLE = Op(units=1)  # (1, N, D) is (N, D)
VECTOR = Op(units=2)  # (1, 1, D) is (D,)
CHANNELS = Op(units=-3)  # (C,) is (1, 1, 1, C)
POINTWISE = Op(order=(2, 3, 1, 0), units=2)  # (O, I, 1, 1) is (I, O)

_OPS = {
    "same": (SAME, SAME, "weight", "bias"),
    "table": (TABLE, SAME, "weight", "bias"),
    "vector": (VECTOR, SAME, "weight", "bias"),
    "matrix": (MATRIX, SAME, "kernel", "bias"),
    "conv": (CONV, SAME, "kernel", "bias"),
    "qkv": (QKV, HEADS, "kernel", "bias"),
    "out": (OUT, SAME, "kernel", "bias"),
    "pointwise": (POINTWISE, SAME, "kernel", "bias"),
    "norm": (SAME, SAME, "scale", "bias"),
    "channels": (CHANNELS, CHANNELS, "scale", "bias"),
    "gamma": (SAME, SAME, "gamma", "beta"),
}
"""The third column of a table: ops of weights and biases, and their names in the other layout."""


class Row(NamedTuple):
    """Tensors of ours and of theirs with the same values."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op = SAME


def rows(table: str, **names: str) -> tuple[Row, ...]:
    """Parse lines of `ours  theirs[,theirs...]  [op]`, where `*` stands for both weight and bias,
    x[a,b] for xa,xb, and {placeholders} are filled in from `names`."""
    result = []
    for line in filter(None, table.splitlines()):
        ours, theirs, op_name = (line.split() + ["same"])[:3]
        for placeholder, name in names.items():
            theirs = theirs.replace(f"{{{placeholder}}}", name)
        weight_op, bias_op, weight, bias = _OPS[op_name]
        suffixes = (("weight", weight, weight_op), ("bias", bias, bias_op))
        for suffix, their_suffix, op in suffixes if "*" in line else (("", "", weight_op),):
            our_names = tuple(ours.replace("*", suffix).split(","))
            their_names = tuple(expand_choices(theirs.replace("*", their_suffix)))
            result.append(Row(our_names, their_names, op))
    return tuple(result)


def expand_choices(pattern: str) -> Iterator[str]:
    """Expand choices in brackets: "x[a,b]" to "xa" and "xb"."""
    parts = re.split(r"[][]", pattern)  # every second one was in brackets
    for choices in itertools.product(*(part.split(",") for part in parts)):
        yield "".join(choices)


def choose(rows: Iterable[Row], names: Iterable[str]) -> tuple[Row, ...]:
    """Of the rows for the same tensors of ours, choose the first whose names are in the file, in
    any block; if there is none, the first."""
    number = re.compile(r"(?<=[._])(\d+|\{i\})(?=[./])")
    known = {number.sub("0", name) for name in names}  # one for all blocks, so there are few
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.ours, []).append(row)

    def is_in_file(row: Row) -> bool:
        return known.issuperset(number.sub("0", name) for name in row.theirs)

    return tuple(next(filter(is_in_file, group), group[0]) for group in groups.values())


def identity(names: Iterable[str]) -> tuple[Row, ...]:
    """Return rows for tensors that have the same name in both layouts."""
    return tuple(Row((name,), (name,)) for name in names)


def expand(rows: Iterable[Row], depth: int) -> list[Row]:
    """Expand `{i}` in the rows for a model with `depth` blocks."""

    def insert_index(names: tuple[str, ...], i: int) -> tuple[str, ...]:
        return tuple(name.replace("{i}", str(i)) for name in names)

    return [
        Row(insert_index(row.ours, i), insert_index(row.theirs, i), row.op)
        for row in rows
        for i in range(depth if "{i}" in row.ours[0] else 1)
    ]


def depth_of(rows: Iterable[Row], names: Iterable[str]) -> int:
    """Count the blocks that a file's names refer to."""
    templates = {name for row in rows for name in row.theirs if "{i}" in name}
    patterns = (re.escape(name).replace(r"\{i\}", r"(\d{1,4})") for name in templates)
    pattern = re.compile("|".join(patterns) or r"(?!)")
    matches = (match for name in names if (match := pattern.fullmatch(name)))
    return 1 + max((int(match[match.lastindex or 0]) for match in matches), default=0)


def add_prefix(rows: Iterable[Row], prefix: str) -> tuple[Row, ...]:
    """Add a prefix to their names in the rows."""
    return tuple(row._replace(theirs=tuple(prefix + n for n in row.theirs)) for row in rows)


# ---------------------------------------------------------------------------------------------
# One row


def _dummy_array(shape: Shape) -> np.ndarray:
    """A dummy array of that shape that takes no memory, to compute an `Op`'s output shape."""
    import numpy as np

    return np.broadcast_to(np.zeros((), np.int8), shape)


def load_shapes(rows: Iterable[Row], tensors: Mapping[str, LazyTensor]) -> dict[str, Shape]:
    """Return shapes by our names, without missing or wrongly shaped tensors."""
    result: dict[str, Shape] = {}
    for row in rows:
        try:
            shapes = [tensors[name].shape for name in row.theirs]
            if row.op != SAME:  # do not import numpy needlessly
                shapes = [row.op.load(_dummy_array(shape)).shape for shape in shapes]
        except (KeyError, ValueError, IndexError):
            continue
        total = sum(shape[0] if shape else 0 for shape in shapes)
        # Ours is a single tensor, or q and kv, which share the first axis.
        lengths = [total] if len(row.ours) == 1 else [total // 3, total - total // 3]
        for name, length in zip(row.ours, lengths, strict=True):
            result[name] = (length, *shapes[0][1:]) if shapes[0] else ()
    return result


def save_shape(row: Row, ours: Mapping[str, Shape], num_heads: int) -> Shape:
    """Return the shape of each of a row's tensors in their layout."""
    total = sum(ours[name][0] for name in row.ours)
    shape = (total // len(row.theirs), *ours[row.ours[0]][1:])
    return shape if row.op == SAME else tuple(row.op.save(_dummy_array(shape), num_heads).shape)


def load(
    row: Row, shapes: Mapping[str, Shape], tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield our tensors of a row, with the given shapes."""
    theirs = [tensors[name] for name in row.theirs if name in tensors]
    dtype, sources = _common_dtype(theirs), tuple(n for tensor in theirs for n in tensor.sources)

    def read(start: int, end: int) -> np.ndarray:
        joined = _concatenate([row.op.load(tensor.read()) for tensor in theirs], dtype)
        return joined if len(row.ours) == 1 else joined[start:end]

    start = 0
    for name in row.ours:
        end = start + shapes[name][0]
        yield name, LazyTensor(dtype, shapes[name], functools.partial(read, start, end), sources)
        start = end


def save(
    row: Row, tensors: Mapping[str, LazyTensor], num_heads: int
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield their tensors of a row."""
    ours = [tensors[name] for name in row.ours]
    length, dtype = sum(tensor.shape[0] for tensor in ours) // len(row.theirs), _common_dtype(ours)

    def read(k: int) -> np.ndarray:
        joined = _concatenate([tensor.read() for tensor in ours], dtype)
        array: np.ndarray = row.op.save(joined[k * length : (k + 1) * length], num_heads)
        return array

    shape = save_shape(row, {name: tensors[name].shape for name in row.ours}, num_heads)
    for k, name in enumerate(row.theirs):
        yield name, LazyTensor(dtype, shape, functools.partial(read, k))


def _common_dtype(tensors: Iterable[LazyTensor]) -> str:
    """The tensors' common dtype, or else one that can represent all of their values."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"


def _concatenate(arrays: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    """Concatenate arrays along the first axis."""
    import numpy as np

    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([array.astype(numpy_dtype(dtype), copy=False) for array in arrays])
