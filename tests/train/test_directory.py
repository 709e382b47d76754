"""Run directories: locking, and what may be overwritten."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train.runs import Killed, interrupt_at, weights_equal
from vitcli.errors import OutputError, RunError
from vitcli.train.directory import RunDirectory
from vitcli.train.loop import train

HOLD = """
import os, sys, time
from vitcli.train.directory import RunDirectory
with RunDirectory(sys.argv[1]).locked():
    if os.fork() == 0:  # as a worker that outlives its parent for a while
        time.sleep(10)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_directory_is_locked_against_other_processes(tiny_run):
    run = tiny_run(steps=4)
    train(run, on_event=interrupt_at(3))
    command, pipe = [sys.executable, "-c", HOLD, run.output], subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout.readline() == "held\n"
    for fields in ({"resume": True}, {"force": True}):
        with pytest.raises(RunError, match="another process"):
            train(run, **fields)
    assert RunDirectory(run.output).state()
    holder.kill()
    holder.wait()
    assert (Path(run.output) / ".lock").exists()  # a stale lock does not block
    assert train(run, resume=True).step == 4
    assert not (Path(run.output) / ".lock").exists()


def test_finished_run_is_replaced_only_with_force(tiny_run, finished):
    run = tiny_run(steps=2)
    shutil.copytree(finished, run.output)
    with pytest.raises(RunError, match="contains a finished run"):
        train(run)
    with pytest.raises(RunError, match="nothing to resume"):
        train(run, resume=True)
    assert weights_equal(run.output, finished)
    assert train(run, force=True).step == 2
    assert not weights_equal(run.output, finished)


def test_unfinished_run_requires_resume_or_force(tiny_run):
    run = tiny_run()
    train(run, on_event=interrupt_at(3))
    with pytest.raises(RunError, match="contains an unfinished run"):
        train(run)
    directory = RunDirectory(run.output)
    state = directory.state()
    assert directory.stopped.exists()
    shutil.copytree(state, state.with_name("step-9"))  # left by a kill while saving
    (state.with_name("step-9") / "progress.json").unlink()
    assert directory.state() == state
    (shard,) = state.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(RunError, match="state cannot be resumed"):
        train(run, resume=True)
    assert not directory.stopped.exists()  # an error ended it


def test_killed_replacement_does_not_look_finished(tiny_run, monkeypatch):
    run = tiny_run()
    train(run, on_event=interrupt_at(5))
    directory = RunDirectory(run.output)
    assert directory.model.exists()

    def kill(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", kill)
        train(run, force=True)
    assert directory.is_only_begun()
    train(run)
    assert directory.is_finished()


def test_output_inside_dataset_is_rejected(tiny_run, colors):
    before = sorted(colors.iterdir())
    for output in (colors, colors / "run"):
        with pytest.raises(RunError, match="dataset.s directory"):
            train(tiny_run(output=str(output)))
    assert sorted(colors.iterdir()) == before


def test_split_preserves_undecodable_file_names(tiny_run):
    directory = RunDirectory(tiny_run().output)
    directory.start()
    directory.write_json(directory.split, {"val": ["caf\udce9.jpg", "é"]})
    assert directory.read_split() == {"val": ["caf\udce9.jpg", "é"]}
    directory.split.write_text("{")
    with pytest.raises(RunError, match=r"split\.json: cannot be read"):
        directory.read_split()


def test_unrelated_files_are_not_overwritten(tiny_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README.md").write_text("mine")
    with pytest.raises(RunError, match=r"already contains README\.md"):
        train(tiny_run())
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError):
        train(tiny_run(output=str(tmp_path / "file" / "run")))
    assert (tmp_path / "run" / "README.md").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
