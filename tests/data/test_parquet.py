"""Parquet files, as used for datasets on the Hub."""

import io
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.conftest import jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data.dataset import open_dataset, open_split, open_splits
from vitcli.errors import DataError, ImageError, VitWarning


@pytest.fixture(autouse=True)
def temporary_datasets_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def parquet_bytes(
    start: int, labels: list[int], names: list[str] | None = None, path: str | None = None
) -> bytes:
    """A file as `Dataset.push_to_hub` writes it; with a path, as `Dataset.to_parquet`."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=names or ["cat", "dog"])}
    )
    contents = [None if path else jpeg(start + i) for i in range(len(labels))]
    images = [{"bytes": content, "path": path} for content in contents]
    table = datasets.Dataset.from_dict({"img": images, "label": labels}, features=features)
    content = io.BytesIO()
    table.to_parquet(content)
    return content.getvalue()


def write(path: Path, start: int, labels: list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(parquet_bytes(start, labels))


def write_raw(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.filterwarnings("error::vitcli.errors.VitWarning")
def test_hub_directory(tmp_path):
    root = tmp_path / "set [v2]"
    write(root / "data" / "train-00000-of-00002.parquet", 0, [0, 1, 1])
    write(root / "data" / "train-00001-of-00002.parquet", 10, [1, 0])
    write(root / "data" / "validation-00000-of-00001.parquet", 20, [1])
    write(root / "data" / "test-00000-of-00001.parquet", 30, [0, 1])
    splits = open_splits(DataConfig(str(root)))
    assert splits.classes == (ClassLabel("cat", "cat"), ClassLabel("dog", "dog"))
    assert list(splits.train.labels) == [0, 1, 1, 1, 0]
    assert [splits.train.read(i) for i in (4, 1)] == [jpeg(11), jpeg(1)]
    assert splits.train.names[3] == "train-00001-of-00002.parquet row 0"
    assert splits.train.where(3) == f"{root}/data/train-00001-of-00002.parquet row 0"
    assert splits.val.read(0) == jpeg(20)
    assert list(splits.test.labels) == [0, 1]


def test_row_names_are_unique_across_directories(tmp_path):
    for place in ("en", "de", ".old"):
        write(tmp_path / "d" / place / "train-0.parquet", 0, [0, 1])
    with pytest.warns(VitWarning, match="several directories: 'de' and 'en'"):
        splits = open_splits(DataConfig(str(tmp_path / "d"), val_fraction=0))
    assert [*splits.train.names] == [
        f"{p}/train-0.parquet row {i}" for p in ("de", "en") for i in range(2)
    ]


def test_single_file_is_split_and_pickled_by_path(tmp_path):
    write(tmp_path / "all.parquet", 0, [0, 1] * 200)
    splits = open_splits(DataConfig(str(tmp_path / "all.parquet")))
    assert splits.val is not None and [len(splits.train), len(splits.val)] == [360, 40]
    source, description = open_split(DataConfig(str(tmp_path / "all.parquet")))
    assert (len(source), description) == (400, "all images")
    pickled = pickle.dumps(source)
    assert len(pickled) < 100 * len(source) and pickle.loads(pickled).read(7) == jpeg(7)


@pytest.mark.parametrize("labels", [[*"abcb"], [0, 1, 2, 1]])
def test_split_column(tmp_path, labels):
    columns = {"image": [*map(jpeg, range(4))], "split": ["train", "train", "val", "Test"]}
    path = write_raw(tmp_path / "x.parquet", columns | {"label": labels})
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    dataset = open_dataset(DataConfig(str(path)))
    splits = (dataset.train, dataset.val, dataset.test)
    assert [[*split.labels] for split in splits] == [[0, 1], [2], [1]]
    assert dataset.test.read(0) == jpeg(3) and dataset.test.names[0] == "x.parquet row 3"
    write_raw(path, columns | {"label": labels, "split": ["train", "val", "leaf", "val"]})
    with pytest.raises(DataError, match="column 'split': 'leaf' is not a split"):
        open_dataset(DataConfig(str(path)))


@pytest.mark.filterwarnings("error::vitcli.errors.VitWarning")
def test_class_lists(tmp_path):
    path = write_raw(tmp_path / "x.parquet", {"image": [jpeg(0), jpeg(1)], "label": [1, 0]})
    (tmp_path / "names").write_text("dog\ncat\nbird\n")
    text = write_raw(tmp_path / "text.parquet", {"image": [jpeg(0), jpeg(1)], "label": ["1", "0"]})
    source, _ = open_split(DataConfig(str(text), classes=str(tmp_path / "names")))
    assert [source.classes[i].id for i in source.labels] == ["cat", "dog"]
    for named, expected in ((False, ["cat", "dog"]), (True, ["dog", "cat"])):
        if named:  # the dataset's own names, in the order of the list
            write(path, 0, [1, 0])
        source, _ = open_split(DataConfig(str(path), classes=str(tmp_path / "names")))
        assert [source.classes[i].id for i in source.labels] == expected
        assert [label.id for label in source.classes] == ["dog", "cat", "bird"]


def test_unlabeled_rows_are_ignored(tmp_path):
    write(tmp_path / "train.parquet", 0, [0, 1, 1])
    write(tmp_path / "test.parquet", 10, [-1, -1])
    with pytest.warns(VitWarning, match="2 rows of test"):
        assert open_splits(DataConfig(str(tmp_path))).test is None
    columns = {"image": [jpeg(i) for i in range(5)], "label": ["a", None, " b", " ", "a "]}
    with pytest.warns(VitWarning, match="2 rows of train"):
        source, _ = open_split(DataConfig(str(write_raw(tmp_path / "x.parquet", columns))))
    assert source.read(1) == jpeg(2)
    assert [source.classes[i].id for i in source.labels] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a"], "label": [0]},
        {"image": ["a.jpg"], "label": [0]},
        {"image": [b"x"], "size": [0]},
        {"image": [b"x"], "label": [[0, 1]]},
        {"image": [b"x"], "label": [0.5]},
        {"image": [b"x"], "label": [-1]},
        {"image": [b"x"], "label": [2**62]},
        {"image": pyarrow.array([], pyarrow.binary()), "label": pyarrow.array([], pyarrow.int64())},
    ],
)
def test_unusable_columns(tmp_path, columns):
    with pytest.raises(DataError) as caught:
        open_split(DataConfig(str(write_raw(tmp_path / "x.parquet", columns))))
    assert "\n" not in caught.value.what


@pytest.mark.filterwarnings("error::vitcli.errors.VitWarning")
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_empty_files_are_skipped(tmp_path, empty):
    for i in range(3):
        write(tmp_path / f"train-{i}.parquet", 10 * i, [] if i == empty else [0, 1])
    write(tmp_path / "test-0.parquet", 50, [])
    assert open_splits(DataConfig(str(tmp_path))).test is None
    source, _ = open_split(DataConfig(str(tmp_path)), "train")
    first, second = (i for i in range(3) if i != empty)
    assert [source.read(i) for i in range(4)] == [
        jpeg(10 * i + row) for i in (first, second) for row in (0, 1)
    ]
    rows = [f"train-{first}.parquet row 1", f"train-{second}.parquet row 0"]
    assert [source.names[i] for i in (1, 2)] == rows


@pytest.mark.parametrize("length", [0, 10, 200, -1])
def test_damaged_files(tmp_path, length):
    for i in range(2):
        write(tmp_path / f"{i}.parquet", 10 * i, [0, 1])
    bad = tmp_path / "1.parquet"
    bad.write_bytes(bad.read_bytes()[:length])
    for path in (bad, tmp_path):
        with pytest.raises(DataError) as caught:
            open_split(DataConfig(str(path)))
        assert "\n" not in caught.value.what and caught.value.where == str(bad)


def test_files_with_different_schemas_are_rejected(tmp_path):
    write_raw(tmp_path / "a.parquet", {"image": [jpeg(0)], "label": [0]})
    write_raw(tmp_path / "b.parquet", {"image": [jpeg(1)], "kind": ["x"]})
    with pytest.raises(DataError) as caught:
        open_split(DataConfig(str(tmp_path)))
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize("path", [None, "nowhere.jpg", "x" * 5000 + ".jpg", "nul\0.jpg"])
def test_row_without_an_image(tmp_path, path):
    columns = {"image": [{"bytes": None, "path": path}] * 2, "label": [0, 1]}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    columns["image"] = pyarrow.array(columns["image"], kind)
    source, _ = open_split(DataConfig(str(write_raw(tmp_path / "x.parquet", columns))))
    with pytest.raises(ImageError):
        source.read(0)
