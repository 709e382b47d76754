"""Headers that were mutated in every way: our own error, or a file that is right."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.golden_cases import GOLDEN
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.tensor_file import read_header
from vitcli.errors import VitError
from vitcli.layouts import table
from vitcli.layouts.table import Op

SOURCE = GOLDEN / "timm_vit_default" / "model.safetensors"
NUMBERS = [
    0,
    1,
    -1,
    7,
    48,
    2**31,
    2**53,
    2**63,
    2**63 - 1,
    2**64,
    -(2**63),
    1.5,
    True,
    None,
    "1",
    [],
]
OPS = [op for op in vars(table).values() if isinstance(op, Op)]


def split(path: Path) -> tuple[dict[str, object], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def mutate(header: dict[str, object], draw: random.Random) -> bytes:
    """A header with one to three things changed, as text; now and then the text itself."""
    header = json.loads(json.dumps(header))
    for _ in range(draw.randint(1, 3)):
        name = draw.choice(list(header) or ["x"])
        entry = header.get(name)
        kind = draw.randrange(8)
        if kind == 0:
            header.pop(name, None)
        elif kind == 1:
            header[name + draw.choice(["", " ", ".weight", "\0", "é"])] = entry
        elif kind == 2:
            header[name] = draw.choice(NUMBERS)
        elif isinstance(entry, dict):
            key = draw.choice(list(entry) or ["dtype"])
            value = entry.get(key)
            if kind == 3:
                entry.pop(key, None)
            elif kind == 4 or not isinstance(value, list) or not value:
                entry[key] = draw.choice([*NUMBERS, "F32", "F16", "F9", "BF16", {"a": 1}])
            elif kind == 5:
                value[draw.randrange(len(value))] = draw.choice(NUMBERS)
            elif kind == 6:
                value.append(draw.choice(NUMBERS))
            else:
                draw.shuffle(value)
    text = bytearray(json.dumps(header).encode())
    if draw.random() < 0.2 and text:
        for _ in range(draw.randint(1, 4)):
            text[draw.randrange(len(text))] = draw.randrange(256)
    length = len(text)
    if draw.random() < 0.1:
        length = draw.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    return length.to_bytes(8, "little") + text


def fuzz(path: Path, rounds: int, seed: int) -> tuple[int, int]:
    """(refused, accepted); anything but our own error is raised."""
    header, body = split(SOURCE)
    # Few tensors, lying at the start: a round takes no longer than its header.
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    order = sorted(entries, key=lambda name: entries[name]["data_offsets"][1])  # type: ignore[index]
    small = {name: entries[name] for name in order[:8]}
    end = max(entry["data_offsets"][1] for entry in small.values())  # type: ignore[index]
    draw = random.Random(seed)
    refused = accepted = 0
    for _ in range(rounds):
        path.write_bytes(mutate(small, draw) + body[:end])
        try:
            found = read_header(path)
            for name in found.tensors:
                found.tensors[name].read()
            open_checkpoint(path)
            accepted += 1
        except VitError:
            refused += 1
    return refused, accepted


def test_a_thousand_mutated_headers_are_refused_in_words(tmp_path: Path) -> None:
    refused, accepted = fuzz(tmp_path / "x.safetensors", 1000, seed=0)
    assert refused + accepted == 1000 and refused > 900


@pytest.mark.slow
def test_a_hundred_thousand_mutated_headers(tmp_path: Path) -> None:
    refused, accepted = fuzz(tmp_path / "x.safetensors", 100_000, seed=1)
    assert refused + accepted == 100_000 and refused > 90_000


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
