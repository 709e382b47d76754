"""The presets are the paper's numbers, and the defaults beside them are the paper's too."""

import pytest
import torch

from vitcli.config import AugmentConfig, DataConfig, model_config
from vitcli.presets import PRESETS
from vitcli.train.plan import fill_gaps
from vitcli.train_config import TrainConfig

LOW, HIGH = (0.001, 0.003, 0.01, 0.03), (0.003, 0.01, 0.03, 0.06)


@pytest.mark.parametrize(
    "name, steps, warmup, rates, held_out",
    [
        ("imagenet", 20_000, 500, HIGH, 0.01),
        ("cifar10", 10_000, 500, LOW, 0.02),
        ("cifar100", 10_000, 500, LOW, 0.02),
        ("pets", 500, 100, LOW, 0.1),
        ("flowers", 500, 100, LOW, 0.1),
        ("vtab", 2_500, 500, (0.01,), 0.2),
    ],
)
def test_a_preset_is_its_row_of_table_4(name, steps, warmup, rates, held_out):
    run = PRESETS[name].fields()
    data = DataConfig("x", **run.pop("data"))
    config = TrainConfig(data=data, output="y", **run)
    assert (config.steps, config.warmup, config.data.val_fraction) == (steps, warmup, held_out)
    assert (config.sweep or (config.lr,)) == rates and (config.lr is None) == bool(config.sweep)
    assert config.batch_size == 512 and config.resolution == (384, 384)
    assert (config.optimizer, config.momentum, config.weight_decay) == ("sgd", 0.9, 0.0)
    assert (config.clip_norm, config.schedule, config.loss) == (1.0, "cosine", "softmax")
    assert (config.dropout, config.label_smoothing, config.augment) == (0, 0, AugmentConfig())
    assert config.augment.crop_area == (0.05, 1.0) and config.augment.flip
    assert config.retrain and config.task == "finetune"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_auto_rule_warms_up_as_the_presets_do(preset):
    """So that a preset of another length has a warm-up that suits it."""
    config = TrainConfig(data=DataConfig("x"), output="y", steps=preset.steps, accumulate=1)
    model = model_config("Ti/16", num_classes=5)
    plan = fill_gaps(config, model, 1_000, torch.device("cpu"))
    assert plan.warmup == preset.warmup
