"""Atomic writes of files and directories, and cleanup after killed processes."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vitcli.atomic import (
    atomic_directory,
    atomic_write,
    make_directory,
    remove_own,
    write_text,
)
from vitcli.errors import OutputError


def test_failed_write_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    for failure in (RuntimeError, KeyboardInterrupt, BrokenPipeError):
        with pytest.raises(failure), atomic_write(path) as file:
            file.write(b"new, but only half")
            raise failure
        assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from vitcli.atomic import atomic_directory, atomic_write
with (
    atomic_write(sys.argv[1] + "/x") as file,
    atomic_directory(sys.argv[1] + "/y") as directory,
):
    file.write(b"half")
    (directory / "z").write_text("half")
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print(flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot ask whether a process runs")
def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run([*command, "dies"]).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "lives"], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None and other.stdout.readline()
        files = set(tmp_path.iterdir())
        assert len(files) == 2  # the second process removed the first one's and has its own
        with atomic_directory(tmp_path / "new") as directory:
            (directory / "file").write_text("whole")
            remove_own()
            directory.mkdir()
        assert set(tmp_path.iterdir()) == {*files, tmp_path / "new"}
        other.communicate(b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x", "y"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PID namespaces")
def test_temporary_files_of_other_containers_are_kept(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "x"):
        name = next(tmp_path.iterdir()).name
    machine, namespace, _, rest = name.rsplit("-", 3)
    other = tmp_path / "other"
    other.mkdir()
    for number in (int(namespace), int(namespace) + 1):
        (other / f"{machine}-{number}-999999999-{rest}").touch()
    write_text(other / "new", "")
    expected = {f"{machine}-{int(namespace) + 1}-999999999-{rest}", "new"}
    assert {path.name for path in other.iterdir()} == expected


@pytest.mark.parametrize("name", ["missing/x", "file/x", ".", "x" * 300])
def test_unwritable_path_raises_output_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(OutputError) as caught:
        write_text(tmp_path / name, "text")
    assert caught.value.where == str(tmp_path / name)
    assert (caught.value.hint is not None) == (name in ("missing/x", "file/x"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no /dev")
def test_dev_stdout_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before\n")
    code = "from vitcli.atomic import write_text; print('one', flush=True); "
    code += "write_text('/dev/stdout', 'two\\n'); print('three')"
    with path.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert path.read_text().split() == ["before", "one", "two", "three"]


def test_symlink_is_preserved(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_file_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "whole", "")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "whole").chmod(0o600)
    write_text(tmp_path / "whole", "again")
    assert stat.S_IMODE((tmp_path / "whole").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["file", "file/a", "file/a/b", "broken link"])
def test_make_directory_error_names_conflicting_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken link").symlink_to("missing")
    with pytest.raises(OutputError) as caught:
        make_directory(tmp_path / name)
    assert f"'{tmp_path / name.partition('/')[0]}' is not a directory" in caught.value.what
