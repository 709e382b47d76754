"""Safetensors files, compared with the safetensors library; files written row by row."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from checkpoints.test_resize import read_tensors
from vitcli.checkpoints.feature_file import row_file
from vitcli.checkpoints.tensor_file import read_header, write
from vitcli.errors import CheckpointError, OutputError


def sample_arrays() -> dict[str, np.ndarray]:
    """Every kind of tensor, including empty ones and scalars."""
    draw = np.random.default_rng(0)
    return {
        "b/f16": draw.normal(size=(3, 5)).astype(np.float16),
        "a.f32": draw.normal(size=(2, 3, 4)).astype(np.float32),
        "f64": draw.normal(size=(7,)),
        "bf16": draw.normal(size=(4, 2)).astype(ml_dtypes.bfloat16),
        "i64": draw.integers(-9, 9, (2, 2)),
        "u8": draw.integers(0, 255, (3, 1)).astype(np.uint8),
        "bool": np.array([True, False, True]),
        "scalar": np.array(3.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "big-endian": np.arange(3, dtype=">f4"),
    }


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].shape == array.shape and found[name].dtype.name == array.dtype.name
        assert (found[name] == array).all(), name


def test_write_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    metadata = {"format": "pt", "key": 'välue "quoted"'}
    write(path, sample_arrays(), metadata)
    assert_equal(load_file(path), sample_arrays())
    assert_equal(read_tensors(path), sample_arrays())
    with safe_open(path, framework="np") as file:
        assert file.metadata() == metadata == read_header(path).metadata


def test_invalid_unicode_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write(tmp_path / "f", {}, {"classes": "\udcff"})
    assert list(tmp_path.iterdir()) == []


def encode_file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor_entry(start: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


DAMAGED = {
    "empty": b"",
    "10 GB header": encode_file(b"{}", length=10 * 2**30),
    "not JSON": encode_file(b"nonsense"),
    "not UTF-8": encode_file(b'{"\xff": 1}'),
    "lone surrogate": encode_file(b'{"__metadata__": {"a": "\\ud800"}}'),
    "a list": encode_file([]),
    "deep": encode_file(b"[" * 100_000),
    "metadata of numbers": encode_file({"__metadata__": {"a": 1}}),
    "no dtype": encode_file({"a": {"shape": [], "data_offsets": [0, 4]}}, b"1234"),
    "unknown type": encode_file({"a": tensor_entry(0, 4, dtype="F33")}, b"1234"),
    "negative shape": encode_file({"a": tensor_entry(0, 4, [-1])}, b"1234"),
    "huge shape": encode_file({"a": tensor_entry(0, 4, [2**63])}, b"1234"),
    "thousands of digits": encode_file(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"),
    "overflowing shape": encode_file({"a": tensor_entry(0, 4, [2**32, 2**32])}, b"1234"),
    "backwards": encode_file({"a": tensor_entry(4, 0)}, b"1234"),
    "three offsets": encode_file(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"1234"
    ),
    "wrong size": encode_file({"a": tensor_entry(0, 5)}, b"12345"),
    "overlap": encode_file({"a": tensor_entry(0, 8, [2]), "b": tensor_entry(4, 8)}, b"12345678"),
    "gap": encode_file({"a": tensor_entry(0, 4), "b": tensor_entry(8, 12)}, b"123456789012"),
    "beyond the end": encode_file({"a": tensor_entry(0, 8, [2])}, b"1234"),
    "trailing bytes": encode_file({"a": tensor_entry(0, 4)}, b"12345"),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_rejects_files_that_safetensors_rejects(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_tensors(path)
    assert caught.value.where == str(path) and caught.value.hint
    if content:
        with pytest.raises(SafetensorError):
            safe_open(path, framework="np").__enter__()


@pytest.mark.parametrize("count", [0, 1, 1000])
@pytest.mark.parametrize("kind", ["npy", "safetensors", "parquet"])
def test_row_file_round_trip(tmp_path, count, kind):
    values = np.random.default_rng(0).normal(size=(count, 7)).astype(np.float32)
    values[-1:] = np.nan
    path = tmp_path / f"rows.{kind}"
    with row_file(path, 7, {"model": "ünï", "note": ""}) as add:
        for i, row in enumerate(values):
            add(f"{i}.jpg", None if np.isnan(row[0]) else row)
    if kind == "npy":
        found = np.load(path)
    elif kind == "parquet":
        table = pyarrow.parquet.read_table(path)
        assert table.schema.field("features").type == pyarrow.list_(pyarrow.float32())
        assert table.schema.metadata == {b"model": "ünï".encode(), b"note": b""}
        assert table["file"].to_pylist() == [f"{i}.jpg" for i in range(count)]
        rows = table["features"].to_pylist()
        found = np.array([row or [np.nan] * 7 for row in rows], np.float32).reshape(-1, 7)
    else:
        with safe_open(path, "np") as opened:
            found = opened.get_tensor("features")
            assert opened.metadata() == {"model": "ünï", "note": ""}
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values)
