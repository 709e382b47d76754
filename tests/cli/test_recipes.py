"""`vit finetune` with `--preset ...` and `--lr A,B,...`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from cli.training_runs import finetune, vit
from vitcli.cli.training import build_config
from vitcli.cli.training_display import preset_event
from vitcli.train.plan import default_lr
from vitcli.train.presets import recipe

pytestmark = pytest.mark.usefixtures("no_figures")

TRIAL = {"lr", "val_top1", "val_loss", "best_step", "stored_average", "seconds", "failure"}
"""Keys of a trial in JSON."""


def test_preset_and_overrides_are_printed(images, pretrained, tmp_path):
    args = ("--preset", "flowers", "--lr", "0.003", "--resolution", "16", "--val-fraction", "0.1")
    result = finetune(images, pretrained, tmp_path / "run", *args)
    assert result.exit_code == 0, result.stderr
    preset, overridden = result.stderr.splitlines()[:2]
    assert preset.split() == ["preset", "flowers:"]
    names = "overridden: batch size, lr, resolution, steps, val fraction, warmup"
    assert overridden.strip() == names
    plan = "4 steps of 8 images (2.29 epochs), sgd, learning rate 0.003, warm-up 0 steps"
    assert plan in result.stderr


def test_preset_values_can_be_overridden():
    options = {"data.path": "x", "data.val_fraction": 0.1, "clip_norm": 1.0}
    config = build_config("finetune", options, "imagenet")
    assert config.sweep == (0.003, 0.01, 0.03, 0.06) and config.steps == 20_000
    assert config.warmup == 500 and config.data.val_fraction == 0.1  # the default, but given
    event = preset_event("imagenet", recipe("finetune", "imagenet", None), options)
    assert event["event"] == "preset" and event["lr"] == (0.003, 0.01, 0.03, 0.06)
    assert event["overridden"] == ["val_fraction"] and event["batch_size"] == 512
    longer = build_config("finetune", {**options, "epochs": 2}, "imagenet")
    assert longer.steps is longer.warmup is None and longer.epochs == 2


def test_lora_default_optimizer_and_learning_rate():
    options = {"data.path": "x", "lora": 8}
    config = build_config("finetune", options)
    assert (config.optimizer, default_lr(config, 64)) == ("adamw", pytest.approx(1e-3))
    assert build_config("finetune", {**options, "lora": 0}).optimizer == "sgd"
    assert build_config("finetune", options, "flowers").optimizer == "sgd"


def test_sweep_prints_table_and_model(images, pretrained, tmp_path):
    result = finetune(images, pretrained, tmp_path / "run", "--lr", "0.03,0.001")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["learning", "rate", "val", "top-1", "val", "loss", "step"]
    assert [line[0] for line in lines[1:3]] == ["0.03", "0.001"]
    assert sum(line[-1] == "best" for line in lines[1:3]) == 1
    assert "\x1b" not in result.stdout and "─" not in result.stdout
    assert lines[-1] == ["model:", str(tmp_path / "run")]
    assert "learning rates 0.03 and 0.001, warm-up 0 steps" in result.stderr
    assert "for 2 runs and a final run" in result.stderr
    assert "learning rate 0.001, 2 of 2" in result.stderr
    image = images / "cats" / "0.png"
    assert vit("predict", image, "--model", tmp_path / "run", "--json").exit_code == 0
    # sweep.json repeats the sweep, config.json only the run with the chosen rate.
    for name, kinds in (("sweep", ["trial", "trial", "choice"]), ("config", [])):
        config = tmp_path / "run" / f"{name}.json"
        result = vit("finetune", "--config", config, "--json", "-q", "-o", tmp_path / name)
        events = [json.loads(line) for line in result.stdout.splitlines()]
        assert [e["event"] for e in events if e["event"] in ("trial", "choice")] == kinds
        assert events[-1]["event"] == "result" and result.stderr == ""
        assert all(set(trial) == TRIAL for e in events for trial in e.get("trials", ()))
        files = [tmp_path / run / "model.safetensors" for run in ("run", name)]
        first, second = (load_file(file) for file in files)
        assert all(np.array_equal(first[key], second[key]) for key in first)
