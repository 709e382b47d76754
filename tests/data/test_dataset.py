"""The validation split: deterministic, stratified, written down and re-used."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from data.conftest import MakeFolder, jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data.dataset import open_data, open_split, stratified
from vitcli.data.source import FileReader, Names, Source


def labelled(counts: list[int]) -> Source:
    labels = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
    names = Names.pack(f"{i}.jpg" for i in range(len(labels)))
    classes = tuple(ClassLabel(str(i), str(i)) for i in range(len(counts)))
    return Source(classes, labels, names, FileReader(Path("."), names), Path("."))


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.99])
def test_every_class_gives_its_share(fraction: float) -> None:
    counts = [1, 2, 3, 10, 105, 1000]
    source = labelled(counts)
    held = stratified(source, fraction, seed=3)
    assert np.array_equal(held, np.unique(held))
    of_each = np.bincount(source.labels[held], minlength=6)
    assert of_each[0] == 0
    for count, n in zip(counts[1:], of_each[1:], strict=True):
        assert 1 <= n < count
        assert n == pytest.approx(fraction * count, abs=1)


def test_the_split_depends_on_its_seed_alone() -> None:
    source = labelled([50, 60])
    assert np.array_equal(stratified(source, 0.2, 1), stratified(source, 0.2, 1))
    assert not np.array_equal(stratified(source, 0.2, 1), stratified(source, 0.2, 2))


def test_the_split_is_written_down_and_re_used(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 20, "dog": 30})
    config = DataConfig(str(root), val_fraction=0.2)
    first = open_data(config)
    assert first.val is not None
    record = json.loads(json.dumps(first.record))
    for number in range(5):  # sorted before the others: another split, were it drawn anew
        (root / "cat" / f"+{number}.jpg").write_bytes(jpeg(900 + number))
    again = open_data(config, record=record)
    assert again.val is not None
    assert set(again.val.names) == set(first.val.names)
    assert len(again.train) == len(first.train) + 5
    assert any("has changed" in warning for warning in again.warnings)
    source, words, _ = open_split(config, "auto", record=record)
    assert set(source.names) == set(first.val.names)
    assert words == "images held out of training"
    gone = root / first.val.names[0]
    gone.unlink()
    fewer = open_data(config, record=record)
    assert fewer.val is not None
    assert len(fewer.val) == len(first.val) - 1
    assert any("are gone" in warning for warning in fewer.warnings)


def test_nothing_is_held_out_beside_a_test_part_where_nothing_is_selected(
    make_folder: MakeFolder,
) -> None:
    root = make_folder({"train/cat": 10, "train/dog": 10, "test/cat": 3, "test/dog": 3})
    config = DataConfig(str(root), val_fraction=0.2)
    whole, parted = open_data(config, select=False), open_data(config)
    assert (whole.val, len(whole.train), whole.record["kind"]) == (None, 20, "none")
    assert parted.val is not None and len(parted.train) == 16


def test_an_unchanged_data_set_says_nothing(make_folder: MakeFolder) -> None:
    config = DataConfig(str(make_folder({"cat": 20, "dog": 30})))
    first = open_data(config)
    again = open_data(config, record=first.record)
    assert again.warnings == first.warnings == ()
    assert again.record == first.record
    assert list(again.train.names) == list(first.train.names)


def test_no_validation(make_folder: MakeFolder) -> None:
    splits = open_data(DataConfig(str(make_folder({"cat": 2, "dog": 3})), val_fraction=0))
    assert splits.val is None
    assert len(splits.train) == 5
    assert splits.record["kind"] == "none"


def test_held_out_images_are_trained_on_once_everything_is_chosen(
    make_folder: MakeFolder,
) -> None:
    root = make_folder({"cat": 20, "dog": 30})
    splits = open_data(DataConfig(str(root), merge_val=True))
    assert splits.val is None and len(splits.train) == 50
    assert splits.record["kind"] == "merged"
    again = open_data(DataConfig(str(root), merge_val=True), record=splits.record)
    assert list(again.train.names) == list(splits.train.names) and again.warnings == ()


def test_a_validation_part_of_its_own_is_merged_and_a_test_part_is_not(
    make_folder: MakeFolder,
) -> None:
    root = make_folder({f"{part}/{name}": 3 for part in ("train", "val", "test") for name in "ab"})
    apart = open_data(DataConfig(str(root)))
    merged = open_data(DataConfig(str(root), merge_val=True))
    assert apart.val is not None and merged.val is None and apart.test is not None
    assert merged.test is not None and len(merged.test) == 6
    both = [*(apart.train.where(i) for i in range(6)), *(apart.val.where(i) for i in range(6))]
    assert list(merged.train.names) == both and list(merged.train.counts()) == [6, 6]
    shuffled = pickle.loads(pickle.dumps(merged.train.select(np.array([7, 0, 11, 5]))))
    expected = [apart.val.read(1), apart.train.read(0), apart.val.read(5), apart.train.read(5)]
    assert [shuffled.read(i) for i in range(4)] == expected
    assert Path(shuffled.where(0)).read_bytes() == expected[0]


def test_classes_of_a_model_reach_every_part(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 4, "train/dog": 4, "val/dog": 2, "test/cat": 2})
    model = tuple(ClassLabel(id, id) for id in ("bird", "dog", "cat"))
    splits = open_data(DataConfig(str(root)), classes=model)
    assert splits.val is not None
    assert splits.test is not None
    assert splits.classes == splits.val.classes == splits.test.classes == model
    assert list(splits.train.counts()) == [0, 4, 4]
    assert set(splits.val.labels) == {1}
    assert set(splits.test.labels) == {2}


def test_names_are_packed_strings() -> None:
    strings = ["a", "", "äöü/猫.jpg", "bad\udcff.jpg", "z" * 300]
    names = Names.pack(strings)
    assert list(names) == strings
    assert names[-1] == strings[-1]
    assert list(names[1:3]) == strings[1:3]
    assert list(names.select(np.array([4, 0])).select(np.array([1]))) == ["a"]
    assert list(Names(*names.arrays())) == strings
    assert list(Names(*names.select(np.array([2, 1])).arrays())) == [strings[2], strings[1]]
    assert list(Names.join([names, Names.pack([]), names[:1]])) == [*strings, "a"]
    with pytest.raises(IndexError):
        names[5]


def test_a_source_can_be_pickled(make_folder: MakeFolder) -> None:
    source = open_data(DataConfig(str(make_folder({"cat": 5, "dog": 5})))).train
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.read(i) for i in range(len(copy))] == [source.read(i) for i in range(len(source))]
    assert copy.fingerprint() == source.fingerprint()


def test_a_fingerprint_sees_names_labels_and_classes() -> None:
    source = labelled([3, 4])
    assert source.fingerprint() == labelled([3, 4]).fingerprint()
    others = [labelled([4, 3]), labelled([3, 5]), source.select(np.array([1, 0, 2, 3, 4, 5, 6]))]
    assert len({source.fingerprint(), *(other.fingerprint() for other in others)}) == 4


def test_a_million_names_take_little_memory() -> None:
    names = Names.pack(f"n0{i % 1000:07}/image_{i}.JPEG" for i in range(100_000))
    text, ends = names.arrays()
    assert (text.nbytes + ends.nbytes) / len(names) < 40
    assert names[99_999] == "n00000999/image_99999.JPEG"
