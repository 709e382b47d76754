"""WebDataset tar shards."""

import bz2
import gzip
import io
import lzma
import pickle
import shutil
import tarfile
from pathlib import Path

import pytest
import webdataset

from data.conftest import DAMAGE, jpeg, tar_bytes
from vitcli.config import ClassLabel, DataConfig
from vitcli.data import shards
from vitcli.data.cache import cache_directory
from vitcli.data.dataset import open_split, open_splits
from vitcli.data.source import Source
from vitcli.errors import DataError, ImageError, OutputError


def samples(start: int, labels: list[int | str], suffix: str = "jpg") -> dict[str, bytes]:
    files = {}
    for i, label in enumerate(labels, start):
        files[f"s{i:04}.{suffix}"] = jpeg(i)
        files[f"s{i:04}.cls"] = str(label).encode()
    return files


def open_source(path: Path) -> Source:
    return open_split(DataConfig(str(path)))[0]


@pytest.fixture
def shard_directory(tmp_path):
    directory = tmp_path / "shards"
    directory.mkdir()
    for i in range(3):
        data = tar_bytes(samples(10 * i, [0, 1, 2, 1, 0]))
        if i == 1:
            (directory / f"train-{i:05}.tar.gz").write_bytes(gzip.compress(data))
        else:
            (directory / f"train-{i:05}.tar").write_bytes(data)
    (directory / "val-00000.tar").write_bytes(tar_bytes(samples(500, [2, 0])))
    (directory / "classes.txt").write_text("n00000003\tcat\nn00000001\tdog\nbird\n")
    return directory


CLASSES = (
    ClassLabel("n00000003", "cat"),
    ClassLabel("n00000001", "dog"),
    ClassLabel("bird", "bird"),
)


@pytest.mark.filterwarnings("error::vitcli.errors.VitWarning")
def test_shard_directory(shard_directory):
    splits = open_splits(DataConfig(str(shard_directory)))
    assert splits.classes == CLASSES
    assert splits.val is not None and splits.test is None
    assert list(splits.val.labels) == [2, 0]
    assert splits.train.names[6] == "train-00001.tar.gz/s0011"
    assert splits.val.read(1) == jpeg(501)
    assert len(pickle.dumps(splits.train.reader)) < 2000  # images are not pickled for workers


def test_compatible_with_webdataset(shard_directory, tmp_path):
    urls = [str(p) for p in sorted(shard_directory.glob("train-*"))]
    others = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    source = open_splits(DataConfig(str(shard_directory))).train
    assert [s["__key__"] for s in others] == [name.split("/")[1] for name in source.names]
    assert [int(s["cls"]) for s in others] == list(source.labels)
    for i in (7, 0, 14, 3, 12):  # in any order
        assert source.read(i) == others[i]["jpg"]
    with webdataset.TarWriter(str(tmp_path / "one.tar")) as sink:
        for i in range(6):
            sink.write({"__key__": f"k/{i}", "jpg": jpeg(i), "cls": i % 2, "json": {"a": i}})
    source = open_source(tmp_path / "one.tar")
    assert list(source.labels) == [0, 1] * 3 and source.read(5) == jpeg(5)


@pytest.mark.parametrize("pattern", ["train-{00000..00002}.tar", "train-0000{0,2}.tar"])
def test_brace_patterns(shard_directory, pattern):
    packed = shard_directory / "train-00001.tar.gz"
    (shard_directory / "train-00001.tar").write_bytes(gzip.decompress(packed.read_bytes()))
    source = open_source(shard_directory / pattern)
    assert source.classes == CLASSES and len(source) == (15 if ".." in pattern else 10)
    with pytest.raises(DataError, match="'train-00003.tar' and 'train-00004.tar'"):
        open_source(shard_directory / "train-{00002..00004}.tar")


def test_split_directories(tmp_path):
    for split, label in (("train", "cat"), ("validation", "dog"), ("test", "cat")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "0.tar").write_bytes(tar_bytes(samples(0, [label, "dog", "cat"])))
    each = "::".join(f"{tmp_path}/{split}/0.tar" for split in ("train", "validation", "test"))
    for path in (str(tmp_path), f"{tmp_path}/{{train,validation,test}}/0.tar", each):
        splits = open_splits(DataConfig(path))
        assert [label.id for label in splits.classes] == ["cat", "dog"]
        labels = [list(s.labels) for s in (splits.train, splits.val, splits.test)]
        assert labels == [[0, 1, 0], [1, 1, 0], [0, 1, 0]]
    (tmp_path / "train" / "classes.txt").write_text("dog\ncat\n")
    assert open_splits(DataConfig(each)).classes[0].id == "dog"
    for place in ("x.tar", ".old"):
        shutil.copytree(tmp_path / "train", tmp_path / "data" / place / "train")
    (tmp_path / "data" / "train").symlink_to(tmp_path / "train")
    train = open_splits(DataConfig(str(tmp_path / "data"), val_fraction=0)).train
    assert [train.where(i) for i in (0, 3)] == [
        f"{tmp_path}/data/{place}/0.tar/s0000" for place in ("train", "x.tar/train")
    ]


def test_class_lists(shard_directory, tmp_path):
    listing = tmp_path / "list.txt"
    listing.write_text("a\nb\n")
    with pytest.raises(DataError, match="label 2"):
        open_splits(DataConfig(str(shard_directory), classes=str(listing)))
    listing.write_text("n00000003\tcat\nn00000001\tdog\nbird\n")
    (tmp_path / "x.tar").write_bytes(tar_bytes(samples(0, ["dog", "n00000003", "bird"])))
    config = DataConfig(str(tmp_path / "x.tar"), classes=str(listing))
    assert list(open_split(config)[0].labels) == [1, 0, 2]


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.tar.gz", gzip.compress), ("a.tgz", gzip.compress), ("a.tar.bz2", bz2.compress)]
    + [("a.tar.xz", lzma.compress), ("a.tar", bytes)],
)
def test_compressed_shards(tmp_path, name, compress):
    data = tar_bytes(samples(0, [0, 1, 1], "png"), tarfile.GNU_FORMAT)
    (tmp_path / name).write_bytes(compress(data))
    source = open_source(tmp_path / name)
    assert [source.read(i) for i in (2, 0, 1)] == [jpeg(2), jpeg(0), jpeg(1)]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_metadata_and_other_files(tmp_path, format):
    key = "d" * 120 + "/" + "ö" * 150
    files = {
        "__meta__": b"x",
        "README.txt": b"about",
        f"{key}.seg.png": b"mask",
        f"{key}.JPG": jpeg(1),
        f"{key[:120]}/._x.cls": b"as macOS adds",
        f"{key}.cls": b" 1\n",
        "z.jpeg": jpeg(2),
        "z.cls": b"0",
        "z.json": b"{}",
    }
    (tmp_path / "x.tar").write_bytes(tar_bytes(files, format))
    source = open_source(tmp_path / "x.tar")
    assert list(source.names) == [f"x.tar/{key}", "x.tar/z"]
    assert list(source.labels) == [1, 0]
    assert source.read(0) == jpeg(1)


@pytest.mark.parametrize("link", ["latest", "l.jpg"])
def test_directories_and_links_between_samples(tmp_path, link):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), (link, tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "elsewhere"
            tar.addfile(member)
        for name, data in samples(0, [0, 1]).items():
            member = tarfile.TarInfo(f"d/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (tmp_path / "x.tar").write_bytes(buffer.getvalue())
    if link == "l.jpg":
        with pytest.raises(DataError, match=r"'l.jpg' is a link to another file"):
            open_source(tmp_path / "x.tar")
        return
    assert [open_source(tmp_path / "x.tar").read(i) for i in (0, 1)] == [jpeg(0), jpeg(1)]


# ---------------------------------------------------------------------------------------------
# The cache


def cached() -> list[str]:
    return sorted(path.suffix for path in cache_directory("shards").iterdir())


def test_shards_are_unpacked_and_indexed_once(shard_directory, monkeypatch):
    monkeypatch.setattr(shards, "REPORTED_BYTES", 1)
    reported: list[str] = []
    first = open_splits(DataConfig(str(shard_directory)), report=reported.append).train
    started = [text.partition(" (")[0] for text in reported]
    assert started == ["unpacking 1 compressed shard", "indexing 3 shards"]
    assert cached() == [".npz"] * 4 + [".tar"]
    with monkeypatch.context() as patched:
        patched.setattr(shards, "read_samples", None)
        patched.setattr(shards, "copy_limited", None)
        again = open_splits(DataConfig(str(shard_directory)), report=reported.append).train
    assert len(reported) == 2
    assert again.fingerprint() == first.fingerprint() and again.read(7) == first.read(7)
    for damage in DAMAGE.values():
        for index in cache_directory("shards").glob("*.npz"):
            index.write_bytes(damage(index.read_bytes()))
        remade = open_splits(DataConfig(str(shard_directory))).train
        assert remade.fingerprint() == first.fingerprint()


def test_changed_shard_replaces_its_cached_copy(shard_directory):
    open_splits(DataConfig(str(shard_directory)))
    (cache_directory("shards") / "0123-45.npz").touch()  # another dataset's
    shard = shard_directory / "train-00001.tar.gz"
    shard.write_bytes(gzip.compress(tar_bytes(samples(70, [2, 2]))))
    train = open_splits(DataConfig(str(shard_directory))).train
    assert len(train) == 12 and train.read(5) == jpeg(70)
    assert cached() == [".npz"] * 5 + [".tar"]


def test_failed_unpacking_leaves_no_partial_copy(tmp_path, monkeypatch):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_bytes(samples(0, [0, 1]))))

    with monkeypatch.context() as patched:
        patched.setattr(shards, "max_unpacked_size", lambda size: 1000)
        with pytest.raises(DataError, match="more than 1,000 bytes"):
            open_source(tmp_path / "a.tar.gz")
    assert not list(cache_directory("shards").iterdir())

    def full(packed: object, target: io.BufferedWriter, *limit: object) -> None:
        target.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "copy_limited", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        open_source(tmp_path / "a.tar.gz")
    assert "VIT_CACHE" in str(caught.value.hint)
    assert not list(cache_directory("shards").iterdir())


def test_uncompressed_shards_need_no_cache(shard_directory, monkeypatch):
    monkeypatch.setenv("VIT_CACHE", "/dev/null/nowhere")
    assert len(open_source(shard_directory / "train-00000.tar")) == 5
    with pytest.raises(OutputError):
        open_source(shard_directory / "train-00001.tar.gz")


# ---------------------------------------------------------------------------------------------
# Bad input


def assert_fails(path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_source(path)
    assert "\n" not in caught.value.what and caught.value.where == str(path)


def test_truncated_shards(tmp_path):
    data = tar_bytes(samples(0, [0, 1, 0]))
    end = len(data.rstrip(b"\0")) + 511 & ~511
    for length in [0, *range(1, end, 511), *range(512, end, 512), end]:
        (tmp_path / "cut.tar").write_bytes(data[:length])
        assert_fails(tmp_path / "cut.tar")
    packed = gzip.compress(data)
    for length in range(3, len(packed) - 1, 97):
        (tmp_path / "cut.tar.gz").write_bytes(packed[:length])
        assert_fails(tmp_path / "cut.tar.gz")
        assert not any(path.suffix == ".tar" for path in cache_directory("shards").glob("*"))


def header(name: str, size: bytes, kind: bytes = b"0") -> bytes:
    """The header of a tar member with these 12 bytes in its size field."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(record: bytes, times: int = 1) -> bytes:
    content = b"%d %s\n" % (len(record) + 4, record) * times
    padding = bytes(-len(content) % 512)
    return header("p", b"%011o\0" % len(content), b"x") + content + padding


MINUS_ONE = b"\xff" * 12


@pytest.mark.parametrize(
    "data",
    [
        header("a.jpg", MINUS_ONE) + bytes(1024),
        header("a.jpg", b"\x80" + b"\xff" * 11) + bytes(1024),
        header("a.jpg", MINUS_ONE, b"L") + bytes(1024),
        header("a.jpg", b"%011o\0" % 1, b"S") + b"\1" * 2048 + bytes(1024),
        pax(b"size=" + b"9" * 80) + header("a.jpg", b"%011o\0" % 1) + bytes(2048),
        pax(b"size=-512") + header("a.jpg", b"%011o\0" % 1) + bytes(2048),
        pax(b"GNU.sparse.major=1") + header("a.jpg", b"%011o\0" % 512) + b"9" * 512 + bytes(1024),
        pax(b"x=y") * 3000 + bytes(1024),
        pax(b"x=yyyyyy", 90_000) + bytes(1024),
        b"text" * 500,
        tar_bytes({"a.jpg": b"x", "b.jpg": b"x", "b.cls": b"0"}),
        tar_bytes({"a.cls": b"0", "a.txt": b"x"}),
        tar_bytes({"a.jpg": b"x", "a.JPG": b"y", "a.cls": b"0"}),
        tar_bytes({"a.jpg": b"x", "a.cls": b"-3"}),
        tar_bytes({"a.jpg": b"x", "a.cls": b"0", "b.1.jpg": b"x", "b.1.cls": b"0"}),
        tar_bytes({"a.jpg": b"x", "a.json": b'{"label": null}'}),
        tar_bytes({"a.jpg": b"x", "a.json": b'{"label": ["cat"]}'}),
        tar_bytes({}),
    ],
)  # fmt: skip
def test_malformed_shards(tmp_path, data):
    """Some made TarFile loop forever, or integers overflow 64 bits."""
    (tmp_path / "x.tar").write_bytes(data)
    assert_fails(tmp_path / "x.tar")


def test_shard_replaced_by_a_shorter_one(shard_directory):
    source = open_source(shard_directory / "train-00000.tar")
    (shard_directory / "train-00000.tar").write_bytes(b"x")
    with pytest.raises(ImageError):
        source.read(3)
