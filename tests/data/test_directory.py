"""Datasets with one directory per class."""

import os
from collections import Counter
from contextlib import nullcontext
from itertools import chain

import pytest

from data.conftest import jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data import listing
from vitcli.data.classes import parse_class
from vitcli.data.dataset import open_dataset, open_split, open_splits, unreadable_images
from vitcli.data.files import HAS_HEIF, walk
from vitcli.errors import DataError, VitWarning


def test_class_directories(make_directory):
    root = make_directory({"dog": 10, "cat": 20})
    (root / "dog" / "notes.txt").write_text("not an image")
    (root / "dog" / ".hidden.jpg").write_text("not an image")
    (root / "dog" / "@eaDir").mkdir()
    (root / "dog" / "@eaDir" / "000.jpg").write_text("a thumbnail")
    (root / ".cache").mkdir()
    splits = open_splits(DataConfig(str(root)))
    assert splits.classes == (ClassLabel("cat", "cat"), ClassLabel("dog", "dog"))
    assert splits.val is not None and splits.test is None
    assert [list(s.counts()) for s in (splits.train, splits.val)] == [[18, 9], [2, 1]]
    for source in (splits.train, splits.val):
        for i, name in enumerate(source.names):
            assert source.read(i) == (root / name).read_bytes()
            assert name.split("/")[0] == source.classes[source.labels[i]].id
            assert source.where(i) == str(root / name)


TRAIN = {"train/a": 5, "train/b": 6}


def test_split_directories(make_directory):
    root = make_directory(TRAIN | {"val/b": 2, "val/a": 1, "test/b": 3})
    assert open_splits(DataConfig(str(root))).record["kind"] == "given"
    for split, name in (("auto", "test split"), ("val", "validation split")):
        source, description = open_split(DataConfig(str(root)), split)
        assert (len(source), description) == (3, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("directories", "classes", "counts", "warning"),
    [
        ({"cat/indoors": 2, "cat/outdoors": 3, "dog": 4}, "cat dog", [[5, 4]], None),
        (TRAIN | {"val/b": 2, "val/a": 1}, "a b", [[5, 6], [1, 2]], None),
        (TRAIN | {"valid/b": 2, "test/b": 3}, "a b", [[5, 6], [0, 2], [0, 3]], None),
        (TRAIN | {"Val/b": 2, "test/a": 1}, "a b", [[5, 6], [0, 2], [1, 0]], None),
        (TRAIN | {"test": 3}, "a b", [[5, 6]], "test"),
        ({"exam": 4, "test": 3}, "exam test", [[4, 3]], None),
        ({"bus": 1, "car": 2, "train": 3}, "bus car train", [[1, 2, 3]], None),
        ({"a_train/a": 2, "a_train/b": 2, "test/a": 2}, "a b", [[2, 2], [2, 0]], None),
        ({"a_train/a": 2, "a_test/a": 2, "b": 1}, "a_test a_train b", [[2, 2, 1]], "'a_test'"),
        ({"trainval/a": 2, "trainval/b": 2, "test/a": 2}, "test trainval", [[2, 4]], "'test'"),
        ({"images/cat": 4, "images/dog": 5, "about": 0}, "cat dog", [[4, 5]], "/images"),
        (
            {"s_train/s_train/a": 2, "s_train/s_train/b": 3, "s_test/a": 1, "s_pred/s_pred": 4},
            *("a b", [[2, 3], [1, 0]], "s_pred|/s_train"),
        ),
        ({"cat": 3, "dog": 3, "empty": 0}, "cat dog", [[3, 3]], "'empty'"),
        ({"__none__": 3, "dog": 3, "__MACOSX/dog": 1}, "__none__ dog", [[3, 3]], None),
        ({"Cat": 3, "cat": 2, "dog": 3}, "Cat cat dog", [[3, 2, 3]], "in case.*'Cat' and 'cat'"),
        ({"n00000002_crane": 3, "n00000001": 4}, "n00000001 n00000002", [[4, 3]], None),
        # With the accent as a character of its own in one split.
        ({"train/a": 3, "train/e\u0301": 2, "val/\xe9": 1}, "a \xe9", [[3, 2], [0, 1]], None),
    ],
)
def test_classes_and_splits(make_directory, directories, classes, counts, warning):
    root = make_directory(directories)
    (root / "images.tar.gz").write_bytes(b"what these came out of")
    with pytest.warns(VitWarning, match=warning) if warning else nullcontext():
        splits = open_splits(DataConfig(str(root), val_fraction=0))
    assert [label.id for label in splits.classes] == classes.split()
    sources = [splits.train, splits.val, splits.test]
    assert [list(source.counts()) for source in sources if source] == counts


def test_relative_path(make_directory, monkeypatch):
    monkeypatch.chdir(make_directory({"cat/indoors": 2, "dog": 4}))
    source, _ = open_split(DataConfig("."))
    assert source.names[0] == source.where(0) == "cat/indoors/000.jpg" and len(source.read(5)) > 0


def test_synset_ids_in_directory_names(make_directory):
    train = {"train/n00000002_crane": 3, "train/n00000001": 3}
    root = make_directory(train | {"val/n00000002": 2, "val/n00000001": 1})
    (root / "classes.txt").write_text("n00000002_crane\nn00000001 crane, a machine\n")
    splits = open_splits(DataConfig(str(root)))
    assert splits.classes[1] == ClassLabel("n00000001", "crane, a machine")
    assert list(splits.val.counts()) == [2, 1]


def test_class_list_sets_order_and_names(make_directory, tmp_path):
    root = make_directory({"cat": 3, "dog": 4})
    listing = tmp_path / "list.txt"
    listing.write_text("dog\tThe dog\nhorse\ncat\n")
    with pytest.warns(VitWarning, match="'horse'"):
        splits = open_splits(DataConfig(str(root), classes=str(listing), val_fraction=0))
    assert splits.classes[:2] == (ClassLabel("dog", "The dog"), ClassLabel("horse", "horse"))
    assert list(splits.train.counts()) == [4, 0, 3]
    (root / "classes.txt").write_text("dog\ncat\n")
    assert [label.id for label in open_splits(DataConfig(str(root))).classes] == ["dog", "cat"]
    (root / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match="'dog'"):
        open_splits(DataConfig(str(root)))
    (root / "classes.txt").write_text("dog\ncat\n")
    for name, number in (("dog", "0"), ("cat", "01")):
        (root / name).rename(root / number)
    source, _ = open_split(DataConfig(str(root)))
    assert list(source.counts()) == [4, 3] and source.names[0].startswith("0/")


def test_undecodable_class_directory_name():
    assert parse_class("caf\udce9") == ClassLabel(r"caf\udce9", r"caf\udce9")


def test_symlinks_are_followed_without_cycles(make_directory, tmp_path):
    root = make_directory({"cat": 3, "dog": 2})
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "a.png").write_bytes(jpeg(1))
    for name, target in (("more", other), ("up", root), ("again", root / "dog")):
        (root / "dog" / name).symlink_to(target, target_is_directory=True)
    (root / "horse").symlink_to(other, target_is_directory=True)
    source = open_split(DataConfig(str(root)))[0]
    assert list(source.counts()) == [3, 3, 1]
    assert str(root / "dog" / "more" / "a.png") in [source.where(i) for i in range(len(source))]


# ---------------------------------------------------------------------------------------------
# Ignored files and invalid input


def test_ignored_files_are_counted(make_directory):
    root = make_directory({"cat": 2, "dog": 2})
    for name in ("cat/IM0001", "cat/1.psd", "cat/1.cur", "dog/2.SVG", "dog/3.svg", "dog/4.heic"):
        (root / name).write_bytes(b"x")
    (root / "loose.jpg").write_bytes(jpeg(0))
    with pytest.warns(VitWarning) as caught:
        dataset = open_dataset(DataConfig(str(root)))
    assert dataset.train is not None and len(dataset.train) == (5 if HAS_HEIF else 4)
    loose, warning = (str(item.message) for item in caught)
    assert "ignored 1 image outside" in loose
    assert "without a suffix (1)" in warning
    assert ".cur (1)" in warning and ".psd (1)" in warning and ".svg (2)" in warning
    assert (".heic (1)" in warning and "pip install" in warning) is not HAS_HEIF


@pytest.mark.parametrize(
    "counts",
    [{}, {"cat": 0, "dog": 0}, {".": 3}, {"cat": 5}, {"val/cat": 3, "val/dog": 3}]
    + [{"train/cat": 3, "val/cat": 3, "valid/cat": 1}, {"n00000007_a": 1, "n00000007_b": 1}]
    + [{"train2017": 3, "val2017": 3, "annotations": 0}],
    ids=["empty", "no-images", "no-classes", "one-class", "no-training", "two-names", "one-id"]
    + ["only-splits"],
)
def test_unusable_directories(make_directory, counts):
    root = make_directory({name: n for name, n in counts.items() if name != "."})
    for i in range(counts.get(".", 0)):
        (root / f"{i}.jpg").write_bytes(jpeg(i))
    with pytest.raises(DataError) as caught:
        open_splits(DataConfig(str(root)))
    assert "\n" not in caught.value.what
    assert str(root) in str(caught.value.where) and caught.value.hint is not None


@pytest.mark.parametrize("name", ["absent", "x" * 300, "nul\0", "data.xyz"])
def test_unusable_paths(tmp_path, name):
    (tmp_path / "data.xyz").write_bytes(bytes(10))
    with pytest.raises(DataError) as caught:
        open_splits(DataConfig(str(tmp_path / name)))
    assert caught.value.hint is not None


# ---------------------------------------------------------------------------------------------
# Listings


@pytest.fixture
def large(tmp_path):
    """Three class directories of symlinks, one with other files too."""
    root, target = tmp_path / "large", tmp_path / "one.JPG"
    target.write_bytes(jpeg(0))
    for name in ("b", "a", "c"):
        (root / name).mkdir(parents=True)
        for i in range(300):
            (root / name / f"{i}.{'JPEG' if i % 2 else 'png'}").symlink_to(target)
    (root / "c" / ".hidden.jpg").write_bytes(b"")
    (root / "c" / "notes.txt").write_bytes(b"")
    (root / "c" / "x.psd").write_bytes(b"")
    return root


def test_listing_is_that_of_a_walk(large, monkeypatch):
    monkeypatch.setattr(listing, "REPORTED_CLASSES", 3)
    reported: list[str] = []
    with pytest.warns(VitWarning, match=r"[^x].psd \(1\)"):
        source = open_dataset(DataConfig(str(large)), reported.append).train
    assert source is not None and len(source) == 900
    walked = (sorted(walk(str(large / name), Counter())) for name in "abc")
    assert list(source.names) == [os.path.relpath(path, large) for path in chain(*walked)]
    assert reported == ["listing the images of 3 class directories"]


@pytest.mark.parametrize("name", ["more", "jpg", "stack.jpg"])
def test_subdirectories_of_classes_are_listed(large, name):
    (large / "a" / name).mkdir()
    (large / "a" / name / "1.jpg").write_bytes(jpeg(1))
    assert len(open_split(DataConfig(str(large)))[0]) == 901


def test_non_files_named_like_images_fail_when_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").write_bytes(jpeg(1))
    os.mkfifo(tmp_path / "a" / "pipe.jpg")
    (tmp_path / "b" / "gone.jpg").symlink_to(tmp_path / "nowhere")
    source = open_split(DataConfig(str(tmp_path)))[0]
    bad = [error.where for error in unreadable_images(source)]
    assert bad == [str(tmp_path / name) for name in ("a/pipe.jpg", "b/gone.jpg")]
