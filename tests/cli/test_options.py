"""Command-line options generated from config fields."""

import dataclasses
import json
from pathlib import Path

import pytest

from cli.training_runs import vit
from vitcli.cli.training import build_config
from vitcli.train.config import TrainConfig

pytestmark = pytest.mark.usefixtures("no_figures")


def write_record(config: TrainConfig, directory: Path) -> str:
    """Write the config of a run as training does, and return the path of the file."""
    file = directory / "config.json"
    file.write_text(json.dumps({"vit": {"train": dataclasses.asdict(config)}}))
    return str(file)


def test_new_learning_rates_discard_sweep_decisions(tmp_path):
    first = build_config("pretrain", {"data.path": "x"})
    data = dataclasses.replace(first.data, merge_val=True)
    file = write_record(dataclasses.replace(first, data=data, note="!"), tmp_path)
    same = build_config("pretrain", {"output": "b"}, config=file)
    assert same.data.merge_val and same.note == "!"
    new = build_config("pretrain", {"output": "b", "lr": (0.1, 0.2)}, config=file)
    assert new.sweep == (0.1, 0.2) and not new.data.merge_val and new.note == ""


def test_preset_is_merged_with_objective_defaults():
    options = {"data.path": "x", "objective": "mae", "augment.flip": False}
    augment = build_config("pretrain", options, "s16-i1k").augment
    assert augment.crop_area == (0.2, 1.0) and augment.randaugment == (2, 10) and not augment.flip


def test_options_that_contradict_the_config_are_rejected(tmp_path):
    options = {"data.path": "x", "output": str(tmp_path), "lora": 4}
    write_record(build_config("finetune", options), tmp_path)
    result = vit("finetune", "--config", tmp_path, "-o", tmp_path / "new", "--freeze", "1")
    assert result.exit_code == 2 and "--freeze cannot be combined with --lora" in result.stderr


def test_overrides_are_merged_with_config(tmp_path):
    options = {"data.path": "x", "output": str(tmp_path / "a"), "overrides.pool": "gap"}
    file = write_record(build_config("pretrain", options), tmp_path)
    config = build_config("pretrain", {"output": "b", "overrides.depth": 6}, config=file)
    assert config.overrides == {"pool": "gap", "depth": 6}


NO_EFFECT = [
    ("finetune --decay-by schedule --optimizer adamw", "", "--weight-decay 0.1"),
    ("finetune --grad-checkpointing", "--freeze backbone", ""),
    ("finetune --lora 8", "--freeze 1", ""),
    ("finetune --teacher default", "--loss sigmoid", ""),
    ("finetune --no-retrain", "--lr 0.1", "--lr 0.1,0.2"),
    ("pretrain --posemb-method bicubic --resolution 64", "", "--model default"),
    ("evaluate --posemb-method bicubic", "", "--resolution 64"),
    ("pretrain --patch-size 8", "--set patch_size=4", "--resolution 32"),
    ("pretrain --mask-ratio 0.5", "", "--objective mae"),
    ("pretrain --lr 1,2", "--objective mae", ""),
    ("pretrain --mixup 1", "--objective mae", "--objective mae --mixup 0"),
    ("pretrain --streams 4", "", "--data hf://datasets/a/b --offline"),
]
"""A call, arguments that make its first option useless, and arguments that give it an effect."""


@pytest.mark.parametrize(("call", "useless", "useful"), NO_EFFECT, ids=[c for c, *_ in NO_EFFECT])
def test_option_without_effect_is_rejected(call, useless, useful):
    task, option, *args = call.split()
    args += ["--model", "default"] if task == "finetune" else []

    def run(more):
        data = [] if "--data" in more else ["--data", "missing"]
        return vit(task, option, *args, *data, *more.split())

    rejected, accepted = run(useless), run(useful)
    assert rejected.exit_code == 2 and option.replace("no-", "") in rejected.stderr
    assert "error: " in accepted.stderr and option not in accepted.stderr  # another error


def test_config_and_preset_values_may_have_no_effect(tmp_path):
    fields = {"momentum": 0.5, "augment.mixup": 0.2, "label_smoothing": 0.1, "shard": True}
    options = {"data.path": str(tmp_path / "missing"), "output": str(tmp_path), **fields}
    write_record(build_config("pretrain", {**options, "optimizer": "sgd"}), tmp_path)
    for args in (("--optimizer", "adamw", "--objective", "mae"), ("--model", "default")):
        result = vit("pretrain", "--config", tmp_path, "-o", tmp_path / "new", *args)
        assert result.exit_code == 1 and "no such file or directory" in result.stderr
    args = ("--preset", "s16-i1k", "--objective", "mae", "--data", tmp_path / "missing")
    assert vit("pretrain", *args).exit_code == 1


def test_unusable_output_paths_are_rejected(tmp_path, monkeypatch):
    """Standard output for files, and a file name for a directory."""
    monkeypatch.chdir(tmp_path)
    for command, option, path, message in (
        ("evaluate", "--predictions", "-", "stdout"),
        ("finetune", "-o", "-", "stdout"),
        ("finetune", "-o", "out.pt", "a directory, not"),
    ):
        result = vit(command, "--data", "x", option, path)
        assert result.exit_code == 2 and message in result.stderr and not [*tmp_path.iterdir()]


def test_run_name_omits_url_signature():
    path = "https://h/b/train-{000..099}.tar?Credential=A/aws4_request&Signature=beef"
    assert build_config("finetune", {"data.path": path}).output == "runs/train"
