"""Which images a command line names, and how they are fetched."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from vitcli.data import inputs
from vitcli.data.inputs import ImageInput, find_images, read_file
from vitcli.errors import ImageError


def names(*arguments: str) -> list[str]:
    return [image.name for image in find_images(arguments)]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("b.JPG", "a.png", "a/z.webp", "a/y.txt", ".git/x.png", "._b.jpg", "c[1].png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_folders_are_searched_in_order_without_what_is_hidden(tree):
    paths = ["a/z.webp", "a.png", "b.JPG", "c[1].png"]
    assert names(str(tree)) == [os.path.join(tree, path) for path in paths]
    assert names("a") == [os.path.join("a", "z.webp")]


def test_a_folder_that_links_to_itself_ends(tree):
    (tree / "a" / "back").symlink_to(tree)
    assert len(names(str(tree))) == 4


def test_files_are_taken_as_named(tree):
    assert names("a/y.txt", "c[1].png", "nowhere.jpg") == ["a/y.txt", "c[1].png", "nowhere.jpg"]


def test_patterns(tree):
    assert names("*.JPG", "**/*.webp") == ["b.JPG", os.path.join("a", "z.webp")]
    assert names("a/*") == [os.path.join("a", "z.webp")]


def test_lists_may_name_anything_but_lists(tree):
    text = "\ufeffa.png\r\n\na\n \t\n*.JPG\nno such\n@other.txt\nhttps://host/x.png"
    (tree / "list.txt").write_text(text, "utf-8", newline="")
    assert names("@list.txt") == [
        "a.png",
        os.path.join("a", "z.webp"),
        "b.JPG",
        "no such",
        "@other.txt",
        "https://host/x.png",
    ]


def test_what_is_not_there_is_told_when_it_is_read(tree):
    (image,) = find_images(["gone.jpg"])
    with pytest.raises(ImageError, match="there is no such file") as caught:
        image.read()
    assert caught.value.where == "gone.jpg"


def test_finding_is_lazy(tree):
    def endless() -> Iterator[str]:
        while True:
            yield "a.png"

    assert len(list(islice(find_images(endless()), 5))) == 5


def test_a_pipe_in_the_place_of_a_file_has_a_limit(tree, monkeypatch):
    monkeypatch.setattr(inputs, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError, match="has more than 1 MB"):
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
    assert isinstance(image, ImageInput) and image.name == url
    data: bytes = image.read()
    return data


def test_urls_are_fetched(server):
    assert read(f"{server}/cat one.jpg") == b"/cat%20one.jpg"
    assert read(f"{server}/moved") == b"/cat%20one.jpg"


@pytest.mark.parametrize(
    ("path", "limits", "complaint"),
    [
        ("/missing", {}, "the server answered 404 \\(Not Found\\)"),
        ("/silent", {"URL_TIMEOUT": 0.3}, "the server was silent for 0.3 seconds"),
        ("/slow", {"URL_DEADLINE": 0.5}, "did not arrive whole in 0.5 seconds"),
        ("/endless", {}, "has more than 1 MB"),
    ],
)
def test_servers_that_do_not_deliver(server, monkeypatch, path, limits, complaint):
    for name, seconds in limits.items():  # the others stay long: machines are slow at times
        monkeypatch.setattr(inputs, name, seconds)
    monkeypatch.setattr(inputs, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError, match=complaint) as caught:
        read(server + path)
    assert caught.value.where == server + path


def test_no_server_at_all(server):
    with pytest.raises(ImageError, match="cannot be fetched: .*refused"):
        read("http://127.0.0.1:9/cat.jpg")
    with pytest.raises(ImageError, match="cannot be fetched"):
        read("http://[half/cat.jpg")


def test_offline_asks_no_one(server):
    with pytest.raises(ImageError, match="on the network, which --offline forbids"):
        read(f"{server}/cat.jpg", offline=True)
