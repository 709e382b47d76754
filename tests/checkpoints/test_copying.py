"""Bytes from file to file, by the kernel or without it, and what is made ahead of the disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from vitcli.checkpoints import copying
from vitcli.checkpoints.copying import Extent, append, copy_range, made_ahead
from vitcli.errors import CheckpointError

BYTES = os.urandom(100_003)


@pytest.fixture(params=["kernel", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(copying, "PIECE", 4096)
    monkeypatch.setattr(copying, "BUFFER", 1000)
    if request.param == "memory":
        monkeypatch.setattr(copying, "_copy_by_kernel", lambda *_: 0)
    path = tmp_path / "source"
    path.write_bytes(BYTES)
    return path


def test_a_range_is_appended(source: Path, tmp_path: Path) -> None:
    with open(source, "rb") as old, open(tmp_path / "new", "wb") as new:
        new.write(b"before")
        copy_range(old, new, 17, 50_000)
        copy_range(old, new, 3, 0)
        new.write(b"after")
        assert new.tell() == 50_011
    assert (tmp_path / "new").read_bytes() == b"before" + BYTES[17:50_017] + b"after"


def test_a_source_that_ends_early_is_told(source: Path, tmp_path: Path) -> None:
    with (
        open(source, "rb") as old,
        open(tmp_path / "new", "wb") as new,
        pytest.raises(CheckpointError, match="cut short"),
    ):
        copy_range(old, new, 100_000, 4)


def test_a_pipe_takes_it_too(source: Path) -> None:
    reading, writing = os.pipe()
    found: list[bytes] = []
    with open(reading, "rb") as end:
        reader = threading.Thread(target=lambda: found.append(end.read()))
        reader.start()
        with open(writing, "wb") as new:
            append(new, [memoryview(b"before"), Extent(source, 5, 90_000)])
        reader.join()
    assert found == [b"before" + BYTES[5:90_005]]


def test_pieces_of_files_and_of_memory(source: Path, tmp_path: Path) -> None:
    pieces = [Extent(source, 0, 9000), memoryview(b"x" * 9000), Extent(source, 1, 2)]
    with open(tmp_path / "new", "wb") as new:
        append(new, pieces)
    assert (tmp_path / "new").read_bytes() == BYTES[:9000] + b"x" * 9000 + BYTES[1:3]


def test_one_is_made_ahead_and_an_error_comes_in_its_turn() -> None:
    made: list[int] = []

    def make(number: int) -> int:
        if number == 3:
            raise CheckpointError("is damaged")
        made.append(number)
        return number

    answers = made_ahead([lambda n=n: make(n) for n in range(5)])
    assert next(answers) == 0 and set(made) <= {0, 1, 2}
    assert [next(answers), next(answers)] == [1, 2]
    with pytest.raises(CheckpointError, match="damaged"):
        next(answers)
    assert list(made_ahead([])) == []
