"""Automatic values by dataset size, and presets, which match the papers' numbers."""

import pytest
import torch

from train.runs import make_config
from vitcli.cli.training import build_config
from vitcli.config import AugmentConfig, bit_config, model_config
from vitcli.errors import ConfigError
from vitcli.train import plan
from vitcli.train.config import TrainConfig
from vitcli.train.plan import fill_defaults

MODEL = model_config("Ti/16", num_classes=5)
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def plenty_of_memory(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 64e9)


def plan_config(n, device=GPU, dtype=torch.float32, model=MODEL, **fields) -> TrainConfig:
    return fill_defaults(make_config(**fields), model, n, device, dtype=dtype)


@pytest.mark.parametrize(
    "n, batch, steps, warmup",
    [
        (20, 8, 500, 100),
        (3_500, 128, 500, 100),  # the paper's for Pets and Flowers (Table 4), but a smaller batch
        (50_000, 512, 10_000, 500),  # the paper's for CIFAR
        (1_281_167, 512, 20_000, 500),  # the paper's for ImageNet
    ],
)
def test_finetuning_defaults_by_dataset_size(n, batch, steps, warmup):
    config = plan_config(n)
    found = (config.batch_size, config.steps, config.warmup, config.lr)
    assert found == (batch, steps, warmup, 0.01)


def test_cpu_steps_are_limited_to_ten_epochs():
    assert plan_config(3_500, CPU).steps == 10 * 3_500 // 128
    assert plan_config(20, CPU).steps == 100


def test_pretraining_defaults():
    config = plan_config(100_000, task="pretrain", optimizer="adamw")
    assert (config.batch_size, config.lr) == (1024, 1e-3)
    assert config.steps == 90 * 100_000 // 1024 and config.warmup == config.steps // 10


def test_explicit_values_are_kept():
    given = {"steps": 7, "batch_size": 24, "lr": 0.5, "warmup": 0, "accumulate": 3, "workers": 5}
    config = plan_config(3_500, log_every=9, **given)
    assert given | {"log_every": 9} == {k: getattr(config, k) for k in (*given, "log_every")}
    assert plan_config(3_500, epochs=2, batch_size=50).steps == 140


def test_micro_batches_are_limited_only_on_cpu():
    assert plan_config(50_000).accumulate == 1
    assert plan_config(50_000, CPU).accumulate == 4


def test_batch_is_split_if_memory_is_low(monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e9)
    config = plan_config(50_000)
    assert config.accumulate > 4
    assert plan_config(50_000, batch_size=131).accumulate < 131  # a prime number of images
    assert plan_config(50_000, dtype=torch.bfloat16).accumulate < 0.6 * config.accumulate
    assert plan_config(50_000, grad_checkpointing=True).accumulate < 0.3 * config.accumulate
    kept, recomputed = (
        plan_config(50_000, model=bit_config("R50x1"), grad_checkpointing=enabled).accumulate
        for enabled in (False, True)
    )
    assert 0.4 * kept < recomputed < 0.6 * kept
    monkeypatch.setattr(plan, "free_memory", lambda device: 1e3)
    assert plan_config(50_000).accumulate == 512


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "rates", "held_out"),
    [
        ("imagenet", 20_000, 500, (0.003, 0.01, 0.03, 0.06), 0.01),
        ("pets", 500, 100, (0.001, 0.003, 0.01, 0.03), 0.1),
        ("vtab", 2_500, 500, (0.01,), 0.2),
    ],
)
def test_finetuning_presets_match_table_4(name, steps, warmup, rates, held_out):
    config = build_config("finetune", {"data.path": "x"}, name)
    assert (config.steps, config.warmup, config.data.val_fraction) == (steps, warmup, held_out)
    assert (config.sweep or (config.lr,)) == rates and (config.lr is None) == bool(config.sweep)
    assert config.batch_size == 512 and config.resolution == (384, 384)
    assert (config.optimizer, config.momentum, config.weight_decay) == ("sgd", 0.9, 0.0)
    assert (config.clip_norm, config.schedule, config.loss) == (1.0, "cosine", "softmax")
    assert (config.dropout, config.label_smoothing, config.augment) == (0, 0, AugmentConfig())
    # The automatic warm-up is the same, so a preset with other steps gets a suitable one:
    assert plan_config(1_000, CPU, steps=steps).warmup == warmup


def pretraining(name: str, variant: str | None = None, **given) -> TrainConfig:
    given |= {"variant": variant} if variant else {}
    return build_config("pretrain", {"data.path": "x", **given}, name)


@pytest.mark.parametrize(
    ("name", "variant", "epochs", "rate"),
    [
        *(("jft", variant, 7, 8e-4) for variant in ("B/16", "B/32", "R101x1", "R50+B/32")),
        *(("jft", variant, 7, 6e-4) for variant in ("L/32", "R152x1", "R152x2")),
        *(("jft", variant, 7, 4e-4) for variant in ("L/16", "R50+L/16")),
        *(("jft", "R50+L/32", 7, 2e-4), ("jft", "R50x2", 7, 1e-3), ("jft", "H/14", 14, 3e-4)),
        *(("imagenet21k", "L/32", 90, 1e-3), ("imagenet", "R50+B/16", 300, 3e-3)),
    ],
)
def test_pretraining_presets_match_table_3(name, variant, epochs, rate):
    run = pretraining(name, variant)
    assert (run.variant, run.epochs, run.lr, run.steps) == (variant, epochs, rate, None)
    assert (run.schedule, run.weight_decay, run.dropout, run.clip_norm) == {
        "jft": ("linear", 0.1, 0.0, None),
        "imagenet21k": ("linear", 0.03, 0.1, None),
        "imagenet": ("cosine", 0.3, 0.1, 1.0),
    }[name]
    assert (run.optimizer, run.betas, run.decay_by) == ("adamw", (0.9, 0.999), "lr")
    assert (run.batch_size, run.warmup, run.resolution) == (4096, 10_000, (224, 224))
    assert run.augment == AugmentConfig() and run.overrides == {}


def test_s16_i1k_preset_matches_big_vision():
    """configs/vit_s16_i1k.py"""
    run = pretraining("s16-i1k")
    assert (run.variant, run.epochs, run.batch_size, run.lr) == ("S/16", 90, 1024, 1e-3)
    assert (run.weight_decay, run.decay_by, run.clip_norm) == (1e-4, "schedule", 1.0)
    assert (run.schedule, run.warmup, run.loss, run.dropout) == ("cosine", 10_000, "softmax", 0)
    assert (run.augment.randaugment, run.augment.mixup) == ((2, 10), 0.2)
    assert run.augment.crop_area == (0.05, 1.0)
    model = model_config(run.variant, num_classes=1000, **run.overrides)
    assert (model.pool, model.posemb, model.class_token) == ("gap", "sincos2d", False)
    assert model.pre_logits == 384  # rep_size=True


def test_preset_rejects_variant_not_in_its_table():
    with pytest.raises(ConfigError, match="no learning rate for H/14"):
        pretraining("imagenet21k", "H/14")
