"""The auto rule for datasets of any size, and the presets, which are the paper's numbers."""

from __future__ import annotations

import pytest
import torch

from vitcli.config import AugmentConfig, DataConfig, model_config
from vitcli.presets import PRESETS
from vitcli.train import plan
from vitcli.train.plan import fill_gaps
from vitcli.train_config import TrainConfig

MODEL = model_config("Ti/16", num_classes=5)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 64e9)


def planned(n: int, device: torch.device = GPU, **fields) -> TrainConfig:
    return fill_gaps(TrainConfig(DataConfig("x"), "y", **fields), MODEL, n, device)


@pytest.mark.parametrize(
    "n, batch, steps, warmup",
    [
        (20, 8, 500, 100),
        (3_500, 128, 500, 100),  # the paper's for Pets and Flowers (Table 4), a smaller batch
        (50_000, 512, 10_000, 500),  # the paper's for CIFAR
        (1_281_167, 512, 20_000, 500),  # the paper's for ImageNet
    ],
)
def test_finetuning_by_the_size_of_the_data(n, batch, steps, warmup):
    config = planned(n)
    found = (config.batch_size, config.steps, config.warmup, config.lr)
    assert found == (batch, steps, warmup, 0.01)


def test_a_cpu_takes_ten_epochs_at_most():
    assert planned(3_500, CPU).steps == 10 * 3_500 // 128
    assert planned(20, CPU).steps == 100


def test_pretraining():
    config = planned(100_000, task="pretrain", optimizer="adamw")
    assert (config.batch_size, config.lr) == (1024, 1e-3)
    assert config.steps == 90 * 100_000 // 1024 and config.warmup == config.steps // 10


def test_what_is_given_is_kept():
    given = {"steps": 7, "batch_size": 24, "lr": 0.5, "warmup": 0, "accumulate": 3, "workers": 5}
    config = planned(3_500, log_every=9, **given)
    assert given | {"log_every": 9} == {k: getattr(config, k) for k in (*given, "log_every")}
    assert planned(3_500, epochs=2, batch_size=50).steps == 140


def test_little_memory_splits_the_batch_into_equal_parts(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e9)
    config = planned(50_000)
    assert config.accumulate > 4 and config.batch_size % config.accumulate == 0
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e3)
    assert planned(50_000).accumulate == 512


LOW, HIGH = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.06)
TABLE_4 = {
    "imagenet": (20_000, 500, HIGH, 0.01),
    "cifar10": (10_000, 500, LOW, 0.02),
    "cifar100": (10_000, 500, LOW, 0.02),
    "pets": (500, 100, LOW, 0.1),
    "flowers": (500, 100, LOW, 0.1),
    "vtab": (2_500, 500, (0.01,), 0.2),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_row_of_table_4(name):
    steps, warmup, rates, held_out = TABLE_4[name]
    run = PRESETS[name].fields()
    config = TrainConfig(data=DataConfig("x", **run.pop("data")), output="y", **run)
    assert (config.steps, config.warmup, config.data.val_fraction) == (steps, warmup, held_out)
    assert (config.sweep or (config.lr,)) == rates and (config.lr is None) == bool(config.sweep)
    assert config.batch_size == 512 and config.resolution == (384, 384)
    assert (config.optimizer, config.momentum, config.weight_decay) == ("sgd", 0.9, 0.0)
    assert (config.clip_norm, config.schedule, config.loss) == (1.0, "cosine", "softmax")
    assert (config.dropout, config.label_smoothing, config.augment) == (0, 0, AugmentConfig())
    assert config.augment.crop_area == (0.05, 1.0) and config.augment.flip
    assert config.retrain and config.task == "finetune"
    # So a preset of another length has a warm-up that suits it:
    assert planned(1_000, CPU, steps=steps).warmup == warmup
