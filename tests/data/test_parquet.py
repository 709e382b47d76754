"""Parquet files as the Hub keeps data sets."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from data.conftest import jpeg
from vitcli.config import ClassLabel, DataConfig
from vitcli.data.dataset import open_data, open_split
from vitcli.errors import DataError, ImageError, MissingExtraError


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def write(path: Path, start: int, labels: list[int], names: list[str] | None = None) -> None:
    """A file as `Dataset.push_to_hub` writes it."""
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(names=names or ["cat", "dog"])}
    )
    images = [{"bytes": jpeg(start + i), "path": None} for i in range(len(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    table = datasets.Dataset.from_dict({"img": images, "label": labels}, features=features)
    table.to_parquet(path)


def write_raw(path: Path, columns: dict[str, Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_folder_of_the_hub(tmp_path: Path) -> None:
    root = tmp_path / "set"
    write(root / "data" / "train-00000-of-00002.parquet", 0, [0, 1, 1])
    write(root / "data" / "train-00001-of-00002.parquet", 10, [1, 0])
    write(root / "data" / "validation-00000-of-00001.parquet", 20, [1])
    write(root / "data" / "test-00000-of-00001.parquet", 30, [0, 1])
    splits = open_data(DataConfig(str(root)))
    assert splits.val is not None
    assert splits.test is not None
    assert splits.classes == (ClassLabel("cat", "cat"), ClassLabel("dog", "dog"))
    assert list(splits.train.labels) == [0, 1, 1, 1, 0]
    assert [splits.train.read(i) for i in (4, 1)] == [jpeg(11), jpeg(1)]
    assert splits.train.names[3] == "train-00001-of-00002.parquet row 0"
    assert splits.val.read(0) == jpeg(20)
    assert list(splits.test.labels) == [0, 1]
    assert not splits.warnings


def test_one_file_is_all_images_and_is_split(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", 0, [0, 1] * 10)
    splits = open_data(DataConfig(str(tmp_path / "all.parquet")))
    assert splits.val is not None
    assert [len(splits.train), len(splits.val)] == [18, 2]
    everything, words, _ = open_split(DataConfig(str(tmp_path / "all.parquet")))
    assert (len(everything), words) == (20, "all images")


def test_a_source_is_pickled_by_the_path_of_its_file(tmp_path: Path) -> None:
    write(tmp_path / "all.parquet", 0, [0, 1] * 200)
    source, _, _ = open_split(DataConfig(str(tmp_path / "all.parquet")))
    pickled = pickle.dumps(source)
    assert len(pickled) < 100 * len(source)
    assert pickle.loads(pickled).read(7) == jpeg(7)


def test_names_that_repeat_become_indices(tmp_path: Path) -> None:
    # datasets refuses them, other writers do not.
    path = tmp_path / "x.parquet"
    write(path, 0, [0, 1], ["crane", "dog"])
    table = pyarrow.parquet.read_table(path)
    text = table.schema.metadata[b"huggingface"].replace(b'"dog"', b'"n01440764"')
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"huggingface": text}), path)
    source, _, _ = open_split(DataConfig(str(path)))
    assert [c.id for c in source.classes] == ["crane", "n01440764"]


def test_plain_columns(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "x.parquet",
        {"id": [7, 8], "image_bytes": [jpeg(0), jpeg(1)], "class": ["wolf", "bear"]},
    )
    source, _, warnings = open_split(DataConfig(str(path)))
    assert [source.classes[i].id for i in source.labels] == ["wolf", "bear"]
    assert source.read(1) == jpeg(1)
    assert not warnings


def test_indices_without_names(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.parquet", {"image": [jpeg(0), jpeg(1)], "label": [1, 0]})
    source, _, warnings = open_split(DataConfig(str(path)))
    assert [c.id for c in source.classes] == ["0", "1"]
    assert "--classes FILE" in warnings[0]
    (tmp_path / "names").write_text("a\nb\n")
    source, _, warnings = open_split(DataConfig(str(path), classes=str(tmp_path / "names")))
    assert [source.classes[i].id for i in source.labels] == ["b", "a"]
    assert not warnings


def test_a_list_of_classes_reorders_named_ones(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 0, [0, 1])
    (tmp_path / "names").write_text("dog\nbird\ncat\n")
    config = DataConfig(str(tmp_path / "x.parquet"), classes=str(tmp_path / "names"))
    source, _, _ = open_split(config)
    assert [source.classes[i].id for i in source.labels] == ["cat", "dog"]
    assert list(source.labels) == [2, 0]


def test_rows_without_a_label_are_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", 0, [0, 1, 1])
    write(tmp_path / "test.parquet", 10, [-1, -1])
    splits = open_data(DataConfig(str(tmp_path)))
    assert splits.test is None
    assert any("2 rows of test have no label" in warning for warning in splits.warnings)
    path = write_raw(
        tmp_path / "x.parquet",
        {"image": [jpeg(i) for i in range(3)], "label": ["a", None, "b"]},
    )
    source, _, warnings = open_split(DataConfig(str(path)))
    assert source.read(1) == jpeg(2)
    assert "1 rows of train have no label" in warnings[0]


# ---------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "label": [0]}, "no column holds images; there are 'text' and 'label'"),
        ({"image": ["a.jpg"], "label": [0]}, "no column holds images"),
        ({"image": [b"x"], "size": [0]}, "no column holds labels; there are 'image' and 'size'"),
        ({"image": [b"x"], "label": [[0, 1]]}, "not one label a row"),
        ({"image": [b"x"], "label": [0.5]}, "not one label a row"),
        ({"image": [b"x"], "label": [-1]}, "holds no labelled image"),
    ],
)
def test_unusable_columns(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    path = write_raw(tmp_path / "x.parquet", columns)
    with pytest.raises(DataError, match=message) as caught:
        open_split(DataConfig(str(path)))
    assert "\n" not in caught.value.what


def test_an_empty_table(tmp_path: Path) -> None:
    schema = pyarrow.schema([("image", pyarrow.binary()), ("label", pyarrow.int64())])
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(schema.empty_table(), path)
    with pytest.raises(DataError, match="holds no labelled image"):
        open_split(DataConfig(str(path)))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_files_without_rows_are_left_out(tmp_path: Path, empty: int) -> None:
    for i in range(3):
        write(tmp_path / f"train-{i}.parquet", 10 * i, [] if i == empty else [0, 1])
    write(tmp_path / "test-0.parquet", 50, [])
    splits = open_data(DataConfig(str(tmp_path)))
    assert splits.test is None
    source, _, warnings = open_split(DataConfig(str(tmp_path)), "train")
    first, second = (i for i in range(3) if i != empty)
    assert [source.read(i) for i in range(4)] == [
        jpeg(10 * i + row) for i in (first, second) for row in (0, 1)
    ]
    assert [source.names[i] for i in (1, 2)] == [
        f"train-{first}.parquet row 1",
        f"train-{second}.parquet row 0",
    ]
    assert not warnings


@pytest.mark.parametrize("length", [0, 10, 200, -1])
def test_damaged(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("datasets"), "propagate", True)
    path = tmp_path / "x.parquet"
    write(path, 0, [0, 1])
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="cannot be read as parquet") as caught:
        open_split(DataConfig(str(path)))
    assert "\n" not in caught.value.what
    assert caught.value.where == str(path)
    assert not caplog.records  # what the library would log is said once, by us


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_file_among_others_is_named(tmp_path: Path, damaged: int) -> None:
    for i in range(3):
        write(tmp_path / f"{i}.parquet", 10 * i, [0, 1])
    (tmp_path / f"{damaged}.parquet").write_bytes(b"garbage")
    with pytest.raises(DataError, match="cannot be read as parquet") as caught:
        open_split(DataConfig(str(tmp_path)))
    assert caught.value.where == str(tmp_path / f"{damaged}.parquet")


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    write_raw(tmp_path / "a.parquet", {"image": [jpeg(0)], "label": [0]})
    write_raw(tmp_path / "b.parquet", {"image": [jpeg(1)], "kind": ["x"]})
    with pytest.raises(DataError, match="cannot be read as parquet") as caught:
        open_split(DataConfig(str(tmp_path)))
    assert caught.value.where == str(tmp_path)


def test_a_row_without_a_image(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path / "x.parquet",
        {"image": pyarrow.array([None, jpeg(1)], pyarrow.binary()), "label": [0, 1]},
    )
    source, _, _ = open_split(DataConfig(str(path)))
    with pytest.raises(ImageError, match="the row holds no image"):
        source.read(0)


def test_without_datasets_the_extra_is_named(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", 0, [0, 1])
    code = (
        "import sys; sys.modules['datasets'] = None\n"
        "from vitcli.config import DataConfig\n"
        "from vitcli.data.dataset import open_split\n"
        f"open_split(DataConfig({str(tmp_path / 'x.parquet')!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert MissingExtraError.__name__ in done.stderr
    assert "pipx inject vitcli datasets" in done.stderr
