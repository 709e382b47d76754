"""CSV files and class lists."""

from pathlib import Path

import pytest

from vitcli.config import DataConfig
from vitcli.data.dataset import open_split, open_splits
from vitcli.errors import DataError, VitWarning


def write_csv(root: Path, text: str, name: str = "data.csv") -> Path:
    path = root / name
    path.write_text(text, "utf-8")
    return path


@pytest.mark.filterwarnings("error")
def test_csv(make_directory):
    root = make_directory({"a": 4})
    labels = ["dog", "cat", "cat", "dog"]
    rows = "".join(f"a/{i:03}.jpg,{label}\n" for i, label in enumerate(labels))
    path = write_csv(root, "\ufeffPath,Label\n" + rows + "\n,,,\n  ,  \n")
    source, _ = open_split(DataConfig(str(path)))
    assert [source.classes[i].id for i in source.labels] == labels
    assert source.read(2) == (root / "a/002.jpg").read_bytes()
    assert source.where(2) == str(root / "a/002.jpg")


@pytest.mark.parametrize(("name", "delimiter"), [("x.tsv", "\t"), ("x.csv", ";"), ("x.csv", ",")])
def test_split_column_and_delimiters(make_directory, name, delimiter):
    root = make_directory({"a": 4})
    lines = ["who,filename,class,split", "x,a/000.jpg,n01440764,train", "x,a/001.jpg,cat,train"]
    lines += [f"x,{root}/a/002.jpg,cat,val", "x,a/003.jpg,cat,test"]
    splits = open_splits(
        DataConfig(str(write_csv(root, "\n".join(lines).replace(",", delimiter), name)))
    )
    assert [label.id for label in splits.classes] == ["cat", "n01440764"]
    assert [len(s) for s in (splits.train, splits.val, splits.test)] == [2, 1, 1]
    assert splits.val.read(0) == (root / "a/002.jpg").read_bytes()


@pytest.mark.filterwarnings("error")
def test_warns_about_images_in_several_splits(make_directory):
    """However the path is written; duplicates within one split are allowed."""
    root = make_directory({"a": 4})
    rows = ["path,label,split", "a/000.jpg,cat,train", "a/000.jpg,cat,train"]
    rows += ["a/001.jpg,dog,train", "a/002.jpg,dog,test", "a/003.jpg,cat,val"]
    open_splits(DataConfig(str(write_csv(root, "\n".join(rows)))))
    shared = [*rows, "a/../a/000.jpg,cat,val", f"{root}/a/001.jpg,dog,test"]
    with pytest.warns(VitWarning, match=r"2 images .*/a/001.jpg' and 'a/../a/000.jpg'"):
        open_splits(DataConfig(str(write_csv(root, "\n".join(shared)))))


def test_duplicate_rows_do_not_leak_across_the_split(make_directory):
    root = make_directory({"a": 4})
    rows = [f"a/00{i}.jpg,{label}" for i, label in enumerate(("cat", "cat", "dog", "dog"))]
    path = write_csv(root, "\n".join(["path,label", *rows, *rows, "a/../a/000.jpg,dog"]))
    two_labels = r"1 image with more than one label: 'a/../a/000.jpg'"
    with (
        pytest.warns(VitWarning, match=two_labels),
        pytest.warns(VitWarning, match="5 images listed more"),
    ):
        splits = open_splits(DataConfig(str(path), val_fraction=0.5))
    assert len(splits.train) + len(splits.val) == 4


@pytest.mark.filterwarnings("error")
def test_integer_labels(make_directory, tmp_path):
    root = make_directory({"a": 3})
    path = write_csv(root, "path,label\na/000.jpg,2\na/001.jpg,0\na/002.jpg,2\n")
    with pytest.warns(VitWarning, match="--classes FILE"):
        source, _ = open_split(DataConfig(str(path)))
    assert [label.id for label in source.classes] == ["0", "1", "2"]
    for listing, names in (
        ("n01440764\ttench\ncat\ndog\n", "dog tench dog"),
        ("2\ta\n7\n0\n", "a 0 a"),
        ("0\n02\ta\n2\tb\n", "a 0 a"),  # two ids with the same number: the first
    ):
        (tmp_path / "names").write_text(listing)
        source, _ = open_split(DataConfig(str(path), classes=str(tmp_path / "names")))
        assert [source.classes[i].name for i in source.labels] == names.split()
    (tmp_path / "names").write_text("1\n2\n")
    with pytest.raises(DataError, match="label 0 is out of range: the classes are '1' and '2'"):
        open_split(DataConfig(str(path), classes=str(tmp_path / "names")))


def test_labels_are_names_unless_all_are_integers(make_directory):
    root = make_directory({"a": 3})
    rows = ("a/000.jpg,01,train", "a/001.jpg,x,train", "a/002.jpg,01,val")
    path = write_csv(root, "\n".join(("path,label,split", *rows, "")))
    source, split = open_split(DataConfig(str(path)), "val")
    assert [source.classes[i].id for i in source.labels] == ["01"]


def test_missing_values_are_not_silently_a_class(make_directory):
    path = write_csv(make_directory({"a": 3}), 'path;label;"score, %"\na/000.jpg;NaN;1,5\n')
    with pytest.warns(VitWarning, match="missing values: 'NaN'"):
        open_split(DataConfig(str(path)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/000.jpg,cat\n",
        "path\na/000.jpg\n",
        "path,label\n",
        "path,label\na/001.jpg,cat\na/002.jpg,dog\na/000.jpg\n",
        "path,label\na/001.jpg,cat\na/002.jpg,dog\n,dog\n",
        "path,label\na/001.jpg,crane, a bird\na/002.jpg,crane, a machine\n",
        "path,label\na/001.jpg,cat\na/002.jpg,dog\nb.jpg,cat\n",
        "path,label\na/000.jpg,cat\na\0b.jpg,dog\n",
        "path,label,split\na/001.jpg,cat,train\na/002.jpg,dog,train\na/000.jpg,cat,night\n",
        "path,label\na/000.jpg,-1\n",
        "path,label\na/000.jpg,123456789\n",
        "path,label\na/000.jpg,\xff\n",
        f"path,label\na/000.jpg,{'x' * 200_000}\n",
    ],
)
def test_bad_csv(make_directory, text):
    path = make_directory({"a": 3}) / "data.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError) as caught:
        open_splits(DataConfig(str(path)))
    assert str(path) in str(caught.value.where)


@pytest.mark.parametrize("listing", ["cat\n", "", "cat\n\ndog\n", "cat\tone\ncat\tother\n", None])
def test_bad_class_lists(make_directory, tmp_path, listing):
    path = write_csv(make_directory({"a": 2}), "path,label\na/000.jpg,0\na/001.jpg,1\n")
    names = tmp_path / "names.txt"
    if listing is not None:
        names.write_text(listing)
    with pytest.raises(DataError):
        open_splits(DataConfig(str(path), classes=str(names)))
