"""Folders of class folders, and CSVs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data.conftest import MakeFolder, jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data.dataset import open_data, open_split
from vitcli.errors import DataError, ImageError


def test_class_folders(make_folder: MakeFolder) -> None:
    root = make_folder({"dog": 10, "cat": 20})
    (root / "dog" / "notes.txt").write_text("not an image")
    (root / "dog" / ".hidden.jpg").write_text("not an image")
    (root / ".cache").mkdir()
    splits = open_data(DataConfig(str(root)))
    assert splits.classes == (ClassLabel("cat", "cat"), ClassLabel("dog", "dog"))
    assert splits.val is not None
    assert splits.test is None
    assert list(splits.val.counts()) == [2, 1]
    assert list(splits.train.counts()) == [18, 9]
    for source in (splits.train, splits.val):
        for i in range(len(source)):
            name = source.names[i]
            assert source.read(i) == (root / name).read_bytes()
            assert name.split("/")[0] == source.classes[source.labels[i]].id
            assert source.where(i) == str(root / name)


def test_images_in_folders_below_a_class_folder_belong_to_it(make_folder: MakeFolder) -> None:
    root = make_folder({"cat/indoors": 2, "cat/outdoors": 3, "dog": 4})
    source, _, _ = open_split(DataConfig(str(root)))
    assert list(source.counts()) == [5, 4]


@pytest.mark.parametrize("word", ["val", "valid", "validation", "Val"])
def test_parts(make_folder: MakeFolder, word: str) -> None:
    root = make_folder(
        {"train/cat": 5, "train/dog": 6, f"{word}/dog": 2, f"{word}/cat": 1, "test/dog": 3}
    )
    splits = open_data(DataConfig(str(root)))
    assert splits.val is not None
    assert splits.test is not None
    assert list(splits.train.counts()) == [5, 6]
    assert list(splits.val.counts()) == [1, 2]
    assert list(splits.test.counts()) == [0, 3]
    assert splits.record["kind"] == "given"
    source, words, _ = open_split(DataConfig(str(root)))
    assert (len(source), words) == (3, "test part")
    source, words, _ = open_split(DataConfig(str(root)), "val")
    assert (len(source), words) == (3, "validation part")


def test_a_test_part_selects_nothing(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 10, "train/dog": 10, "test/dog": 30, "test/cat": 30})
    splits = open_data(DataConfig(str(root)))
    assert splits.val is not None
    assert all(name.startswith("train/") for name in splits.val.names)
    assert splits.test is not None
    assert all(name.startswith("test/") for name in splits.test.names)


def test_an_unlabelled_test_folder_is_left_out(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 5, "train/dog": 5, "test": 3})
    splits = open_data(DataConfig(str(root)))
    assert splits.test is None
    assert any("no class folders" in warning for warning in splits.warnings)


def test_a_class_called_test_is_a_class(make_folder: MakeFolder) -> None:
    root = make_folder({"test": 4, "exam": 4})
    assert [c.id for c in open_data(DataConfig(str(root))).classes] == ["exam", "test"]


def test_a_class_called_train_is_a_class(make_folder: MakeFolder) -> None:
    root = make_folder({"bus": 4, "car": 4, "train": 4})
    assert [label.id for label in open_data(DataConfig(str(root))).classes] == [
        "bus", "car", "train",
    ]  # fmt: skip


def test_an_archive_beside_the_parts_is_not_the_data(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 4, "train/dog": 4, "val/cat": 2, "val/dog": 2})
    (root / "images.tar.gz").write_bytes(b"what these came out of")
    assert len(open_data(DataConfig(str(root))).train) == 8


def test_synsets_keep_their_id(make_folder: MakeFolder) -> None:
    root = make_folder({"n01440764": 3, "n02123045_tabby_cat": 3, "n12": 3})
    assert open_data(DataConfig(str(root))).classes == (
        ClassLabel("n01440764", "n01440764"),
        ClassLabel("n02123045", "tabby cat"),
        ClassLabel("n12", "n12"),
    )


def test_classes_are_matched_between_parts_by_id_not_by_order(make_folder: MakeFolder) -> None:
    root = make_folder(
        {"train/n00000001_b": 3, "train/n00000002_a": 3, "val/n00000002": 2, "val/n00000001": 1}
    )
    splits = open_data(DataConfig(str(root)))
    assert splits.val is not None
    assert [c.id for c in splits.classes] == ["n00000001", "n00000002"]
    assert list(splits.val.counts()) == [1, 2]


def test_a_list_of_classes_gives_the_order_and_the_names(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder({"cat": 3, "dog": 4})
    listing = tmp_path / "list.txt"
    listing.write_text("dog\tThe dog\nhorse\ncat\n")
    splits = open_data(DataConfig(str(root), classes=str(listing)))
    assert splits.classes[:2] == (ClassLabel("dog", "The dog"), ClassLabel("horse", "horse"))
    assert list(splits.train.counts() + splits.val.counts()) == [4, 0, 3]  # type: ignore[union-attr]
    assert any("'horse'" in warning for warning in splits.warnings)
    (root / "classes.txt").write_text("dog\ncat\n")
    assert [c.id for c in open_data(DataConfig(str(root))).classes] == ["dog", "cat"]


def test_labels_are_aligned_to_a_model(make_folder: MakeFolder) -> None:
    root = make_folder({"n00000002": 2, "tabby_cat": 3, "tench": 1})
    model = (
        ClassLabel("n00000009", "tench, Tinca tinca"),
        ClassLabel("n00000002", "goldfish"),
        ClassLabel("n00000003", "Tabby cat"),
    )
    source, words, _ = open_split(DataConfig(str(root)), classes=model)
    assert words == "all images"
    assert source.classes == model
    assert list(source.counts()) == [1, 2, 3]


def test_a_full_name_wins_over_a_first_name(make_folder: MakeFolder) -> None:
    root = make_folder({"maillot": 2, "dog": 1})
    model = (
        ClassLabel("n1", "maillot, tank suit"),
        ClassLabel("n2", "maillot"),
        ClassLabel("n3", "dog"),
    )
    source, _, _ = open_split(DataConfig(str(root)), classes=model)
    assert list(source.counts()) == [0, 2, 1]


def test_ambiguous_and_unknown_classes_are_listed(make_folder: MakeFolder) -> None:
    root = make_folder({"crane": 2, "dog": 1})
    model = (ClassLabel("n1", "crane"), ClassLabel("n2", "crane"), ClassLabel("n3", "dog"))
    with pytest.raises(DataError, match="'crane' could be more than one class"):
        open_split(DataConfig(str(root)), classes=model)
    with pytest.raises(DataError, match="'crane' is not among the 1 classes of the model"):
        open_split(DataConfig(str(root)), classes=model[2:])


def test_an_archive_beside_the_class_folders_is_not_the_data(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 3, "dog": 3})
    (root / "images.tgz").write_bytes(b"the download")
    assert len(open_split(DataConfig(str(root)))[0]) == 6


def test_a_link_to_a_class_folder_is_followed(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder({"cat": 3})
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "a.png").write_bytes(jpeg(1))
    (root / "dog").symlink_to(other, target_is_directory=True)
    assert list(open_split(DataConfig(str(root)))[0].counts()) == [3, 1]


def test_a_link_inside_a_class_folder_is_followed_but_never_back_up(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    root = make_folder({"cat": 3, "dog": 2})
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "a.png").write_bytes(jpeg(1))
    for name, target in (("more", other), ("up", root), ("again", root / "dog")):
        (root / "dog" / name).symlink_to(target, target_is_directory=True)
    source = open_split(DataConfig(str(root)))[0]
    assert list(source.counts()) == [3, 3]
    assert str(root / "dog" / "more" / "a.png") in [source.where(i) for i in range(len(source))]


# ---------------------------------------------------------------------------------------------
# Bad input


def fails(root: Path, message: str, hint: str = "") -> None:
    with pytest.raises(DataError, match=message) as caught:
        open_data(DataConfig(str(root)))
    assert "\n" not in caught.value.what
    assert str(root) in str(caught.value.where)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_no_such_folder(tmp_path: Path) -> None:
    fails(tmp_path / "absent", "there is no such file or folder")


def test_an_empty_folder(tmp_path: Path) -> None:
    fails(tmp_path, "no images in it", "DATA/cat/1.jpg")


def test_a_folder_without_images(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 0, "dog": 0})
    (root / "cat" / "notes.txt").write_text("nothing")
    fails(root, "no images in it", "DATA/cat/1.jpg")


def test_images_without_class_folders(make_folder: MakeFolder) -> None:
    root = make_folder({})
    for i in range(3):
        (root / f"{i}.jpg").write_bytes(jpeg(i))
    fails(root, r"images in it \(3\), but no class folders", "a folder of its own")


def test_one_class(make_folder: MakeFolder) -> None:
    fails(make_folder({"cat": 5}), "all images are of one class, 'cat'", "two")


def test_one_class_can_be_evaluated(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 5})
    model = (ClassLabel("dog", "dog"), ClassLabel("cat", "cat"))
    source, _, _ = open_split(DataConfig(str(root)), classes=model)
    assert set(source.labels) == {1}


def test_a_class_with_one_image_is_trained_on(make_folder: MakeFolder) -> None:
    splits = open_data(DataConfig(str(make_folder({"cat": 10, "dog": 1}))))
    assert splits.val is not None
    assert list(splits.train.counts()) == [9, 1]
    assert list(splits.val.counts()) == [1, 0]
    assert any("only one image of 'dog'" in warning for warning in splits.warnings)


def test_no_class_has_two_images(make_folder: MakeFolder) -> None:
    splits = open_data(DataConfig(str(make_folder({"cat": 1, "dog": 1}))))
    assert splits.val is None
    assert splits.split_note == "validation: none, as no class has two images"


def test_an_empty_class_folder_is_left_out_and_said(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 3, "dog": 3, "empty": 0})
    (root / "loose.jpg").write_bytes(jpeg(0))
    splits = open_data(DataConfig(str(root)))
    assert len(splits.classes) == 2
    assert any("no images in 'empty'" in warning for warning in splits.warnings)
    assert any("left out, as they are outside the class folders: 1" in w for w in splits.warnings)


def test_a_class_without_training_images(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 3, "train/dog": 3, "val/bird": 1})
    with pytest.raises(DataError, match="'bird' has no images in the training part") as caught:
        open_data(DataConfig(str(root)))
    assert caught.value.hint == "add some there, or take it out of the validation part"
    assert open_data(DataConfig(str(root), merge_val=True)).train.counts().tolist() == [1, 3, 3]
    assert len(open_split(DataConfig(str(root)))[0]) == 1  # to evaluate on it is no mistake


def test_two_names_for_one_part(make_folder: MakeFolder) -> None:
    root = make_folder({"train/cat": 3, "val/cat": 3, "valid/cat": 1})
    fails(root, "'val' and 'valid' both mean val", "remove one")


def test_only_a_validation_part(make_folder: MakeFolder) -> None:
    fails(make_folder({"val/cat": 3, "val/dog": 3}), "no training part", "train")


def test_a_part_that_is_not_there(make_folder: MakeFolder) -> None:
    with pytest.raises(DataError, match="there is no test part") as caught:
        open_split(DataConfig(str(make_folder({"train/cat": 3, "val/cat": 3}))), "test")
    assert caught.value.hint == "this data has a validation part and a training part"


def test_a_class_that_the_list_does_not_have(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 3, "dog": 3})
    (root / "classes.txt").write_text("cat\n")
    with pytest.raises(DataError, match="'dog' is not among the 1 classes"):
        open_data(DataConfig(str(root)))


def test_a_image_that_went_away(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 2, "dog": 2})
    source, _, _ = open_split(DataConfig(str(root)))
    (root / source.names[0]).unlink()
    with pytest.raises(ImageError, match="No such file"):
        source.read(0)


# ---------------------------------------------------------------------------------------------
# CSV


def write_csv(root: Path, text: str, name: str = "data.csv") -> Path:
    path = root / name
    path.write_text(text, "utf-8")
    return path


def test_csv(make_folder: MakeFolder) -> None:
    root = make_folder({"a": 4})
    rows = "".join(
        f"a/{i:03}.jpg,{label}\n" for i, label in enumerate(["dog", "cat", "cat", "dog"])
    )
    path = write_csv(root, "\ufeffPath,Label\n" + rows + "\n")
    source, _, warnings = open_split(DataConfig(str(path)))
    assert [source.classes[i].id for i in source.labels] == ["dog", "cat", "cat", "dog"]
    assert source.read(2) == (root / "a/002.jpg").read_bytes()
    assert source.where(2) == str(root / "a/002.jpg")
    assert not warnings


@pytest.mark.parametrize(("name", "sign"), [("x.tsv", "\t"), ("x.csv", ";"), ("x.csv", ",")])
def test_csv_with_parts_and_other_columns(make_folder: MakeFolder, name: str, sign: str) -> None:
    root = make_folder({"a": 4})
    lines = ["who,filename,class,split", "x,a/000.jpg,n01440764,train", "x,a/001.jpg,cat,train"]
    lines += [f"x,{root}/a/002.jpg,cat,val", "x,a/003.jpg,cat,test"]
    path = write_csv(root, "\n".join(lines).replace(",", sign), name)
    splits = open_data(DataConfig(str(path)))
    assert splits.val is not None
    assert splits.test is not None
    assert [c.id for c in splits.classes] == ["cat", "n01440764"]
    assert [len(s) for s in (splits.train, splits.val, splits.test)] == [2, 1, 1]
    assert splits.val.read(0) == (root / "a/002.jpg").read_bytes()


def test_csv_of_indices(make_folder: MakeFolder, tmp_path: Path) -> None:
    root = make_folder({"a": 3})
    path = write_csv(root, "path,label\na/000.jpg,2\na/001.jpg,0\na/002.jpg,2\n")
    source, _, warnings = open_split(DataConfig(str(path)))
    assert [c.id for c in source.classes] == ["0", "1", "2"]
    assert "--classes FILE" in warnings[0]
    (tmp_path / "names").write_text("n01440764\ttench\ncat\ndog\n")
    source, _, warnings = open_split(DataConfig(str(path), classes=str(tmp_path / "names")))
    assert [source.classes[i].name for i in source.labels] == ["dog", "tench", "dog"]
    assert not warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column 'path'; its first line is empty"),
        ("a/000.jpg,cat\n", "no column 'path'; its first line names 'a/000.jpg' and 'cat'"),
        ("path\na/000.jpg\n", "no column 'label'"),
        ("path,label\n", "lists no images"),
        ("path,label\na/000.jpg\n", "the row is cut short"),
        ("path,label\na/000.jpg,\n", "lacks its path or its label"),
        ("path,label\na/000.jpg,cat\nb.jpg,cat\n", "1 of its images are not there: 'b.jpg'"),
        ("path,label,split\na/000.jpg,cat,night\n", "'night' is not a part"),
        ("path,label\na/000.jpg,-1\n", "the label -1, but the classes are 0 and up"),
        ("path,label\na/000.jpg,123456789\n", "far more than there are images"),
        ("path,label\na/000.jpg,\xff\n", "UTF-8"),
    ],
)
def test_bad_csv(make_folder: MakeFolder, text: str, message: str) -> None:
    path = make_folder({"a": 1}) / "data.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=message) as caught:
        open_data(DataConfig(str(path)))
    assert str(path) in str(caught.value.where)


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ("cat\n", "an image has the label 1, but the classes are 0 to 0"),
        ("", "the list of classes is empty"),
        ("cat\n\ndog\n", "line 2 names no class"),
        ("cat\tone\ncat\tother\n", "'cat' stands for more than one class"),
        (None, "No such file"),
    ],
)
def test_bad_lists_of_classes(
    make_folder: MakeFolder, tmp_path: Path, listing: str | None, message: str
) -> None:
    root = make_folder({"a": 2})
    path = write_csv(root, "path,label\na/000.jpg,0\na/001.jpg,1\n")
    names = tmp_path / "names.txt"
    if listing is not None:
        names.write_text(listing)
    with pytest.raises(DataError, match=message):
        open_data(DataConfig(str(path), classes=str(names)))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "data.xyz"
    file.write_bytes(np.arange(10).tobytes())
    with pytest.raises(DataError, match="is not a data set of a known kind"):
        open_data(DataConfig(str(file)))
