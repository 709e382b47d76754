"""Hub datasets, streamed from a local Hub server."""

import os

import datasets
import numpy as np
import pytest
from huggingface_hub import HfFileSystem
from huggingface_hub.utils import httpx

from data.conftest import jpeg
from data.test_parquet import parquet_bytes
from data.test_stream import batches, batches_equal, sample_keys
from loopback import Fault
from vitcli.config import DataConfig, _parse_data_path
from vitcli.data.dataset import open_dataset, open_splits
from vitcli.data.hub_dataset import HubShard
from vitcli.errors import DataError, HubError, ImageError

SIZES = [3, 9, 1, 6, 4]
HUB = "hf://datasets/org/pets"


@pytest.fixture(autouse=True)
def datasets_on_loopback(hub, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", hub.url)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    HfFileSystem.clear_instance_cache()


def table(start: int, rows: int) -> bytes:
    labels = [i % 3 for i in range(start, start + rows)]
    return parquet_bytes(start, labels, ["cat", "dog", "bird"])


@pytest.fixture
def pets(hub):
    files = {"README.md": b"---\nlicense: mit\n---\n"}
    for number, size in enumerate(SIZES):
        files[f"data/train-{number:05}-of-00005.parquet"] = table(sum(SIZES[:number]), size)
    files["data/validation-00000-of-00001.parquet"] = table(900, 3)
    hub.add("datasets/org/pets", files)


def test_each_row_once_per_epoch_for_any_ranks_and_workers(pets):
    splits = open_splits(DataConfig(HUB))
    assert [label.id for label in splits.classes] == ["cat", "dog", "bird"]
    assert splits.train.sizes.tolist() == SIZES
    assert splits.val.labels.tolist() == [0, 1, 2] and splits.val.read(1) == jpeg(901)
    expected = {
        f"train-{number:05}-of-00005.parquet row {row}": (sum(SIZES[:number]) + row) % 3
        for number, size in enumerate(SIZES)
        for row in range(size)
    }
    keys = sample_keys(splits.train)
    whole = batches(splits.train, last=6)
    drawn = [keys[i] for _, _, indices in whole for i in indices.tolist()]
    assert sorted(drawn[:23]) == sorted(drawn[23:46]) == sorted(expected)
    assert [expected[key] for key in drawn] == np.concatenate([b for _, b, _ in whole]).tolist()
    for ranks, workers in ((2, 2), (3, 0)):
        assert batches_equal(batches(splits.train, ranks, workers, last=6), whole)


def test_class_list_reorders_digits(hub, tmp_path):
    listing = tmp_path / "classes.txt"
    digits = {
        f"{split}.parquet": parquet_bytes(0, [0, 1], ["1", "0"]) for split in ("train", "val")
    }
    hub.add("datasets/org/digits", {"README.md": b""} | digits)
    listing.write_text("0\n1\n")
    for classes, expected in ((str(listing), 1), (None, 0)):
        splits = open_splits(DataConfig("hf://datasets/org/digits", classes=classes))
        first = splits.train.label(next(splits.train.shards[0].samples(0)))
        assert first == splits.val.labels[0] == expected


def test_only_local_files_may_have_paths(hub, tmp_path):
    (tmp_path / "mine.jpg").write_bytes(jpeg(7))
    content = parquet_bytes(0, [0, 1], path=str(tmp_path / "mine.jpg"))
    (tmp_path / "train.parquet").write_bytes(content)
    assert open_splits(DataConfig(str(tmp_path / "train.parquet"))).train.read(1) == jpeg(7)
    files = {"README.md": b"", "train.parquet": table(0, 3), "val.parquet": content}
    hub.add("datasets/org/paths", files)
    val = open_splits(DataConfig("hf://datasets/org/paths")).val
    with pytest.raises(ImageError, match="no image"):
        val.read(1)


CONFIGURATIONS = """---
configs:
- config_name: small
  data_files:
  - split: full
    path: small/*
- config_name: big
  data_files:
  - split: full
    path: big/*
---
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "no such repo on the Hub"),
        ("images", "not stored as Parquet"),
        ("pets", "'small' and 'big'"),
        ("pets/medium", "no configuration 'medium', only 'small' and 'big'"),
        ("pets/small", "'full'"),
        ("pets@other", "no revision 'other'"),
        ("pets@refs/pr/1/small", "'full'"),
        ("gated", "access is restricted"),
        ("token", "rejected the token"),
        ("login", "request failed"),
        ("damaged", "not a valid Parquet file"),
    ],
)
def test_datasets_that_cannot_be_streamed(hub, name, message, monkeypatch):
    parts = {f"{part}/0.parquet": table(0, 3) for part in ("small", "big")}
    commit = hub.add("datasets/org/pets", {"README.md": CONFIGURATIONS.encode()} | parts)
    hub.repos["datasets/org/pets"].refs["refs/pr/1"] = commit
    hub.add("datasets/org/images", {"README.md": b"", "data/1.jpg": jpeg(1)})
    hub.add("datasets/org/gated", {"data/train.parquet": table(0, 3)}, gated=True)
    hub.add("datasets/org/damaged", {"README.md": b"", "data/train.parquet": b"damaged" * 9})
    if name == "token":
        monkeypatch.setenv("HF_TOKEN", "hf_expired")
    if name == "login":
        hub.faults.append(Fault("body", "/api/datasets", body=b"<html>Log in</html>"))
    hub.readers.clear()
    with pytest.raises((DataError, HubError), match=message) as caught:
        open_splits(DataConfig(f"hf://datasets/org/{name}"))
    assert "\n" not in caught.value.what
    if name == "pets/medium":
        assert str(caught.value.hint).endswith("such as hf://datasets/org/pets/small")


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_unreachable_hub_fails_fast(endpoint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("datasets.load_dataset_builder", None)  # would retry for a minute
    with pytest.raises(HubError, match="no such file or directory, and cannot reach"):
        open_dataset(DataConfig("hf://datasets/org/pets"))


def test_lost_connection_is_retried_once_the_hub_has_responded(pets, pauses, monkeypatch):
    load, attempts = datasets.load_dataset_builder, []

    def fail_once(*args, **options):
        attempts.append(args)
        if len(attempts) == 1:
            raise httpx.ConnectError("network is unreachable")
        return load(*args, **options)

    monkeypatch.setattr(datasets, "load_dataset_builder", fail_once)
    assert len(open_splits(DataConfig(HUB)).train) == sum(SIZES)
    assert len(attempts) == 2 and len(pauses) == 1


def test_no_rows_are_lost_or_repeated_after_a_failure(pets, pauses, monkeypatch):
    shard = open_splits(DataConfig(HUB)).train.shards[1]
    expected, read_rows, starts = list(shard.samples(0)), HubShard._read_rows, []

    def fail_once(self, start):
        starts.append(start)
        for count, row in enumerate(read_rows(self, start)):
            if len(starts) == 1 and count == 4:
                raise ConnectionError("reset by peer")
            yield row

    monkeypatch.setattr(HubShard, "_read_rows", fail_once)
    assert list(shard.samples(2)) == expected[2:]
    assert starts == [2, 6] and len(pauses) == 1


def test_local_path_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _parse_data_path("org/pets") == "hf://datasets/org/pets"
    assert DataConfig("hf://datasets/org/pets@dev/all").repo == "org/pets"
    assert DataConfig("/org/pets").repo is None
    assert DataConfig(_parse_data_path("org/pets")).name == "pets"
    for path in ("org", "org/pets.csv", "org/x/y", "./org/pets", "org/train-{0..3}.tar", "/org/x"):
        assert _parse_data_path(path) == os.path.abspath(path)
    (tmp_path / "org" / "pets").mkdir(parents=True)
    assert _parse_data_path("org/pets") == str(tmp_path / "org" / "pets")
    several = "https://host/a/train-{0..9}.tar?key=1::val.tar"
    assert (
        _parse_data_path(several) == f"https://host/a/train-{{0..9}}.tar?key=1::{tmp_path}/val.tar"
    )
    assert DataConfig(several).name == "train-{0..9}.tar"
