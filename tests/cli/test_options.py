"""Command-line options generated from config fields."""

import dataclasses
import json

import pytest

from cli.training_runs import SHORT, vit
from vitcli.cli import finetune, training
from vitcli.cli.training import build_config, training_command
from vitcli.fields import option
from vitcli.train import directory
from vitcli.train_config import TrainConfig

pytestmark = pytest.mark.usefixtures("undrawn")


@dataclasses.dataclass(frozen=True)
class Extended(TrainConfig):
    """A new `vit finetune` option takes one field."""

    glue: float = option(0.5, "--glue --paste X", "Strength of the glue.", "Crafts", below=1)


def test_option_from_a_new_config_field(images, parent, tmp_path, monkeypatch):
    for module in (training, directory):
        monkeypatch.setattr(module, "TrainConfig", Extended)
    monkeypatch.setattr(finetune, "finetune", training_command("finetune", ""))
    text = vit("finetune", "--help").stdout
    assert "\nCrafts:\n  --glue X  Strength of the glue.  [default: 0.5]\n" in text
    assert "--paste" not in text
    wrong = vit("finetune", "--data", images, "--glue", "2")
    assert wrong.exit_code == 2 and "'--glue'" in wrong.stderr
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--freeze", "backbone")
    done = vit(*words, "--paste", "0.25", "-o", tmp_path / "a", "--quiet")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 2
    assert done.stderr == "warning: --paste is deprecated: use --glue\n"
    again = build_config("finetune", {"output": "b"}, config=str(tmp_path / "a"))
    assert again.glue == 0.25
    assert vit("finetune", "--resume", tmp_path / "a", "--glue", "0").exit_code == 2


def test_new_learning_rates_discard_sweep_decisions(tmp_path):
    first = build_config("pretrain", {"data": {"path": "x"}})
    data = dataclasses.replace(first.data, merge_val=True)
    record = {"vit": {"train": dataclasses.asdict(dataclasses.replace(first, data=data, note="!"))}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = str(tmp_path / "config.json")
    same = build_config("pretrain", {"output": "b"}, config=config)
    assert same.data.merge_val and same.note == "!"
    other = build_config("pretrain", {"output": "b", "lr": (0.1, 0.2)}, config=config)
    assert other.sweep == (0.1, 0.2) and not other.data.merge_val and other.note == ""


def test_preset_is_merged_with_objective_defaults():
    given = {"data": {"path": "x"}, "objective": "mae", "augment": {"flip": False}}
    augment = build_config("pretrain", given, "s16-i1k").augment
    assert augment.crop_area == (0.2, 1.0) and augment.randaugment == (2, 10) and not augment.flip


def test_overrides_are_merged_with_config(tmp_path):
    given = {"data": {"path": "x"}, "output": str(tmp_path / "a"), "overrides": {"pool": "gap"}}
    first = build_config("pretrain", given)
    record = {"vit": {"train": dataclasses.asdict(first)}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    more = {"output": "b", "overrides": {"depth": 6}}
    again = build_config("pretrain", more, config=str(tmp_path / "config.json"))
    assert again.overrides == {"pool": "gap", "depth": 6}


NO_EFFECT = [
    ("pretrain --momentum 0.5", "", "--optimizer sgd"),
    ("finetune --betas 0.8,0.9", "", "--optimizer muon"),
    ("finetune --decay-by schedule --optimizer adamw", "", "--weight-decay 0.1"),
    ("finetune --layer-decay 0.75", "--freeze backbone", "--freeze 1"),
    ("finetune --drop-path 0.1", "--freeze backbone", "--freeze 1"),
    ("finetune --lora 8", "--freeze 1", ""),
    ("finetune --teacher default", "--loss sigmoid", ""),
    ("finetune --temperature 2", "", "--teacher default"),
    ("finetune --teacher-weight 0.5", "", "--teacher default"),
    ("finetune --no-retrain", "--lr 0.1", "--lr 0.1,0.2"),
    ("finetune --posemb-method bicubic", "", "--resolution 64"),
    ("pretrain --posemb-method bicubic --resolution 64", "", "--model default"),
    ("pretrain --variant B/16", "--model default", ""),
    ("pretrain --set depth=1", "--model default", ""),
    ("pretrain --mask-ratio 0.5", "", "--objective mae"),
    ("pretrain --target pixels", "--objective mae", "--objective masked-patch"),
    ("pretrain --decoder-width 64", "--objective masked-patch", "--objective mae"),
    ("pretrain --decoder-depth 1", "", "--objective mae"),
    *(
        (f"pretrain {words}", "--objective mae", "")
        for words in (
            *("--loss sigmoid", "--class-weights balanced", "--label-smoothing 0.1"),
            *("--balanced-sampling", "--head-bias 1", "--mixup 0.2", "--cutmix 1", "--lr 1,2"),
        )
    ),
    ("pretrain --mixup 1", "--objective mae", "--objective mae --mixup 0"),
    ("pretrain --streams 4", "", "--data hf://datasets/a/b --offline"),
    ("pretrain --train-images 9", "--data hf://datasets/a/b", "--data s3://a/b.tar --offline"),
    ("pretrain --shard", "", "--devices 999 --device cuda"),
    ("pretrain --rank-timeout 9", "", "--devices 999 --device cuda"),
    ("pretrain --max-restarts 1", "", "--devices 999 --device cuda"),
]
"""A call, arguments that make its first option useless, and arguments that give it an effect."""


@pytest.mark.parametrize(("call", "without", "beside"), NO_EFFECT, ids=[c for c, *_ in NO_EFFECT])
def test_option_without_effect_is_rejected(call, without, beside):
    task, option, *values = call.split()
    start = ("--data", "missing", *(("--model", "default") if task == "finetune" else ()))
    refused, taken = (
        vit(task, *start, option, *values, *words.split()) for words in (without, beside)
    )
    assert refused.exit_code == 2 and option.replace("no-", "") in refused.stderr
    assert taken.exit_code == 1, taken.stderr


def test_config_and_preset_values_may_have_no_effect(tmp_path):
    fields = {"momentum": 0.5, "augment": {"mixup": 0.2}, "label_smoothing": 0.1, "shard": True}
    given = {"data": {"path": str(tmp_path / "missing")}, "output": str(tmp_path), **fields}
    run = build_config("pretrain", {**given, "optimizer": "sgd"})
    record = {"vit": {"train": dataclasses.asdict(run)}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    for words in (("--optimizer", "adamw", "--objective", "mae"), ("--model", "default")):
        done = vit("pretrain", "--config", tmp_path, "-o", tmp_path / "new", *words)
        assert done.exit_code == 1 and "no such file or directory" in done.stderr
    words = ("--preset", "s16-i1k", "--objective", "mae", "--data", tmp_path / "missing")
    assert vit("pretrain", *words).exit_code == 1


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "x.jpg", "-o"),
        ("finetune", "--data", "x", "-o"),
        ("fewshot", "--data", "x", "--save"),
    ],
    ids=lambda words: words[0],
)
def test_output_directory_with_file_suffix_is_rejected(tmp_path, words):
    done = vit(*words, tmp_path / "out.pt")
    assert done.exit_code == 2 and "a directory, not" in done.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["--grid", "--old-grid"])
def test_grid_error_mentions_rows_and_columns(option):
    done = vit("resize-posemb", "default", option, "0")
    assert done.exit_code == 2 and "rows x columns" in done.stderr


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (("pretrain", "--data", "x", "--set", "image_size=64"), "--resolution"),
        (("pretrain", "--data", "x", "--set", "num_classes=3"), "dataset"),
        (("pretrain", "--data", "x", "--set", "stem=1"), "--variant"),
        (("predict", "x.jpg", "--preprocess", "size=64"), "--resolution"),
    ],
    ids=lambda words: words[-1] if isinstance(words, tuple) else "",
)
def test_error_names_the_dedicated_option(words, other):
    done = vit(*words)
    assert done.exit_code == 2 and other in done.stderr.partition("\n")[0]


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "x.jpg", "-o"),
        ("finetune", "--data", "x", "-o"),
        ("fewshot", "--data", "x", "--save"),
        ("evaluate", "--data", "x", "--predictions"),
        ("resize-posemb", "default", "--grid", "4", "-o"),
        ("convert", "default"),
    ],
    ids=lambda words: words[0],
)
def test_file_output_cannot_go_to_stdout(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = vit(*words, "-")
    assert done.exit_code == 2 and "stdout" in done.stderr and not [*tmp_path.iterdir()]


def test_run_name_omits_url_signature():
    path = "https://h/b/train-{000..099}.tar?Credential=A/aws4_request&Signature=beef"
    assert build_config("finetune", {"data": {"path": path}}).output == "runs/train"
