"""Streaming shards from URLs: each sample once per epoch, and server failures."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest

from data.conftest import jpeg, tar_bytes
from data.test_shards import samples
from loopback import Fault, FileServer
from vitcli import retry
from vitcli.config import AugmentConfig, DataConfig
from vitcli.data import remote, remote_shards, stream
from vitcli.data.dataset import open_split, open_splits
from vitcli.data.loader import train_batches
from vitcli.data.remote import RemoteFile, download
from vitcli.data.stream import Sample, Stream, StreamOptions, shuffle
from vitcli.data.transforms import TrainTransform
from vitcli.errors import DataError, ImageError, VitWarning

SIZES = [3, 9, 1, 6, 4, 8, 2]  # 33 samples in 7 shards
TRAIN = TrainTransform((8, 8), "bilinear", AugmentConfig(randaugment=(2, 10)))
PATTERN = "train-{0..6}.tar"


def shards(sizes: list[int] = SIZES) -> dict[str, bytes]:
    files, start = {}, 0
    for number, size in enumerate(sizes):
        labels: list[int | str] = [i % 3 for i in range(start, start + size)]
        files[f"data/train-{number}.tar"] = tar_bytes(samples(start, labels))
        start += size
    table = {f"train-{number}.tar": size for number, size in enumerate(sizes)}
    return files | {
        "data/sizes.json": json.dumps(table).encode(),
        "data/classes.txt": b"cat\ndog\nbird\n",
        "data/val-0.tar": tar_bytes(samples(900, [0, 1, 2])),
    }


@pytest.fixture
def web():
    with FileServer(shards()) as web:
        yield web


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, pauses):
    monkeypatch.setattr(stream, "SHUFFLE_BUFFER", 12)


def open_stream(web: FileServer, pattern: str = PATTERN, lanes: int | None = None) -> Stream:
    config = DataConfig(f"{web.url}/data/{pattern}")
    train = open_splits(config, streaming=StreamOptions(None, lanes)).train
    assert isinstance(train, Stream)
    return train


def sample_keys(source: Stream) -> dict[int, str]:
    """{sample number: sample key}, to look up the indices in batches."""
    found = [sample for shard in source.shards for sample in shard.samples(0)]
    return {sample.number: sample.key for sample in found}


def batches(
    source: Stream,
    ranks: int = 1,
    workers: int = 0,
    batch: int = 8,
    first: int = 0,
    last: int = 9,
    bad: list[ImageError] | None = None,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Whole batches, concatenated from the parts of all ranks."""
    parts = []
    for rank in range(ranks):
        part = range(batch * rank // ranks, batch * (rank + 1) // ranks)
        mine = train_batches(
            source, TRAIN, batch, 7, first, last, workers,
            on_unreadable=(bad if bad is not None else []).append, part=part,
        )  # fmt: skip
        parts.append([tuple(array.numpy() for array in arrays) for arrays in mine])
    return [
        tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True))
        for step in zip(*parts, strict=True)
    ]


def batches_equal(a: list[tuple[np.ndarray, ...]], b: list[tuple[np.ndarray, ...]]) -> bool:
    pairs = zip(a, b, strict=True)
    return all(np.array_equal(x, y) for one, two in pairs for x, y in zip(one, two, strict=True))


# ---------------------------------------------------------------------------------------------
# Samples of a run


@pytest.mark.parametrize("lanes", [None, 1, 20])
def test_each_sample_once_per_epoch_for_any_ranks_and_workers(web, lanes):
    source = open_stream(web, lanes=lanes)
    assert len(source) == 33 and source.lanes == (lanes or 7)
    keys = sample_keys(source)
    assert len(keys) == 33
    reference = batches(source, last=13)
    drawn = np.concatenate([indices for _, _, indices in reference])
    for epoch in range(3):
        seen = Counter(keys[i] for i in drawn[33 * epoch : 33 * (epoch + 1)].tolist())
        assert len(seen) == 33 and set(seen.values()) == {1}
    assert list(drawn[:33]) != list(drawn[33:66])
    labels = np.concatenate([labels for _, labels, _ in reference])
    expected = [int(keys[i].rpartition("/s")[2]) % 3 for i in drawn.tolist()]
    assert labels.tolist() == expected
    for ranks, workers in ((1, 3), (2, 5), (3, 0)):
        assert batches_equal(batches(source, ranks, workers, last=5), reference[:5])


@pytest.mark.parametrize("step", [1, 5])  # in the first epoch and in the second
def test_resumed_run_sees_the_same_batches(web, step):
    source = open_stream(web, lanes=3)
    reference = batches(source, last=9)[step:]
    for ranks, workers in ((1, 0), (2, 2)):
        assert batches_equal(batches(source, ranks, workers, first=step), reference)


def test_resuming_does_not_read_earlier_shards(web):
    source = open_stream(web, lanes=1)
    batches(source, first=0, last=4, batch=8)
    everything = {request for request in web.requests if "train" in request}
    web.requests.clear()
    batches(source, first=3, last=4, batch=8)
    assert len(set(web.requests)) < len(everything) == 7


def test_blocks_are_shuffled():
    rngs = (np.random.default_rng(i) for i in range(9))
    shuffled = [*shuffle(iter(range(25)), 10, rngs)]
    blocks = [shuffled[:10], shuffled[10:20], shuffled[20:]]
    assert [sorted(block) for block in blocks] == [[*range(10)], [*range(10, 20)], [*range(20, 25)]]
    assert all(block != sorted(block) for block in blocks)


# ---------------------------------------------------------------------------------------------
# Sizes, classes, splits


def test_only_the_training_split_is_streamed(web):
    both = f"{web.url}/data/{PATTERN}::{web.url}/data/val-0.tar"
    for _ in range(2):
        splits = open_splits(DataConfig(both))
        assert splits.val is not None and splits.val.read(1) == jpeg(901)
        assert splits.record["kind"] == "given"
    del web.files["data/sizes.json"]  # not needed to evaluate
    source, description = open_split(DataConfig(both))
    assert len(source) == 3 and description == "validation split" and len(splits.classes) == 3
    with pytest.raises(DataError, match="stream"):
        open_split(DataConfig(f"{web.url}/data/{PATTERN}"))


def test_labels_in_json(web):
    files = {"a.jpg": jpeg(1), "a.json": b'{"label": 2}', "b.jpg": jpeg(2), "b.json": b"[]"}
    files |= {"c.jpg": jpeg(3), "c.cls": b"dog"}
    web.files["data/train-0.tar"] = gzip.compress(tar_bytes(files))
    source = open_stream(web)
    found = list(source.shards[0].samples(0))
    assert [sample.label for sample in found] == ["2", None, "dog"]
    assert [source.label(found[i]) for i in (0, 2)] == [2, 1]
    web.files["data/classes.txt"] = b"n00000002_crane\nn00000001_crane\nbird\n"
    assert open_stream(web).label(Sample("x", None, "n00000001_crane")) == 1
    web.files["data/classes.txt"] = b"3\n1\n2\n"
    assert open_stream(web).label(Sample("x", None, "01")) == 1
    bad: list[ImageError] = []
    batches(source, last=5, bad=bad)
    assert {error.where for error in bad} == {"train-0.tar/b"}


def test_missing_sizes_require_train_images(web):
    # The first time with the 403 that S3 may answer.
    web.faults.append(Fault("status", "sizes.json", status=403))
    web.faults.append(Fault("status", "sizes.json", status=404, times=999))
    config = DataConfig(f"{web.url}/data/{PATTERN}")
    with pytest.raises(DataError, match="number of training images") as caught:
        open_splits(config)
    assert "sizes.json" in str(caught.value.hint) and "--train-images" in str(caught.value.hint)
    with pytest.warns(VitWarning, match="assumed to be equal"):
        train = open_splits(config, streaming=StreamOptions(33)).train
    assert isinstance(train, Stream) and len(train) == 33
    whole = batches(train, last=5)
    drawn = np.concatenate([indices for _, _, indices in whole])
    assert set(drawn.tolist()) <= sample_keys(train).keys()
    for ranks, workers, first in ((2, 2, 0), (1, 0, 1), (1, 0, 4)):  # also beyond a small shard
        assert batches_equal(batches(train, ranks, workers, first=first, last=5), whole[first:])


def test_empty_shard():
    with FileServer(shards([2, 0, 2])) as web:
        assert len(batches(open_stream(web, "train-{0..2}.tar"), batch=4, last=2)) == 2


TABLE = json.loads(shards()["data/sizes.json"])
CUT = shards()["data/train-5.tar"][:2000]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("sizes.json", b"[" * 999, r"sizes\.json"),
        ("sizes.json", json.dumps(TABLE | {"train-1.tar": 8}).encode(), "train-1.tar: .*more"),
        ("sizes.json", json.dumps(TABLE | {"train-1.tar": 11}).encode(), "train-1.tar: .* 9 "),
        ("sizes.json", b" " * 2000, "sizes.json: .* more than 1,000 bytes"),
        ("sizes.json", b'{"train-0.tar": 3}', "'train-1.tar', 'train-2.tar'"),
        ("classes.txt", None, "classes are not known.*\n.*--classes"),
        ("train-0.tar", b"", "train-0.tar: "),
        ("train-0.tar", b"\x1f\x8b" + b"x" * 100, "train-0.tar: "),
        ("train-0.tar", tar_bytes({}), "train-0.tar: "),
        ("train-4.tar", tar_bytes(samples(19, [0, 1, 7, 0])), "4.tar/s0021: label 7 .* 0 to 2"),
        ("train-4.tar", tar_bytes(samples(19, [0, "--5", 1, 0])), "not include the label '--5'"),
        ("train-5.tar", CUT, "train-5.tar: .*damaged"),
        ("train-5.tar", None, "train-5.tar: .*404"),
    ],
)  # fmt: skip
def test_errors_name_the_file(web, name, content, message, monkeypatch):
    monkeypatch.setattr(remote_shards, "_MAX_TEXT_BYTES", 1000)
    if content is None:
        del web.files[f"data/{name}"]
    else:
        web.files[f"data/{name}"] = content
    with pytest.raises(DataError, match=message):
        batches(open_stream(web), workers=2)


def test_bad_images_are_replaced_identically_on_all_ranks(web):
    files = samples(12, [0, 1, 2, 0, 1, 2])
    files["s0013.jpg"] = files["s0016.jpg"] = b"not an image"
    del files["s0014.jpg"]
    web.files["data/train-3.tar"] = tar_bytes({**files})
    source, bad = open_stream(web), list[ImageError]()
    reference = batches(source, last=9, bad=bad)
    assert {error.where for error in bad} == {f"train-3.tar/s00{i}" for i in (13, 14, 16)}
    for ranks, workers in ((2, 2), (3, 0)):
        assert batches_equal(batches(source, ranks, workers), reference)


# ---------------------------------------------------------------------------------------------
# Server behavior


def read_all(url: str) -> bytes:
    with RemoteFile(url) as file:
        return file.read()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("truncate", "/x", 70_000, times=3),
        Fault("truncate", "/x"),
        Fault("stall", "/x", 50_000),
        Fault("stall", "/x"),
        Fault("status", "/x", status=503, times=3),
        Fault("status", "/x", status=429),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.at or fault.status}",
)
def test_interrupted_download_resumes(web, monkeypatch, fault):
    if fault.kind == "stall":
        monkeypatch.setattr(remote, "READ_TIMEOUT", 0.5)
    web.files["x"] = np.random.default_rng(0).bytes(300_000)
    web.faults.append(fault)
    assert read_all(f"{web.url}/x") == web.files["x"]
    starts = [int(header[len("bytes=") : -1]) if header else 0 for header in web.ranges]
    expected = [fault.at * i for i in range(fault.times + 1)]
    # A slow machine may itself exceed the timeout.
    assert starts == expected or (fault.kind == "stall" and {*expected} <= {*starts})


def test_download_restarts_without_range_support(web):
    web.files["x"] = np.random.default_rng(0).bytes(300_000)
    web.faults += [Fault("truncate", "/x", 70_000), Fault("whole", "/x", nth=2)]
    assert read_all(f"{web.url}/x") == web.files["x"]


def test_long_forward_seek_skips_the_data_between(web):
    web.files["x"] = np.random.default_rng(0).bytes(3 << 20)
    with RemoteFile(f"{web.url}/x") as file:
        assert file.read(10) == web.files["x"][:10]
        file.seek(1000)
        assert file.read(10) == web.files["x"][1000:1010]
        file.seek(2 << 20)
        assert file.read() == web.files["x"][2 << 20 :]
    assert web.ranges == ["", f"bytes={2 << 20}-"]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ([Fault("truncate", at=1000), Fault("truncate", times=999)], "ended after 1,000 bytes"),
        ([Fault("stall", times=999)], r"did not respond for 0\.\d+ seconds"),
        ([Fault("status", status=500, times=999)], "500"),
        ([Fault("status", status=404, times=999)], "404"),
        ([Fault("status", status=302, headers={"Location": "/x"}, times=999)], "302"),
        ([Fault("body", body=b"<html>", headers={"Content-Type": "text/html"})], "web page"),
    ],
)
def test_permanent_failure_gives_a_one_line_error(web, monkeypatch, faults, message):
    if faults[0].kind == "stall":
        monkeypatch.setattr(remote, "READ_TIMEOUT", 0.1)
        monkeypatch.setattr(retry, "TIMEOUT", 2.0)
    web.files["x"] = bytes(5000)
    web.faults += faults
    with pytest.raises(DataError, match=message) as caught:
        read_all(f"{web.url}/x")
    assert caught.value.where == f"{web.url}/x" and "\n" not in caught.value.what


@pytest.mark.parametrize("header", ["ETag", "Last-Modified"])
def test_changed_etag_or_last_modified_invalidates_the_cache(web, header):
    found = set()
    for value in ("1", "1", "2"):
        fault = Fault("body", body=b"x" * 9, headers={header: value})
        web.faults = [fault]
        found.add(download(f"{web.url}/data/classes.txt"))
    assert len(found) == 2


def test_file_changed_during_download(web):
    web.files["x"] = bytes(300_000)
    web.faults.append(Fault("truncate", "/x", 70_000))
    with pytest.raises(DataError, match="changed"), RemoteFile(f"{web.url}/x") as file:
        while file.position < 70_000:
            file.read(10_000)
        web.files["x"] = b"1" * 300_000
        file.read(10_000)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/x", "http://nowhere.invalid/x", "http://[half/x"]
)
def test_unreachable_servers(url, monkeypatch):
    monkeypatch.setattr(retry, "TIMEOUT", 0.1)
    with pytest.raises(DataError) as caught:
        read_all(url)
    assert caught.value.where == url
    with pytest.raises(DataError, match="not an http"):
        open_splits(DataConfig("s3://bucket/x.tar"))


def test_transient_faults_do_not_change_the_batches(web):
    source = open_stream(web)
    reference = batches(source)
    web.faults += [Fault("truncate", f"train-{i}.tar", 1500, times=2) for i in range(7)]
    web.faults += [Fault("status", "train-3.tar", status=502, times=2)]
    assert batches_equal(batches(source), reference)
