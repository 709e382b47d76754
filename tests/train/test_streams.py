"""Runs on streamed shards, and on unreadable images."""

import dataclasses
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from data.conftest import tar_bytes
from loopback import FileServer
from train.runs import (
    COLORS,
    NO_AUGMENTATION,
    Killed,
    filter_events,
    kill_at,
    max_weight_difference,
    read_metrics,
    weights_equal,
)
from train.test_ranks import RECIPE, TOLERANCE, run_vit
from vitcli import retry
from vitcli.config import DataConfig
from vitcli.errors import DataError
from vitcli.train.directory import read_train_config
from vitcli.train.loop import train
from vitcli.train.sweep import run_sweep


@pytest.fixture
def web(colors: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FileServer]:
    """A server with the images of `colors` in five training shards and one for validation."""
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(retry, "PAUSE", 0.01)
    images = [(colors / name / f"{i:02}.png", name) for i in range(20) for name in COLORS]
    files, sizes = {"classes.txt": "\n".join(COLORS).encode()}, {}
    for number, start in enumerate(range(0, 60, 11)):
        shard = images[start : start + 11]
        members = {f"{i:03}.png": path.read_bytes() for i, (path, _) in enumerate(shard)}
        members |= {f"{i:03}.cls": name.encode() for i, (_, name) in enumerate(shard)}
        name = "val-0.tar" if number == 5 else f"train-{number}.tar"
        files[name], sizes[name] = tar_bytes(dict(sorted(members.items()))), len(shard)
    with FileServer(files | {"sizes.json": json.dumps(sizes).encode()}) as web:
        yield web


def data_config(web: FileServer) -> DataConfig:
    return DataConfig(f"{web.url}/train-{{0..4}}.tar::{web.url}/val-0.tar")


def test_streamed_run_converges_and_resumes_exactly(tiny_run, web: FileServer, tmp_path) -> None:
    events: list = []
    run = {"data": data_config(web), "steps": 30, "eval_every": 15}
    full = tiny_run(**run, output=str(tmp_path / "full"), workers=2)
    outcome = train(full, on_event=events.append)
    assert outcome.metrics["val_top1"] > 0.8
    (plan,) = filter_events(events, "plan")
    assert (plan.train_images, plan.val_images) == (55, 5)
    resumed = tiny_run(**run, save_every=7)
    with pytest.raises(Killed):
        train(resumed, on_event=kill_at(17))
    written = read_train_config(resumed.output)
    assert written.streams == 5  # recorded, whatever the default would be now
    train(written, resume=True)
    assert weights_equal(full.output, resumed.output)
    losses = [[line["loss"] for line in read_metrics(c.output, "train")] for c in (full, resumed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "fields",
    [{"balanced_sampling": True}, {"class_weights": "balanced"}, {"strict": True}],
    ids=lambda fields: next(iter(fields)),
)
def test_options_that_need_an_index_are_rejected(tiny_run, web, fields) -> None:
    with pytest.raises(DataError, match="stream"):
        train(tiny_run(data=data_config(web), **fields))


def test_streamed_sweep_requires_no_retrain(tiny_run, web) -> None:
    config = tiny_run(data=data_config(web), lr=None, sweep=(1e-3, 3e-3), steps=2)
    with pytest.raises(DataError) as caught:
        run_sweep(config)
    assert "--no-retrain" in str(caught.value.hint) and not Path(config.output).exists()
    run_sweep(dataclasses.replace(config, retrain=False))


def test_frozen_backbone_trains_on_stream(tiny_run, web: FileServer) -> None:
    train(tiny_run(data=data_config(web), augment=NO_AUGMENTATION, freeze="backbone", steps=3))


def test_unreadable_images_are_listed(tiny_run, make_splits, tmp_path) -> None:
    damaged = {f"{name}/{i:02}.png" for name in COLORS for i in (0, 4)}
    broken = make_splits({"": range(8)}, damaged)
    data = DataConfig(str(broken), val_fraction=0)
    config = tiny_run(data=data, save_every=2)
    with pytest.raises(Killed):
        train(config, on_event=kill_at(9))
    assert train(read_train_config(config.output), resume=True).skipped == 6
    lines = [json.loads(s) for s in (Path(config.output) / "skipped.jsonl").open()]
    assert len(lines) == 6
    assert {line["image"] for line in lines} == {str(broken / file) for file in damaged}
    assert all("reason" in line for line in lines)
    with pytest.raises(DataError, match="more than 3 images"):
        train(tiny_run(data=data, output=str(tmp_path / "few"), max_bad=3))


@pytest.mark.slow
def test_two_ranks_match_one_with_unreadable_images(web: FileServer, tmp_path) -> None:
    """Over two epochs; each unreadable image is listed and counted once."""
    for shard in range(5):
        damage(web.files, f"train-{shard}.tar", ("002.png", "003.png", "007.png"))
    bad = sorted(f"train-{shard}.tar/{i:03}" for shard in range(5) for i in (2, 3, 7))
    recipe = (
        *RECIPE,
        "--data",
        data_config(web).path,
        "--workers=2",
        "--batch-size=11",
        "--steps=10",
    )
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        text = run_vit("pretrain", *recipe, "-o", str(output), f"--devices={ranks}")
        assert json.loads(text.splitlines()[-1])["unreadable"] == 15
        lines = [json.loads(line) for line in (output / "skipped.jsonl").open()]
        assert sorted(line["image"] for line in lines) == bad
    assert max_weight_difference(tmp_path / "1", tmp_path / "2") < TOLERANCE
    few = ("-o", str(tmp_path / "few"), "--devices=2", "--max-bad=14")
    text = run_vit("pretrain", *recipe, *few, status=1)
    assert "more than 14 images cannot be read" in text


def damage(files: dict[str, bytes], shard: str, members: Sequence[str]) -> None:
    """Replace the contents of members of a shard with invalid data."""
    with tarfile.open(fileobj=io.BytesIO(files[shard])) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}
    files[shard] = tar_bytes(content | dict.fromkeys(members, b"damaged"))
