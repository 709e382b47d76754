"""The auto rule, for folders of any size."""

import pytest
import torch

from vitcli.config import DataConfig, model_config
from vitcli.train import plan
from vitcli.train.plan import fill_gaps
from vitcli.train_config import TrainConfig

MODEL = model_config("Ti/16", num_classes=5)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 64e9)


def planned(n: int, device: torch.device = GPU, **fields) -> TrainConfig:
    config = TrainConfig(data=DataConfig("x"), output="y", **fields)
    return fill_gaps(config, MODEL, n, device)


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
    assert (config.batch_size, config.steps, config.warmup) == (batch, steps, warmup)
    assert config.lr == 0.01


def test_a_cpu_takes_ten_epochs_at_most():
    assert planned(3_500, CPU).steps == 10 * 3_500 // 128
    assert planned(20, CPU).steps == 100


def test_pretraining():
    config = planned(100_000, task="pretrain", optimizer="adamw")
    assert (config.batch_size, config.lr) == (1024, 1e-3)
    assert config.steps == 90 * 100_000 // 1024 and config.warmup == config.steps // 10


def test_what_is_given_is_kept():
    config = planned(3_500, steps=7, batch_size=24, lr=0.5, warmup=0, accumulate=3, workers=5)
    kept = (config.steps, config.batch_size, config.lr, config.warmup, config.accumulate)
    assert kept == (7, 24, 0.5, 0, 3) and config.workers == 5


def test_epochs_set_the_steps():
    assert planned(3_500, epochs=2, batch_size=50).steps == 140


def test_little_memory_splits_the_batch_into_equal_parts(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e9)
    config = planned(50_000)
    assert config.accumulate > 4 and config.batch_size % config.accumulate == 0
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e3)
    assert planned(50_000).accumulate == 512
