"""The images named on a command line: finding and reading them."""

import gzip
import io
import os
import sys
import threading

import pytest

from data.conftest import tar_bytes
from loopback import Fault, FileServer
from vitcli.data import files, image_inputs
from vitcli.data.files import read_file, read_range
from vitcli.data.image_inputs import find_images
from vitcli.errors import ImageError, VitWarning


def names(*arguments: str) -> list[str]:
    return [image.name for image in find_images(arguments)]


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name in ("b.JPG", "a.png", "a/z.webp", "a/y.txt", ".git/x.png", "._b.jpg", "c[1].png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_pipes(tree):
    """A named pipe whose writer opens it late, and a slow process substitution, the shell's
    `<(command)`."""
    os.mkfifo(tree / "pipe")
    later = threading.Timer(0.2, lambda: (tree / "pipe").write_bytes(b"a.png\nb.JPG\n"))
    later.start()
    assert names("@pipe") == ["a.png", "b.JPG"]
    later.join()
    reading, writing = os.pipe()
    later = threading.Timer(0.3, lambda: (os.write(writing, b"pixels"), os.close(writing)))
    later.start()
    assert read_file(f"/dev/fd/{reading}") == b"pixels"
    later.join()
    os.close(reading)


def test_directory_search_is_sorted_and_skips_hidden_files(tree):
    (tree / "a" / "back").symlink_to(tree)
    paths = ["a/z.webp", "a.png", "b.JPG", "c[1].png"]
    assert names(str(tree)) == [os.path.join(tree, path) for path in paths]
    assert names("a") == [os.path.join("a", "z.webp")]


def test_special_files_in_a_directory(tree):
    os.mkfifo(tree / "a" / "pipe.png")
    (tree / "a" / "dir.jpg").mkdir()
    (tree / "a" / "dir.jpg" / "x.png").write_bytes(b"")
    (tree / "a" / "drawing.svg").write_bytes(b"")
    (tree / "a" / "gone.jpg").symlink_to(tree / "nowhere.jpg")
    (tree / "a" / "loop").symlink_to(tree / "a" / "loop")
    with pytest.warns(VitWarning, match=r"pipe or device \(1\).*\.svg|\.svg \(1\), pipe or"):
        assert names("a") == ["a/dir.jpg/x.png", "a/gone.jpg", "a/z.webp"]
    assert names("a/*") == ["a/gone.jpg", "a/z.webp"]


def test_files_and_patterns(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    (tree / "a" / "up").symlink_to(tree, target_is_directory=True)
    (tree / "c1.png").write_bytes(b"matches c[1].png")
    (tree / "1.list").write_text("a.png")
    (tree / "2.list").write_text("b.JPG")
    assert names("a/y.txt", "c[1].png", "nowhere.jpg") == ["a/y.txt", "c[1].png", "nowhere.jpg"]
    assert names("~/a.png", "~/*.JPG") == [str(tree / "a.png"), str(tree / "b.JPG")]
    assert names("*.JPG", "**/*.webp") == ["b.JPG", os.path.join("a", "z.webp")]
    assert names("**/*.png") == ["a.png", "c1.png", "c[1].png"]
    assert names("@*.list") == ["a.png", "b.JPG"]


def test_lists_may_contain_anything_but_lists(tree, monkeypatch):
    text = "\ufeffa.png\r\n\na\n \t\n*.JPG\nno such\n@other.txt\nhttps://host/x.png"
    (tree / "list.txt").write_text(text, "utf-8", newline="")
    expected = ["a.png", os.path.join("a", "z.webp"), "b.JPG", "no such", "@other.txt"]
    assert names("@list.txt") == [*expected, "https://host/x.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert names("@-") == [*expected, "https://host/x.png"]


@pytest.mark.parametrize(
    "argument",
    ["gone.jpg", "nothing/*.png", ".git", "@gone.txt", "@empty.txt", "nul\0.jpg", "nul\0*.jpg"]
    + ["@nul\0.txt", "x" * 5000, "@" + "x" * 5000, "http://\udcff/x.png", "http://[::1/x"],
)
def test_invalid_arguments_fail_when_read(tree, argument):
    (tree / "empty.txt").write_text("\n")
    (tree / ".git" / "x.png").unlink()
    (image,) = find_images([argument])
    with pytest.raises(ImageError) as caught:
        image.read()
    assert caught.value.where == argument


def test_size_limit(monkeypatch, tmp_path):
    (tmp_path / "sparse.jpg").touch()
    os.truncate(tmp_path / "sparse.jpg", 1 << 40)
    with pytest.raises(ImageError, match="larger than 512 MB"):
        read_file(tmp_path / "sparse.jpg")
    with pytest.raises(ImageError, match="larger than 512 MB"):
        read_range(tmp_path / "sparse.jpg", 512, 1 << 39)
    monkeypatch.setattr(files, "MAX_BYTES", 1 << 20)
    with pytest.raises(ImageError):
        read_file("/dev/zero")


IMAGES = {"a/1.png": b"one", "a/.2.png": b"hidden", "b.txt": b"text", "c.JPG": b"three" * 9000}


def read_tar_images(path: str) -> list[tuple[str, bytes]]:
    found = list(find_images([path]))  # list all before reading the first
    return [(image.name.removeprefix(path), image.read()) for image in found]


def test_images_in_tar_files(tree, server):
    expected = [("/a/1.png", IMAGES["a/1.png"]), ("/c.JPG", IMAGES["c.JPG"])]
    plain = tar_bytes(IMAGES)
    for name, data in {"x.tar": plain, "x.tgz": gzip.compress(plain)}.items():
        (tree / name).write_bytes(data)
        server.files[name] = data
        assert read_tar_images(name) == read_tar_images(f"{server.url}/{name}") == expected
    assert names("x.t*") == [*names("x.tar"), *names("x.tgz")]
    assert names("a.p*", "x.tar") == ["a.png", "x.tar/a/1.png", "x.tar/c.JPG"]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_unreadable_tar_files(tree, server, name):
    """Images before the damage are returned, followed by an error for the tar file."""
    data = tar_bytes(IMAGES)[:-20_000]
    for path, message in ((name, "damaged"), ("none.tar", "No such file"), ("e.tar", "no images")):
        (tree / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        (tree / "e.tar").write_bytes(tar_bytes({"b.txt": b"text"}))
        *before, last = find_images([path])
        assert [image.name for image in before] == [f"{name}/a/1.png"] * (path == name)
        with pytest.raises(ImageError, match=message) as caught:
            last.read()
        assert last.name == caught.value.where == path


def test_tar_file_truncated_after_listing(tree):
    (tree / "x.tar").write_bytes(tar_bytes(IMAGES))
    *_, last = find_images(["x.tar"])
    (tree / "x.tar").write_bytes(tar_bytes(IMAGES)[:2000])
    with pytest.raises(ImageError, match="shorter"):
        last.read()


@pytest.fixture(scope="module")
def server():
    names = ("endless", "slow", "silent", "page")
    images = {"cat one.jpg": b"pixels", "empty.jpg": b""}
    with FileServer(images | dict.fromkeys(names, bytes(4 << 20))) as web:
        yield web


def read(url: str, **settings: bool) -> bytes:
    (image,) = find_images([url], **settings)
    assert image.name == url
    return image.read()


def test_urls_are_fetched(server):
    assert read(f"{server.url}/cat one.jpg") == b"pixels"
    redirect = {"Location": "/cat%20one.jpg"}
    server.faults.append(Fault("status", "/moved", status=302, headers=redirect))
    assert read(f"{server.url}/moved") == b"pixels"
    assert read(f"{server.url}/empty.jpg") == b""
    with pytest.raises(ImageError, match="--offline"):
        read(f"{server.url}/cat.jpg", offline=True)


def test_names_of_urls_have_no_password(server):
    address = server.url.removeprefix("http://")
    for path, offline in (("cat one.jpg?size=1", False), ("none.tar", False), ("x.jpg", True)):
        (image,) = find_images([f"http://user:password@{address}/{path}"], offline)
        assert image.name == f"{server.url}/{path}"
        if path.startswith("cat"):
            assert image.read() == b"pixels"


@pytest.mark.parametrize(
    ("path", "limits", "message"),
    [
        ("missing", {}, "404 \\(Not Found\\)"),
        ("silent", {"URL_TIMEOUT": 0.3}, "0.3 seconds"),
        ("slow", {"URL_DEADLINE": 0.5}, "0.5 seconds"),
        ("endless", {"MAX_BYTES": 1 << 20}, "1 MB"),
        ("page", {}, "web page"),
    ],
)
def test_failed_downloads(server, monkeypatch, path, limits, message):
    for name, limit in limits.items():  # keep the others long for slow machines
        monkeypatch.setattr(files if name == "MAX_BYTES" else image_inputs, name, limit)
    html = {"Content-Type": "text/html"}
    server.faults[:] = [
        Fault("stall", "/silent"),
        Fault("body", "/page", body=b"<html>please log in</html>", headers=html),
        Fault("slow", "/slow", seconds=0.25),  # a minute in total
    ]
    with pytest.raises(ImageError, match=message) as caught:
        read(f"{server.url}/{path}")
    assert caught.value.where == f"{server.url}/{path}"
    assert server.requests.count(f"GET /{path}") == 1
