"""Two processes never work in one folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vitcli.errors import RunError
from vitcli.train.lock import RunLock

HOLD = """
import sys
from pathlib import Path
from vitcli.train.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_which_one_is_there(tmp_path, holder):
    with pytest.raises(RunError, match="another process .* is running in this folder") as caught:
        RunLock(tmp_path / ".lock").take()
    assert str(holder.pid) in caught.value.what and caught.value.where == str(tmp_path)


def test_the_lock_dies_with_its_process(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert (tmp_path / ".lock").exists()  # left over, and no hindrance
    with RunLock(tmp_path / ".lock") as lock:
        lock.take()  # again: it is ours
    assert not (tmp_path / ".lock").exists()


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with RunLock(tmp_path / "run" / ".lock"):
        assert not (tmp_path / "run").exists()


def test_a_lock_that_its_owner_removed_is_not_taken_for_one(tmp_path, monkeypatch):
    """Between the opening of the file and its locking."""
    path = tmp_path / ".lock"
    with RunLock(path) as lock:
        checked = []

        def is_ours(file) -> bool:
            checked.append(file)
            if len(checked) == 1:
                Path(path).unlink(missing_ok=True)
            return original(file)

        lock.file.close()
        lock.file, original = None, lock._is_ours
        monkeypatch.setattr(lock, "_is_ours", is_ours)
        lock.take()
        assert len(checked) == 2 and path.exists()
