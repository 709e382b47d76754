"""Datasets on the Hub, streamed from one on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from data.conftest import jpeg
from data.test_parquet import parquet_of
from hub_server import LoopbackHub
from vitcli.config import DataConfig, _data_path
from vitcli.data.dataset import open_dataset
from vitcli.errors import DataError

# `datasets` reads the address of the Hub once, when it is imported.
CODE = """
import json, sys
from vitcli.config import AugmentConfig, DataConfig
from vitcli.data.dataset import open_data, open_split
from vitcli.data.loader import train_batches
from vitcli.data.stream import Stream
from vitcli.data.transforms import TrainTransform
from vitcli.errors import VitError
transform = TrainTransform((8, 8), "bilinear", AugmentConfig())
try:
    splits = open_data(DataConfig(sys.argv[1], classes=sys.argv[2] or None))
except VitError as error:
    print(json.dumps({"error": str(error)}))
    sys.exit()
train = splits.train
keys = {s.number: s.key for shard in train.shards for s in shard.samples(0)}

def seen(ranks, workers):
    steps = []
    for rank in range(ranks):
        part = range(8 * rank // ranks, 8 * (rank + 1) // ranks)
        batches = train_batches(train, transform, 8, 0, 0, 6, workers, print, part=part)
        steps.append([(l.tolist(), i.tolist()) for _, l, i in batches])
    whole = [sum((part[0] for part in step), []) for step in zip(*steps)]
    numbers = [sum((part[1] for part in step), []) for step in zip(*steps)]
    return sum(whole, []), [keys[n] for n in sum(numbers, [])]

print(json.dumps({
    "classes": [label.id for label in splits.classes], "sizes": train.sizes.tolist(),
    "val": splits.val.labels.tolist(), "image": splits.val.read(1).hex(),
    "seen": [seen(ranks, workers) for ranks, workers in ((1, 0), (2, 2), (3, 0))],
}))
"""
SIZES = [3, 9, 1, 6, 4]


def table(start: int, rows: int) -> bytes:
    labels = [i % 3 for i in range(start, start + rows)]
    return parquet_of(start, labels, ["cat", "dog", "bird"])


@pytest.fixture(scope="module")
def files():
    found = {"README.md": b"---\nlicense: mit\n---\n"}
    for number, size in enumerate(SIZES):
        found[f"data/train-{number:05}-of-00005.parquet"] = table(sum(SIZES[:number]), size)
    return found | {"data/validation-00000-of-00001.parquet": table(900, 3)}


def run(files: dict[str, bytes], home: Path, classes: str = "", repo: str = "org/pets") -> Any:
    with LoopbackHub() as hub:
        hub.add("datasets/org/pets", files)
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), "")
        environment = os.environ | offline | {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", CODE, f"hf://datasets/{repo}", classes]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.mark.slow
def test_each_row_once_an_epoch_at_any_number_of_ranks_and_workers(files, tmp_path):
    found = run(files, tmp_path)
    assert found["classes"] == ["cat", "dog", "bird"] and found["sizes"] == SIZES
    assert found["val"] == [0, 1, 2] and bytes.fromhex(found["image"]) == jpeg(901)
    (labels, keys), *others = found["seen"]
    expected = {
        f"train-{number:05}-of-00005.parquet row {row}": (sum(SIZES[:number]) + row) % 3
        for number, size in enumerate(SIZES)
        for row in range(size)
    }
    assert sorted(keys[:23]) == sorted(keys[23:46]) == sorted(expected)
    assert [expected[key] for key in keys] == labels
    assert others == [[labels, keys]] * 2


@pytest.mark.slow
def test_a_list_of_classes_and_datasets_that_cannot_be_streamed(files, tmp_path):
    listing = tmp_path / "classes.txt"
    listing.write_text("bird\ncat\ndog\n")
    found = run(files, tmp_path, str(listing))
    assert found["classes"] == ["bird", "cat", "dog"] and found["val"] == [1, 2, 0]
    labels, keys = found["seen"][0]
    assert labels[keys.index("train-00000-of-00005.parquet row 0")] == 1
    digits = {f"{split}.parquet": parquet_of(0, [0, 1], ["1", "0"]) for split in ("train", "val")}
    listing.write_text("0\n1\n")
    found = run({"README.md": b""} | digits, tmp_path / "digits", str(listing))
    labels, keys = found["seen"][0]
    assert labels[keys.index("train.parquet row 0")] == found["val"][0] == 1
    error = run(files, tmp_path, repo="org/other")["error"]
    assert "no such dataset on the Hub" in error and error.count("\n") == 1
    images = {"README.md": b"", "data/1.jpg": jpeg(1), "data/2.jpg": jpeg(2)}
    error = run(images, tmp_path / "other")["error"]
    assert "not stored as parquet" in error and "hf download" in error


@pytest.mark.slow
def test_configurations_splits_and_revisions_that_must_be_named(tmp_path):
    splits = "\n  data_files:\n  - split: "
    names = [f"- config_name: {name}{splits}full\n    path: {name}/*" for name in ("small", "big")]
    card = "---\nconfigs:\n" + "\n".join(names) + "\n---\n"
    files = {"README.md": card.encode()}
    files |= {f"{name}/0.parquet": table(0, 3) for name in ("small", "big")}
    assert "'small' and 'big'" in run(files, tmp_path)["error"]
    assert "'full'" in run(files, tmp_path, repo="org/pets/small")["error"]
    assert "revision" in run(files, tmp_path, repo="org/pets@other")["error"]


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_a_hub_that_cannot_be_reached_is_not_waited_for(endpoint, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("vitcli.data.hub_dataset.AT_OPENING", 0.1)
    monkeypatch.setattr("datasets.load_dataset_builder", None)  # it would try for a minute
    with pytest.raises(DataError, match="the Hub cannot be reached"):
        open_dataset(DataConfig("hf://datasets/org/pets"))


def test_a_local_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert _data_path("org/pets") == "hf://datasets/org/pets"
    assert DataConfig(_data_path("org/pets")).name == "pets"
    for path in ("org", "org/pets.csv", "org/x/y", "./org/pets", "org/train-{0..3}.tar", "/org/x"):
        assert _data_path(path) == os.path.abspath(path)
    (tmp_path / "org" / "pets").mkdir(parents=True)
    assert _data_path("org/pets") == str(tmp_path / "org" / "pets")
    several = "https://host/a/train-{0..9}.tar?key=1::val.tar"
    assert _data_path(several) == f"https://host/a/train-{{0..9}}.tar?key=1::{tmp_path}/val.tar"
    assert DataConfig(several).name == "train-{0..9}.tar"
