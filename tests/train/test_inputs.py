"""Training on cached features of a frozen backbone gives the same results as on images."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from train.runs import (
    NO_AUGMENTATION,
    TINY,
    filter_events,
    read_metrics,
    read_weights,
    weights_close,
)
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.load import load
from vitcli.config import AugmentConfig, DataConfig
from vitcli.distributed import join_ranks
from vitcli.errors import CheckpointError
from vitcli.train import inputs, loop, setup
from vitcli.train.config import TrainConfig
from vitcli.train.directory import RunDirectory
from vitcli.train.loop import train
from vitcli.train.sweep import run_sweep


@pytest.fixture
def make_probe(make_run, finished, tmp_path):
    """Factory of configs for linear probes of a briefly trained model."""

    def make(name: str = "run", **fields) -> TrainConfig:
        defaults = {"task": "finetune", "model": str(finished), "resolution": None, "steps": 8}
        frozen = {"freeze": "backbone", "augment": NO_AUGMENTATION, "optimizer": "sgd", "lr": 0.1}
        return make_run(output=str(tmp_path / name), **(defaults | frozen | fields))

    return make


def are_features_fixed(run: TrainConfig) -> bool:
    with join_ranks(torch.device("cpu")) as ranks:
        prepared = setup.prepare(run, RunDirectory(run.output), ranks, lambda event: None)
        return inputs.has_fixed_features(prepared)


def test_training_on_features_matches_images(make_probe, monkeypatch):
    fields = {"balanced_sampling": True, "eval_every": 6, "ema": 0.9}
    fields["preprocess"] = {"crop_mode": "center", "crop_pct": 0.7}
    cached, uncached = make_probe("cached", **fields), make_probe("uncached", **fields)
    calls = []
    events = []
    train(cached, on_event=events.append)
    assert any("computing the features" in getattr(event, "text", "") for event in events)
    monkeypatch.setattr(loop, "has_fixed_features", lambda run: calls.append(run))
    train(uncached)
    assert calls
    assert weights_close(cached.output, uncached.output)
    found = (read_metrics(run.output, "evaluation") for run in (cached, uncached))
    for x, y in zip(*found, strict=True):
        assert x == pytest.approx(y, abs=1e-4)


def test_unreadable_images_are_handled_alike(make_probe, monkeypatch, make_splits):
    """With features and with images: training uses the class's next image, validation skips it."""
    damaged = ("train/red/03.png", "train/blue/01.png", "val/red/04.png")
    data = make_splits({"train": range(4), "val": range(4, 8)}, damaged)
    cached, uncached = (make_probe(name, data=DataConfig(str(data)), batch_size=5) for name in "ab")
    first = train(cached)
    monkeypatch.setattr(loop, "has_fixed_features", lambda run: False)
    second = train(uncached)
    assert weights_close(cached.output, uncached.output) and first.skipped == second.skipped == 3
    assert first.metrics == pytest.approx(second.metrics, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"augment": AugmentConfig(crop_area=(1.0, 1.0))},
        {"augment": AugmentConfig(flip=False)},
        {"augment": AugmentConfig(crop_area=(1.0, 1.0), flip=False, mixup=0.2)},
        {"freeze": 2},
    ],
)
def test_changing_features_are_not_cached(make_probe, fields):
    assert not are_features_fixed(make_probe(**fields))


def test_features_larger_than_memory_are_not_cached(make_probe, monkeypatch):
    monkeypatch.setattr(inputs, "free_memory", lambda device: 1e3)
    assert not are_features_fixed(make_probe())


def test_sweep_computes_features_once(make_probe, monkeypatch):
    computed, compute = [], inputs.Features._compute

    def count(self, split, source):
        computed.append(len(source))
        return compute(self, split, source)

    monkeypatch.setattr(inputs.Features, "_compute", count)
    single_run = make_probe("single")
    train(single_run)
    assert len(computed) == 2  # training and validation
    swept = make_probe("swept", lr=None, sweep=(0.1, 0.01), retrain=False)
    run_sweep(swept)
    assert computed[2:] == computed[:2]
    record = json.loads((Path(swept.output) / "sweep.json").read_text())
    provenance = load(single_run.output).info.provenance
    assert record["trials"][0]["val_top1"] == provenance["metrics"]["val_top1"]


@pytest.mark.parametrize(
    "fields, stem_passes, block_passes",
    [
        ({}, 3, 3),
        ({"lora": 2}, 1, 2),
        ({"freeze": 0}, 1, 3),
        ({"freeze": 1}, 1, 2),  # of two blocks
        ({"freeze": "backbone", "augment": AugmentConfig()}, 1, 1),
    ],
)
def test_cost_depends_on_what_is_trained(make_probe, fields, stem_passes, block_passes):
    config = make_probe(**{"freeze": None, **fields}, steps=1)
    events = []
    train(config, on_event=events.append)
    (plan,) = filter_events(events, "plan")
    stem = 2 * 3 * 8 * 8 * TINY["width"] * 4  # patches
    flops = stem_passes * stem + block_passes * (plan.flops - stem)
    assert plan.exaflops == pytest.approx(plan.batch_size * flops / 1e18)


def test_nan_weights_are_reported(make_probe, finished, tmp_path):
    broken = shutil.copytree(finished, tmp_path / "broken")
    path = broken / "model.safetensors"
    tensors = read_weights(broken) | {"norm.weight": torch.full((24,), torch.nan)}
    tensor_file.write(
        path, {k: v.numpy() for k, v in tensors.items()}, tensor_file.read_header(path).metadata
    )
    with pytest.raises(CheckpointError, match="features are not finite"):
        train(make_probe(model=str(broken)))
