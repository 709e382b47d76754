"""The `vit` command itself: the error boundary, pipes, signals, completion."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from conftest import VitProcess, wait_for
from vitcli.cli.main import COMMANDS, app
from vitcli.cli.options import CommonOptions
from vitcli.cli.parameters import command
from vitcli.errors import ConfigError, DataError

VIT = [sys.executable, "-m", "vitcli"]


@pytest.fixture
def add_failing_command(monkeypatch):
    """Add a command `fail` that raises the given error."""

    def make(error: BaseException) -> None:
        @command(CommonOptions)
        def fail(args: CommonOptions) -> None:
            raise error

        monkeypatch.setitem(sys.modules, "vitcli.cli.fail", SimpleNamespace(fail=fail))
        monkeypatch.setitem(COMMANDS, "fail", "Fail.")

    return make


HINT = "free some, or use a smaller batch size, resolution or model"
OUT_OF_MEMORY = f"error: out of memory\nhint: {HINT}\n"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (DataError("no", where="x.toml", hint="yes"), "error: x.toml: no\nhint: yes\n"),
        (DataError("no"), "error: no\n"),
        (DataError("\x1b[2J", where="\x07"), "error: \\x07: \\x1b[2J\n"),
        (
            DataError("no", where="http://jo:pw@h/a.tar?sig=k::http://h/b;k"),
            "error: http://h/a.tar::http://h/b: no\n",
        ),
        (FileNotFoundError(2, "No such file", "a.txt"), "error: a.txt: No such file\n"),
        (FileNotFoundError(2, "No such file"), "error: current directory: No such file\n"),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            "error: no temporary directory is writable\nhint: set TMPDIR to one that is\n",
        ),
        (
            RuntimeError("can't start new thread"),
            "error: cannot start another thread\n"
            "hint: allow more processes (`ulimit -u`) or memory\n",
        ),
        (MemoryError(), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY),
        (
            KeyError("x"),
            "error: unexpected KeyError: 'x'\n"
            "hint: this is a bug in vit; please report it with the output of --debug\n",
        ),
    ],
)
def test_errors_are_one_or_two_lines(vit, add_failing_command, error, expected):
    add_failing_command(error)
    result = vit("fail")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", expected)
    assert vit("fail", "--debug").exception is error


def test_wrong_values_have_exit_code_2(vit, add_failing_command):
    add_failing_command(ConfigError("no", hint="yes"))
    result = vit("fail")
    assert (result.exit_code, result.stderr) == (2, "error: no\nhint: yes\n")


def test_deleted_working_directory_is_an_error(vit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    result = vit("models")
    assert result.exit_code == 1
    assert result.stderr == "error: current directory: No such file or directory\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_write_error_on_stdout():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*VIT, "info", "B/16"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_lost_messages_do_not_affect_results():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*VIT, "pull", "missing", "default"], stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert result.returncode == 1  # for the missing model
    assert len(result.stdout.splitlines()) == 1


def test_broken_pipe_prints_no_error(tiny_checkpoint, image_folder, tmp_path):
    image_list = tmp_path / "list.txt"
    image_list.write_text(f"{image_folder / 'a.png'}\n" * 3000)
    with VitProcess("predict", f"@{image_list}", "-m", tiny_checkpoint, "--json", "-q") as process:
        assert "a.png" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(600) == 141


def test_broken_pipe_of_help():
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([*VIT, "--help"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_leave_no_partial_file(tiny_checkpoint, image_folder, tmp_path, number, code):
    """The command is waiting for the rest of the list on stdin when the signal arrives."""
    args = ("predict", "@-", "-m", tiny_checkpoint, "-o", tmp_path / "out.txt", "-q")
    with VitProcess(*args) as process:
        process.stdin.write(f"{image_folder}/a.png\n")
        process.stdin.flush()
        # Wait for the first line of output.
        wait_for(lambda: any(file.stat().st_size for file in tmp_path.iterdir()), process)
        process.send_signal(number)
        assert process.wait(600) == code
        assert process.stderr.read() == ""
    assert not list(tmp_path.iterdir())


def test_signal_during_import_is_not_swallowed(tmp_path):
    """Like torch, this module catches all exceptions of what it imports."""
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)\n"
    )
    (tmp_path / "torch.py").write_text("try:\n    import slow\nexcept BaseException:\n    pass\n")
    with VitProcess("export", "default", "x.pt2", PYTHONPATH=str(tmp_path)) as process:
        wait_for(started.exists, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 143


def test_shell_completion():
    def complete(*args: str) -> list[str]:
        words = {"COMP_WORDS": " ".join(("vit", *args)), "COMP_CWORD": str(len(args))}
        environment = {"_VIT_COMPLETE": "complete_bash", **words}
        return CliRunner().invoke(app, prog_name="vit", env=environment).stdout.split()

    with VitProcess(_VIT_COMPLETE="complete_bash", COMP_WORDS="vit pre", COMP_CWORD="1") as process:
        assert process.communicate() == ("predict\npretrain\n", "")
    assert complete("models", "s") == ["show"]
    assert complete("predict", "--top") == ["--top-k"]
    assert complete("predict", "--precision", "b") == ["bf16"]
    assert complete("inspect", "--view", "p") == ["pca", "posemb"]
    assert {"default", "default-pretrained"} <= set(complete("predict", "--model", "def"))
    assert "vit-b16-i21k" in complete("info", "vit-b16-")
