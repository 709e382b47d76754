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
from hub.test_cache import add_to_cache
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


OUT_OF_MEMORY = "error: out of memory\nhint: use a smaller --batch-size or --resolution\n"


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
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.89 GB)"), OUT_OF_MEMORY),
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


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_broken_pipe_of_help(argument):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([*VIT, argument], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")


def test_deleted_current_directory(vit, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = vit("convert", "default", "out")
    assert result.exit_code == 1
    assert result.stderr == "error: current directory: No such file or directory\n"


def test_closed_standard_streams(tmp_path, monkeypatch):
    """As in a daemon."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    add_to_cache(tmp_path, "me/model", {"model.safetensors": b""})
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", *VIT, "models", "rm", "me/model"]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1 and "error: cannot ask for confirmation" in result.stderr
    result = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *VIT, "models"], check=False)
    assert result.returncode == 0


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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
def test_signal_during_import_is_not_swallowed(tmp_path, number, code):
    """Like torch, this module catches all exceptions of what it imports."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("commands inherit an ignored signal, as under nohup")
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)\n"
    )
    (tmp_path / "torch.py").write_text("try:\n    import slow\nexcept BaseException:\n    pass\n")
    with VitProcess("export", "default", "x.pt2", PYTHONPATH=str(tmp_path)) as process:
        wait_for(started.exists, process)
        process.send_signal(number)
        assert process.wait(600) == code


@pytest.mark.parametrize("when", ["before", "after"])
def test_signals_around_command_print_no_traceback(tmp_path, when):
    """Ctrl-C while Typer builds the command, and a second signal while `atexit` cleans up."""
    raises = "__import__('signal').raise_signal"
    lines = {
        "before": f"import typer.main\ntyper.main.get_command = lambda app: {raises}(2)\n",
        "after": f"import atexit\natexit.register(lambda: {raises}(15))\n",
    }
    (tmp_path / "sitecustomize.py").write_text(lines[when])
    with VitProcess("--version", PYTHONPATH=str(tmp_path)) as process:
        _, stderr = process.communicate(timeout=600)
        assert (process.returncode, stderr) == ({"before": 130, "after": 0}[when], "")


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
