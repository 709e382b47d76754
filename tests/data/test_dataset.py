"""Splits: deterministic, stratified, recorded and reused; sources and their names."""

import json
import pickle
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from data.conftest import jpeg, labeled
from vitcli.config import ClassLabel, DataConfig
from vitcli.data.dataset import open_split, open_splits, stratified
from vitcli.data.source import Names, Source
from vitcli.errors import DataError, MissingExtraError, VitWarning


def source_with_counts(counts: list[int]) -> Source:
    classes = [ClassLabel(str(i), str(i)) for i in range(len(counts))]
    return labeled(np.repeat(np.arange(len(counts)), counts), classes)


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.99])
def test_stratified_split(fraction):
    counts = [1, 2, 3, 10, 105, 1000]
    source = source_with_counts(counts)
    held_out = stratified(source, fraction, seed=3)
    assert np.array_equal(held_out, np.unique(held_out))
    of_each = np.bincount(source.labels[held_out], minlength=6)
    assert of_each[0] == 0
    for count, n in zip(counts[1:], of_each[1:], strict=True):
        assert 1 <= n < count
        assert n == pytest.approx(fraction * count, abs=1)
    assert np.array_equal(held_out, stratified(source, fraction, seed=3))
    assert not np.array_equal(held_out, stratified(source, fraction, seed=4))


@pytest.mark.filterwarnings("error")
def test_split_is_recorded_and_reused(make_directory):
    root = make_directory({"cat": 20, "dog": 30})
    config = DataConfig(str(root), val_fraction=0.2)
    first = open_splits(config)
    record = json.loads(json.dumps(first.record))
    same = open_splits(config, record=record)
    assert same.record == record
    assert list(same.train.names) == list(first.train.names)
    for number in range(5):  # sort first: a newly drawn split would differ
        (root / "cat" / f"+{number}.jpg").write_bytes(jpeg(900 + number))
    with pytest.warns(VitWarning, match="has changed"):
        again = open_splits(config, record=record)
    assert set(again.val.names) == set(first.val.names)
    assert len(again.train) == len(first.train) + 5
    source, description = open_split(config, "auto", record=record)
    assert set(source.names) == set(first.val.names) and "held-out" in description
    with pytest.warns(VitWarning, match="trained on"):
        source, _ = open_split(config, "train", record=record)
    assert set(source.names) == set(again.train.names)
    (root / first.val.names[0]).unlink()
    with pytest.warns(VitWarning, match="1 of the 10"), pytest.warns(VitWarning, match="changed"):
        fewer = open_splits(config, record=record)
    assert len(fewer.val) == len(first.val) - 1
    with pytest.raises(DataError, match="held out"), pytest.warns(VitWarning):
        open_split(config, "val", {**record, "val": ["gone.jpg"]})


@pytest.mark.filterwarnings("error")
def test_test_split_is_not_used_for_selection(make_directory):
    root = make_directory({"train/cat": 10, "train/dog": 10, "test/cat": 3, "test/dog": 3})
    config = DataConfig(str(root), val_fraction=0.2)
    plain, selecting = open_splits(config, select=False), open_splits(config)
    assert (plain.val, len(plain.train), plain.record["kind"]) == (None, 20, "none")
    assert selecting.val is not None and len(selecting.train) == 16
    assert all(name.startswith("train/") for name in selecting.val.names)
    assert selecting.test is not None and all(n.startswith("test/") for n in selecting.test.names)
    with pytest.raises(DataError):
        open_split(config, "val")
    (root / selecting.val.names[0]).unlink()  # of no interest for the test split
    source, description = open_split(config, record=selecting.record)
    assert len(source) == 6 and description == "test split"


def test_small_classes(make_directory):
    root = make_directory({"cat": 10, "dog": 1})
    with pytest.warns(VitWarning, match="'dog' has only one image"):
        splits = open_splits(DataConfig(str(root)))
    assert [list(s.counts()) for s in (splits.train, splits.val)] == [[9, 1], [1, 0]]
    nothing = open_splits(DataConfig(str(root), val_fraction=0))
    assert (nothing.val, len(nothing.train), nothing.record["kind"]) == (None, 11, "none")
    for image in sorted((root / "cat").iterdir())[1:]:
        image.unlink()
    assert open_splits(DataConfig(str(root))).val is None  # no class has two images


def test_copied_dataset_reuses_the_recorded_split(make_directory, tmp_path):
    root = make_directory({"cat": 20, "dog": 30})
    first, copy = open_splits(DataConfig(str(root))), str(shutil.copytree(root, tmp_path / "copy"))
    messages: list[str] = []
    source, description = open_split(DataConfig(copy), "auto", first.record, messages.append)
    assert set(source.names) == set(first.val.names) and "held-out" in description
    assert len(messages) == 1 and "copy" in messages[0]
    (tmp_path / "copy" / "cat" / "another.jpg").write_bytes(jpeg(900))
    source, description = open_split(DataConfig(copy), "auto", first.record, messages.append)
    assert len(source) == 51 and description == "all images" and len(messages) == 1


def test_classes_without_training_images(make_directory):
    root = make_directory({"train/cat": 3, "train/dog": 3, "val/bird": 1})
    with pytest.raises(DataError, match="'bird'"):
        open_splits(DataConfig(str(root)))
    assert open_splits(DataConfig(str(root), merge_val=True)).train.counts().tolist() == [1, 3, 3]
    assert len(open_split(DataConfig(str(root)))[0]) == 1  # evaluating on it is allowed


def test_merge_val_keeps_the_test_split_separate(make_directory):
    root = make_directory(
        {f"{split}/{name}": 3 for split in ("train", "val", "test") for name in "ab"}
    )
    first = open_splits(DataConfig(str(root)))
    merged = open_splits(DataConfig(str(root), merge_val=True))
    assert first.val is not None and merged.val is None and merged.record["kind"] == "merged"
    assert merged.test is not None and len(merged.test) == 6
    for record, trained_on in ((first.record, ["train"]), (merged.record, ["train", "val"])):
        for split in ("train", "val", "test"):
            warns = pytest.warns(VitWarning, match="optimistic")
            with warns if split in trained_on else nullcontext():
                open_split(DataConfig(str(root)), split, record)
    both = [*(first.train.where(i) for i in range(6)), *(first.val.where(i) for i in range(6))]
    assert list(merged.train.names) == both and list(merged.train.counts()) == [6, 6]
    shuffled = pickle.loads(pickle.dumps(merged.train.select(np.array([7, 0, 11, 5]))))
    expected = [first.val.read(1), first.train.read(0), first.val.read(5), first.train.read(5)]
    assert [shuffled.read(i) for i in range(4)] == expected
    assert Path(shuffled.where(0)).read_bytes() == expected[0]
    whole = open_splits(DataConfig(str(root / "train"), merge_val=True))  # no images are held out
    assert whole.val is None and len(whole.train) == 6


@pytest.mark.parametrize(("name", "package"), [("x.parquet", "datasets"), ("x.tar", "webdataset")])
def test_missing_package_is_named(tmp_path, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        open_split(DataConfig(str(tmp_path / name)))
    assert f"pip install {package}" in str(caught.value.hint)


def test_packed_names_round_trip():
    strings = ["a", "", "äöü/猫.jpg", "bad\udcff.jpg", "z" * 300]
    names = Names.pack(strings)
    assert list(names) == strings and names[-1] == strings[-1]
    assert list(names.select(np.array([4, 0])).select(np.array([1]))) == ["a"]
    assert list(Names(*names.arrays())) == strings
    assert list(Names(*names.select(np.array([2, 1])).arrays())) == [strings[2], strings[1]]
    with pytest.raises(IndexError):
        names[5]


def test_fingerprint_depends_on_names_labels_and_classes():
    source = source_with_counts([3, 4])
    assert source.fingerprint() == source_with_counts([3, 4]).fingerprint()
    others = [
        source_with_counts([4, 3]),
        source_with_counts([3, 5]),
        source.select(np.array([1, 0, 2, 3, 4, 5, 6])),
    ]
    assert len({source.fingerprint(), *(other.fingerprint() for other in others)}) == 4
