"""The safetensors file: read and written as the safetensors library does, and never half."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from checkpoints.golden_cases import GOLDEN
from vitcli.atomic import whole_file, write_text
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.tensor_file import LazyTensor, read_header, read_tensor, write
from vitcli.config import ClassLabel, ModelConfig, Preprocess
from vitcli.errors import CheckpointError, OutputError

MODEL = ModelConfig(width=8, depth=1, num_heads=2, mlp_dim=8, num_classes=2)
INFO = CheckpointInfo(
    MODEL,
    Preprocess(mean=(0.1, 0.2, 0.3), interpolation="lanczos"),
    (ClassLabel("n02012849", "crane"), ClassLabel("n03126707", "crane")),
    "sigmoid",
    {"command": "vit pretrain", "metrics": {"val_top1": 0.5}, "umlaut": "ä"},
)


def arrays() -> dict[str, np.ndarray]:
    """Every kind of tensor, also empty ones and scalars."""
    draw = np.random.default_rng(0)
    return {
        "b/f16": draw.normal(size=(3, 5)).astype(np.float16),
        "a.f32": draw.normal(size=(2, 3, 4)).astype(np.float32),
        "f64": draw.normal(size=(7,)),
        "bf16": draw.normal(size=(4, 2)).astype(ml_dtypes.bfloat16),
        "i64": draw.integers(-9, 9, (2, 2)),
        "i8": draw.integers(-9, 9, (5,)).astype(np.int8),
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


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, arrays(), {"format": "pt", "key": 'välue "quoted"'})
    assert_equal(load_file(path), arrays())
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt", "key": 'välue "quoted"'}
    header = read_header(path)
    sizes = {name: array.dtype.itemsize for name, array in arrays().items()}
    for name, spec in header.tensors.items():
        assert (header.data_start + spec.start) % sizes[name] == 0, f"{name} is not aligned"


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    native = {name: np.ascontiguousarray(array) for name, array in arrays().items()}
    native["big-endian"] = native["big-endian"].astype("<f4")
    native["scalar"] = arrays()["scalar"]  # ascontiguousarray makes it one-dimensional
    save_file(native, path, {"a": "b"})
    header = read_header(path)
    assert header.metadata == {"a": "b"}
    assert_equal({name: read_tensor(path, header, name) for name in header.tensors}, native)
    with pytest.raises(CheckpointError, match="has no tensor 'nothing'"):
        read_tensor(path, header, "nothing")


def test_tensors_of_one_type_keep_their_order(tmp_path: Path) -> None:
    names = ["z", "a", "m", "b"]
    write(tmp_path / "x", {name: np.ones(2, np.float16) for name in names}, {})
    assert list(read_header(tmp_path / "x").tensors) == names


def test_lazy_tensors_are_made_one_at_a_time(tmp_path: Path) -> None:
    made: list[str] = []

    def read(name: str) -> Callable[[], np.ndarray]:
        return lambda: (made.append(name), np.full(4, len(made), np.float32))[1]

    lazy = {name: LazyTensor("float32", (4,), read(name)) for name in ("x", "y")}
    assert made == []
    write(tmp_path / "f", lazy, {})
    assert made == ["x", "y"]
    assert load_file(tmp_path / "f")["y"].tolist() == [2, 2, 2, 2]


def test_a_lazy_tensor_that_breaks_its_word_leaves_no_file(tmp_path: Path) -> None:
    lazy = LazyTensor("float32", (4,), lambda: np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="announced"):
        write(tmp_path / "f", {"x": lazy}, {})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# Damaged files


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(start: Any, end: Any, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HUGE = 10 * 2**30
DAMAGED = {
    "empty": (b"", "has 0 bytes, too few"),
    "seven bytes": (b"1234567", "has 7 bytes, too few"),
    "10 GB header": (file_of(b"{}", length=HUGE), "claims a header of 10,737,418,240 bytes"),
    "2^63 header": (file_of(b"{}", length=2**63), "claims a header of 9,223,372"),
    "2^64 - 1 header": (file_of(b"{}", length=2**64 - 1), "claims a header of 18,446,744"),
    "text": (b"I am no checkpoint at all, just text.", "claims a header of"),
    "not JSON": (file_of(b"nonsense"), "damaged safetensors header"),
    "not UTF-8": (file_of(b'{"\xff": 1}'), "damaged safetensors header"),
    "a list": (file_of([]), "it is not a JSON object"),
    "deep": (file_of(b"[" * 100_000), "damaged safetensors header"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "not a table of strings"),
    "metadata a string": (file_of({"__metadata__": "a"}), "not a table of strings"),
    "no dtype": (file_of({"a": {"shape": [], "data_offsets": [0, 4]}}, b"1234"), "not described"),
    "unknown type": (file_of({"a": tensor(0, 4, dtype="F33")}, b"1234"), "unknown element type"),
    "type a list": (file_of({"a": tensor(0, 4, dtype=["F32"])}, b"1234"), "unknown element type"),
    "negative shape": (file_of({"a": tensor(0, 4, [-1])}, b"1234"), "bad shape"),
    "float shape": (file_of({"a": tensor(0, 4, [1.0])}, b"1234"), "bad shape"),
    "true shape": (file_of({"a": tensor(0, 4, [True])}, b"1234"), "bad shape"),
    "huge shape": (file_of({"a": tensor(0, 4, [2**63])}, b"1234"), "bad shape"),
    "overflowing shape": (file_of({"a": tensor(0, 4, [2**32, 2**32])}, b"1234"), "does not take"),
    "negative offset": (file_of({"a": tensor(-4, 0)}, b"1234"), "bad offsets"),
    "2^63 offset": (file_of({"a": tensor(0, 2**63)}, b"1234"), "bad offsets"),
    "backwards": (file_of({"a": tensor(4, 0)}, b"1234"), "does not take the -4 bytes"),
    "three offsets": (
        file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"1234"),
        "bad offsets",
    ),
    "wrong size": (file_of({"a": tensor(0, 5)}, b"12345"), "does not take the 5 bytes"),
    "overlap": (
        file_of({"a": tensor(0, 8, [2]), "b": tensor(4, 8)}, b"12345678"),
        "'b' overlaps the tensor before it",
    ),
    "gap": (file_of({"a": tensor(0, 4), "b": tensor(8, 12)}, b"123456789012"), "'b' leaves a gap"),
    "no start": (file_of({"a": tensor(4, 8)}, b"12345678"), "'a' leaves a gap"),
    "beyond the end": (file_of({"a": tensor(0, 8, [2])}, b"1234"), "announces 8 bytes of tensors"),
    "trailing bytes": (file_of({"a": tensor(0, 4)}, b"12345"), "1 bytes follow the last tensor"),
    "twice": (
        file_of(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape"'
                b':[1],"data_offsets":[1,2]}}', b"12"),
        "the key 'a' stands twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "said"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_gets_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert said in caught.value.what and "\n" not in caught.value.what
    assert caught.value.where == str(path) and caught.value.hint
    if content:  # the library agrees that this is no checkpoint
        with pytest.raises(SafetensorError):
            safe_open(path, framework="np").__enter__()


def test_missing_files_and_folders_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_header(tmp_path)


def test_truncation_anywhere_is_found(tmp_path: Path) -> None:
    content = (GOLDEN / "timm_dinov2" / "model.safetensors").read_bytes()
    path = tmp_path / "x.safetensors"
    for length in (len(content) - 1, *range(0, len(content), len(content) // 97)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_header(path)
    path.write_bytes(content)
    assert len(read_header(path).tensors) > 20


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_done_to_a_header_ours_is_the_only_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(file_of({"a": tensor(0, 8, [2]), "b": tensor(8, 12, [])}, b"123456789012"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        if data.draw(st.booleans()):
            content[at] = data.draw(st.sampled_from(list(b'0123456789-[]{}",:.eE \xff')))
        else:
            del content[at : at + data.draw(st.integers(0, 3))]
    path = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError:
        return
    with safe_open(path, framework="np") as file:  # what we let through, the library reads
        for name in header.tensors:
            assert file.get_tensor(name).shape == header.tensors[name].shape


# ---------------------------------------------------------------------------------------------
# Files are written whole or not at all


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    for failure in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(failure), whole_file(path) as file:
            file.write(b"new, but only half")
            raise failure
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["missing/x", "file/x", ".", "x" * 300])
def test_unwritable_places_get_one_line(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="cannot be written"):
        write(tmp_path / place, arrays(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no /dev")
@pytest.mark.parametrize("mode", ["w", "a"])
def test_what_is_open_already_is_written_to_where_it_is(tmp_path: Path, mode: str) -> None:
    """`> file` and `>> file` with an output of /dev/stdout."""
    path = tmp_path / "x"
    path.write_text("before\n")
    code = "from vitcli.atomic import write_text; print('one', flush=True); "
    code += "write_text('/dev/stdout', 'two\\n'); print('three')"
    with path.open(mode) as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    before = ["before"] if mode == "a" else []
    assert path.read_text().split() == [*before, "one", "two", "three"]


FULL_DISK = """
import resource, sys, numpy as np
from vitcli.checkpoints.tensor_file import write
from vitcli.errors import OutputError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write(sys.argv[1], {"a": np.ones(10), "b": np.ones(20_000)}, {})
except OutputError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX's")
def test_a_full_disk_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"a": np.ones(3)}, {})
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{path}: cannot be written: File too large\n"
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_files_get_the_permissions_that_the_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "whole", "")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---------------------------------------------------------------------------------------------
# The description


def test_the_description_survives_the_header(tmp_path: Path) -> None:
    write(tmp_path / "x", {}, INFO.to_metadata())
    assert CheckpointInfo.from_metadata(read_header(tmp_path / "x").metadata) == INFO
    assert CheckpointInfo.from_metadata({"format": "pt"}) is None


def damage(**changes: Any) -> dict[str, Any]:
    """A description with a value replaced; "model.width" means the width of the model."""
    said = INFO.to_dict()
    for key, value in changes.items():
        *path, last = key.split("__")
        table: Any = said
        for part in path:
            table = table[part]
        table[last] = value
    return json.loads(json.dumps(said))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({}, "'version' is missing"),
        ([], "damaged"),
        ("model", "damaged"),
        (damage(version=2), "newer vit"),
        (damage(model=None), "damaged"),
        (damage(model__width="8"), "'8' is not int"),
        (damage(model__width=True), "True is not int"),
        (damage(model__width=8.0), "8.0 is not int"),
        (damage(model__width=7), "width 7 is not a multiple"),
        (damage(model__class_token=1), "1 is not bool"),
        (damage(model__pool="mean"), "'mean' is not"),
        (damage(model__patch_size=[16]), "is not"),
        (damage(model__colour=3), "unknown fields"),
        (damage(preprocess__std=[0, 1, 1]), "std must be positive"),
        (damage(preprocess__mean=[0, 1]), "is not"),
        (damage(classes=[["n1"]]), "damaged"),
        (damage(classes=3), "damaged"),
        (damage(score="loud"), "'loud' is not"),
        (damage(provenance=[1]), "damaged"),
    ],
)
def test_a_damaged_description_gets_one_line(said: Any, problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        CheckpointInfo.from_metadata({"vit": json.dumps(said)}, where="file")
    assert problem in caught.value.what and caught.value.where == "file"
    assert "\n" not in caught.value.what


def test_a_description_that_is_no_json_gets_one_line() -> None:
    for text in ("", "{", "[" * 100_000):
        with pytest.raises(CheckpointError, match="description of its model is damaged"):
            CheckpointInfo.from_metadata({"vit": text})


def test_reading_a_header_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vitcli.checkpoints.tensor_file import read_header; "
        f"read_header({str(GOLDEN / 'timm_deit3' / 'model.safetensors')!r}); "
        "print({'torch', 'numpy', 'safetensors', 'ml_dtypes'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("shape", [(256, 256), (300, 700), (1, 900), (513, 257)])
def test_a_matrix_that_lies_the_other_way_is_turned(shape: tuple[int, int]) -> None:
    array = np.arange(shape[0] * shape[1], dtype=np.float32).reshape(shape[::-1]).T
    assert bytes(tensor_file.tensor_bytes(array)) == array.tobytes()
