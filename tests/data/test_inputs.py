"""Which images a command line names, and how they are fetched."""

from __future__ import annotations

import http.server
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from vitcli.data import files, inputs
from vitcli.data.files import read_file
from vitcli.data.inputs import find_images
from vitcli.errors import ImageError, VitWarning


def names(*arguments: str) -> list[str]:
    return [image.name for image in find_images(arguments)]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.JPG", "a.png", "a/z.webp", "a/y.txt", ".git/x.png", "._b.jpg", "c[1].png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("argument", ["pipe.png", "@pipe.png"])
def test_a_pipe_that_nobody_writes_to(
    tree: Path, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    os.mkfifo(tree / "pipe.png")
    monkeypatch.setattr(files, "PIPE_TIMEOUT", 0.1)
    (image,) = find_images([argument])
    with pytest.raises(ImageError, match=r"nothing was written for 0\.1 seconds"):
        image.read()


def test_pipes_with_a_writer(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named one, whose writer may come later, and one of the shell's `<(command)`, which may
    take its time."""
    os.mkfifo(tree / "pipe")
    later = threading.Timer(0.2, lambda: (tree / "pipe").write_bytes(b"a.png\nb.JPG\n"))
    later.start()
    assert names("@pipe") == ["a.png", "b.JPG"]
    later.join()
    monkeypatch.setattr(files, "PIPE_TIMEOUT", 0.1)
    reading, writing = os.pipe()
    later = threading.Timer(0.3, lambda: (os.write(writing, b"pixels"), os.close(writing)))
    later.start()
    assert read_file(f"/dev/fd/{reading}") == b"pixels"
    later.join()
    os.close(reading)


def test_directories_are_searched_in_order_without_what_is_hidden(tree: Path) -> None:
    (tree / "a" / "back").symlink_to(tree)
    paths = ["a/z.webp", "a.png", "b.JPG", "c[1].png"]
    assert names(str(tree)) == [os.path.join(tree, path) for path in paths]
    assert names("a") == [os.path.join("a", "z.webp")]


def test_nothing_in_a_directory_hangs_or_vanishes(tree: Path) -> None:
    os.mkfifo(tree / "a" / "pipe.png")
    (tree / "a" / "dir.jpg").mkdir()
    (tree / "a" / "dir.jpg" / "x.png").write_bytes(b"")
    (tree / "a" / "drawing.svg").write_bytes(b"")
    with pytest.warns(VitWarning, match=r"\.svg \(1\)"):
        assert names("a") == [os.path.join("a", "dir.jpg", "x.png"), os.path.join("a", "z.webp")]
    assert names("a/*") == [os.path.join("a", "z.webp")]


def test_files_and_patterns(tree: Path) -> None:
    assert names("a/y.txt", "c[1].png", "nowhere.jpg") == ["a/y.txt", "c[1].png", "nowhere.jpg"]
    assert names("*.JPG", "**/*.webp") == ["b.JPG", os.path.join("a", "z.webp")]


def test_lists_may_name_anything_but_lists(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\ufeffa.png\r\n\na\n \t\n*.JPG\nno such\n@other.txt\nhttps://host/x.png"
    (tree / "list.txt").write_text(text, "utf-8", newline="")
    expected = ["a.png", os.path.join("a", "z.webp"), "b.JPG", "no such", "@other.txt"]
    assert names("@list.txt") == [*expected, "https://host/x.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert names("@-") == [*expected, "https://host/x.png"]


@pytest.mark.parametrize(
    "argument",
    ["gone.jpg", "nothing/*.png", ".git", "@gone.txt", "@empty.txt", "nul\0.jpg", "nul\0*.jpg"]
    + ["@nul\0.txt", "x" * 5000, "@" + "x" * 5000, "http://\udcff/x.png"],
)
def test_arguments_that_name_no_image_yield_one_that_cannot_be_read(
    tree: Path, argument: str
) -> None:
    (tree / "empty.txt").write_text("\n")
    (tree / ".git" / "x.png").unlink()
    (image,) = find_images([argument])
    with pytest.raises(ImageError) as caught:
        image.read()
    assert caught.value.where == argument


def test_a_list_of_arbitrary_bytes(tree: Path) -> None:
    (tree / "list.txt").write_bytes(b"a.png\n\0\n\xff\xfe\0a\nx\0*\n" + b"y" * 9000 + b"\nb.JPG\n")
    images = list(find_images(["@list.txt"]))
    assert len(images) == 6
    for image in images[1:-1]:
        with pytest.raises(ImageError):
            image.read()


def test_finding_is_lazy(tree: Path) -> None:
    def endless() -> Iterator[str]:
        while True:
            yield "a.png"

    assert len(list(islice(find_images(endless()), 5))) == 5


def test_a_pipe_in_place_of_a_file_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError):
        read_file("/dev/zero")


# ---------------------------------------------------------------------------------------------
# URLs


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path: an image, an error, a redirect, too much, silence, drop by drop."""

    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/cat%20one.jpg")
            self.end_headers()
        elif self.path == "/silent":
            time.sleep(2.0)
        else:
            self.send_response(200)
            self.end_headers()
            if self.path == "/slow":
                for _ in range(50):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            elif self.path == "/endless":
                for _ in range(64):
                    self.wfile.write(bytes(1 << 16))
            else:
                self.wfile.write(self.path.encode())

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hangs up is what these tests are about."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def read(url: str, **settings: bool) -> bytes:
    (image,) = find_images([url], **settings)
    assert image.name == url
    data: bytes = image.read()
    return data


def test_urls_are_fetched(server: str) -> None:
    assert read(f"{server}/cat one.jpg") == b"/cat%20one.jpg"
    assert read(f"{server}/moved") == b"/cat%20one.jpg"
    with pytest.raises(ImageError, match="--offline"):
        read(f"{server}/cat.jpg", offline=True)


@pytest.mark.parametrize(
    ("path", "limits", "complaint"),
    [
        ("/missing", {}, "404 \\(Not Found\\)"),
        ("/silent", {"URL_TIMEOUT": 0.3}, "0.3 seconds"),
        ("/slow", {"URL_DEADLINE": 0.5}, "0.5 seconds"),
        ("/endless", {}, "1 MB"),
    ],
)
def test_servers_that_do_not_deliver(
    server: str,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    limits: dict[str, float],
    complaint: str,
) -> None:
    for name, seconds in limits.items():  # the others stay long: machines are slow at times
        monkeypatch.setattr(inputs, name, seconds)
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError, match=complaint) as caught:
        read(server + path)
    assert caught.value.where == server + path


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/cat.jpg", "http://[half/cat.jpg"])
def test_no_server_at_all(url: str) -> None:
    with pytest.raises(ImageError):
        read(url)
