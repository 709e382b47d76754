"""WebDataset tar shards."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data.conftest import jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data import shards
from vitcli.data.dataset import open_data, open_split
from vitcli.errors import DataError, ImageError, MissingExtraError, OutputError


def tar_of(files: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def samples(start: int, labels: list[int | str], suffix: str = "jpg") -> dict[str, bytes]:
    files = {}
    for i, label in enumerate(labels, start):
        files[f"s{i:04}.{suffix}"] = jpeg(i)
        files[f"s{i:04}.cls"] = str(label).encode()
    return files


@pytest.fixture
def shard_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        data = tar_of(samples(10 * i, [0, 1, 2, 1, 0]))
        if i == 1:
            (folder / f"train-{i:05}.tar.gz").write_bytes(gzip.compress(data))
        else:
            (folder / f"train-{i:05}.tar").write_bytes(data)
    (folder / "val-00000.tar").write_bytes(tar_of(samples(500, [2, 0])))
    (folder / "classes.txt").write_text("n00000003\tcat\nn00000001\tdog\nbird\n")
    return folder


CLASSES = (
    ClassLabel("n00000003", "cat"),
    ClassLabel("n00000001", "dog"),
    ClassLabel("bird", "bird"),
)


def test_a_shard_folder(shard_folder: Path) -> None:
    splits = open_data(DataConfig(str(shard_folder)))
    assert splits.classes == CLASSES
    assert splits.val is not None
    assert splits.test is None
    assert list(splits.train.labels) == [0, 1, 2, 1, 0] * 3
    assert list(splits.val.labels) == [2, 0]
    numbers = [*range(5), *range(10, 15), *range(20, 25)]
    for i in (7, 0, 14, 3, 12):  # in any order
        assert splits.train.read(i) == jpeg(numbers[i])
    assert splits.train.names[6] == "train-00001.tar.gz/s0011"
    assert splits.val.read(1) == jpeg(501)
    assert not splits.warnings


def test_what_webdataset_itself_reads(shard_folder: Path) -> None:
    urls = [str(p) for p in sorted(shard_folder.glob("train-*"))]
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    ours = open_data(DataConfig(str(shard_folder))).train
    assert [s["__key__"] for s in theirs] == [name.split("/")[1] for name in ours.names]
    assert [int(s["cls"]) for s in theirs] == list(ours.labels)
    assert [s["jpg"] for s in theirs] == [ours.read(i) for i in range(len(ours))]


def test_what_webdataset_itself_writes(tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "one.tar")) as sink:
        for i in range(6):
            sink.write({"__key__": f"k/{i}", "jpg": jpeg(i), "cls": i % 2, "json": {"a": i}})
    source, _, _ = open_split(DataConfig(str(tmp_path / "one.tar")))
    assert list(source.labels) == [0, 1] * 3
    assert source.read(5) == jpeg(5)


@pytest.mark.parametrize("pattern", ["train-{00000..00002}.tar", "train-0000{0,2}.tar"])
def test_brace_patterns(shard_folder: Path, pattern: str) -> None:
    packed = shard_folder / "train-00001.tar.gz"
    (shard_folder / "train-00001.tar").write_bytes(gzip.decompress(packed.read_bytes()))
    source, _, _ = open_split(DataConfig(str(shard_folder / pattern)))
    assert source.classes == CLASSES
    assert len(source) == (15 if ".." in pattern else 10)
    with pytest.raises(DataError, match="not there: 'train-00003.tar' and 'train-00004.tar'"):
        open_split(DataConfig(str(shard_folder / "train-{00002..00004}.tar")))


def test_parts_in_folders(tmp_path: Path) -> None:
    for part, label in (("train", "cat"), ("validation", "dog"), ("test", "cat")):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.tar").write_bytes(tar_of(samples(0, [label, "dog", "cat"])))
    splits = open_data(DataConfig(str(tmp_path)))
    assert splits.val is not None
    assert splits.test is not None
    assert [c.id for c in splits.classes] == ["cat", "dog"]
    assert [list(s.labels) for s in (splits.train, splits.val, splits.test)] == [
        [0, 1, 0],
        [1, 1, 0],
        [0, 1, 0],
    ]


def test_classes_from_a_file_or_indices_with_a_warning(shard_folder: Path, tmp_path: Path) -> None:
    (shard_folder / "classes.txt").unlink()
    splits = open_data(DataConfig(str(shard_folder)))
    assert splits.classes == tuple(ClassLabel(str(i), str(i)) for i in range(3))
    assert len(splits.warnings) == 1
    assert "--classes FILE" in splits.warnings[0]
    (tmp_path / "list.txt").write_text("a\nb\nc\nd\n")
    splits = open_data(DataConfig(str(shard_folder), classes=str(tmp_path / "list.txt")))
    assert [c.id for c in splits.classes] == ["a", "b", "c", "d"]
    assert any("'d'" in warning for warning in splits.warnings)
    (tmp_path / "list.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match="the label 2, but the classes are 0 to 1"):
        open_data(DataConfig(str(shard_folder), classes=str(tmp_path / "list.txt")))


def test_labels_that_are_ids_are_matched_to_the_list(tmp_path: Path) -> None:
    (tmp_path / "train-0.tar").write_bytes(tar_of(samples(0, ["dog", "n00000003", "bird"])))
    (tmp_path / "classes.txt").write_text("n00000003\tcat\nn00000001\tdog\nbird\n")
    assert list(open_split(DataConfig(str(tmp_path)))[0].labels) == [1, 0, 2]


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.tar.gz", gzip.compress), ("a.tgz", gzip.compress), ("a.tar.bz2", bz2.compress)]
    + [("a.tar.xz", lzma.compress), ("a.tar", bytes)],
)
def test_compressed_shards(tmp_path: Path, name: str, compress: object) -> None:
    data = tar_of(samples(0, [0, 1, 1], "png"), tarfile.GNU_FORMAT)
    (tmp_path / name).write_bytes(compress(data))  # type: ignore[operator]
    source, _, _ = open_split(DataConfig(str(tmp_path / name)))
    assert [source.read(i) for i in (2, 0, 1)] == [jpeg(2), jpeg(0), jpeg(1)]


def test_long_names_metadata_and_other_files(tmp_path: Path) -> None:
    key = "d" * 120 + "/" + "k" * 150
    files = {
        "__meta__": b"x",
        "README.txt": b"about",
        f"{key}.seg.png": b"mask",
        f"{key}.JPG": jpeg(1),
        f"{key}.cls": b" 1\n",
        "z.jpeg": jpeg(2),
        "z.cls": b"0",
        "z.json": b"{}",
    }
    (tmp_path / "x.tar").write_bytes(tar_of(files))
    source, _, _ = open_split(DataConfig(str(tmp_path / "x.tar")))
    assert list(source.names) == [f"x.tar/{key}", "x.tar/z"]
    assert list(source.labels) == [1, 0]
    assert source.read(0) == jpeg(1)


# ---------------------------------------------------------------------------------------------
# The cache


def cached() -> list[str]:
    return sorted(path.suffix for path in shards.cache_directory().iterdir())


def test_shards_are_unpacked_and_indexed_once(
    shard_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = open_data(DataConfig(str(shard_folder)), report=said.append).train
    assert len(said) == 1
    assert said[0].startswith("unpacking 1 compressed shards (0 MB) into ")
    assert cached() == [".npz"] * 4 + [".tar"]
    for name in ("_unpack", "_read_index"):
        monkeypatch.setattr(shards, name, None)
    again = open_data(DataConfig(str(shard_folder)), report=said.append).train
    assert len(said) == 1
    assert again.fingerprint() == first.fingerprint()
    assert again.read(7) == first.read(7)


def test_a_changed_shard_is_read_anew_and_the_old_copy_removed(shard_folder: Path) -> None:
    open_data(DataConfig(str(shard_folder)))
    shard = shard_folder / "train-00001.tar.gz"
    shard.write_bytes(gzip.compress(tar_of(samples(70, [2, 2]))))
    train = open_data(DataConfig(str(shard_folder))).train
    assert len(train) == 12
    assert train.read(5) == jpeg(70)
    assert cached() == [".npz"] * 4 + [".tar"]


def test_what_a_killed_process_left_is_removed_after_a_day(shard_folder: Path) -> None:
    open_data(DataConfig(str(shard_folder)))
    spool = next(shards.cache_directory().glob("*.tar"))
    for age, name in ((0, "young"), (2 * 24 * 3600, "old")):
        part = spool.with_name(f".{spool.name}.{name}.tmp")
        part.write_bytes(b"half")
        os.utime(part, (os.path.getmtime(part) - age,) * 2)
    spool.with_suffix(".npz").unlink()
    open_data(DataConfig(str(shard_folder)))
    assert [p.name.split(".")[-2] for p in shards.cache_directory().glob(".*.tmp")] == ["young"]


def test_a_copy_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_of(samples(0, [0, 1]))))

    def full(shard: Path, opener: object, target: io.BufferedWriter) -> None:
        target.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "_unpack", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        open_split(DataConfig(str(tmp_path / "a.tar.gz")))
    assert "VIT_CACHE" in str(caught.value.hint)
    assert not list(shards.cache_directory().iterdir())


def test_plain_shards_need_no_cache(shard_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_CACHE", "/dev/null/nowhere")
    assert len(open_split(DataConfig(str(shard_folder / "train-00000.tar")))[0]) == 5
    with pytest.raises(OutputError, match="cannot be unpacked here"):
        open_split(DataConfig(str(shard_folder / "train-00001.tar.gz")))


def test_memory_is_offsets_and_names(shard_folder: Path) -> None:
    train = open_data(DataConfig(str(shard_folder))).train
    assert len(pickle.dumps(train.reader)) < 2000  # no image goes to a worker process


# ---------------------------------------------------------------------------------------------
# Bad input


def fails(path: Path, message: str) -> DataError:
    with pytest.raises(DataError, match=message) as caught:
        open_split(DataConfig(str(path)))
    assert "\n" not in caught.value.what
    return caught.value


def test_a_shard_cut_short_anywhere(tmp_path: Path) -> None:
    data = tar_of(samples(0, [0, 1, 0]))
    end = len(data.rstrip(b"\0")) + 511 & ~511
    path = tmp_path / "cut.tar"
    for length in [*range(1, end, 511), *range(512, end, 512), end]:
        path.write_bytes(data[:length])
        error = fails(path, "damaged or cut short")
        assert error.where == str(path)


def test_a_compressed_shard_cut_short(tmp_path: Path) -> None:
    packed = gzip.compress(tar_of(samples(0, [0, 1, 0])))
    path = tmp_path / "cut.tar.gz"
    for length in range(3, len(packed) - 1, 97):
        path.write_bytes(packed[:length])
        fails(path, "damaged or cut short")
        assert not shards.cache_directory().exists() or not list(shards.cache_directory().iterdir())


def test_flipped_bytes_raise_nothing_but_data_errors(tmp_path: Path) -> None:
    data = tar_of(samples(0, [0, 1, 0]))
    rng = np.random.default_rng(0)
    path = tmp_path / "x.tar"
    for _ in range(200):
        damaged = bytearray(data)
        for place in rng.integers(0, len(data), 6):
            damaged[place] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            source, _, _ = open_split(DataConfig(str(path)))
            assert len(source) <= 3
        except DataError as error:
            assert "\n" not in error.what


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no labelled image"),
        ({"a.txt": b"x"}, "holds no labelled image"),
        ({"a.jpg": b"x", "b.jpg": b"x", "b.cls": b"0"}, "1 of its samples lack"),
        ({"a.cls": b"0", "a.heic": b"x"}, "1 of its samples lack"),
        ({"a.jpg": b"x", "a.JPG": b"y", "a.cls": b"0"}, "two files of one kind"),
        ({"a.jpg": b"x", "a.cls": b"-3"}, "the label -3"),
    ],
)
def test_shards_without_samples(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    (tmp_path / "x.tar").write_bytes(tar_of(files))
    fails(tmp_path / "x.tar", message)


@pytest.mark.parametrize("data", [b"", b"text" * 500], ids=["empty", "text"])
def test_not_a_tar(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    fails(tmp_path / "x.tar", "damaged or cut short")


def test_a_shard_that_was_replaced_by_a_shorter_one(shard_folder: Path) -> None:
    source, _, _ = open_split(DataConfig(str(shard_folder / "train-00000.tar")))
    (shard_folder / "train-00000.tar").write_bytes(b"x")
    with pytest.raises(ImageError, match="has become shorter"):
        source.read(3)


def test_without_webdataset_the_extra_is_named(shard_folder: Path) -> None:
    code = (
        "import sys; sys.modules['webdataset'] = None\n"
        "from vitcli.config import DataConfig\n"
        "from vitcli.data.dataset import open_split\n"
        f"open_split(DataConfig({str(shard_folder)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert MissingExtraError.__name__ in done.stderr
    assert "pip install 'vitcli[data]'" in done.stderr
    assert "pipx inject vitcli webdataset" in done.stderr
