"""The `vit pretrain` and `vit finetune` commands: output and exit codes."""

import json
import re
import shutil

import pytest

from cli.conftest import error_message
from cli.training_runs import SHORT, TINY, finetune, vit
from vitcli.cli.training import build_config
from vitcli.errors import OutputError
from vitcli.hub import fetch as hub
from vitcli.train import inputs, setup
from vitcli.train.directory import RunDirectory, read_train_config

pytestmark = pytest.mark.usefixtures("no_figures")


def test_finetune_prints_plan_result_and_next_command(images, pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "LONG_SEQUENCE", 9)
    monkeypatch.chdir(pretrained.parent)
    result = finetune(images, pretrained.name, tmp_path / "run", "--resolution", "24")
    assert result.exit_code == 0, result.stderr
    assert "24 x 24 px in patches of 8: 10 tokens" in result.stderr
    assert "warning: 10 tokens" in result.stderr
    assert "2 classes: cats, dogs\n" in result.stderr
    assert "4 steps of 8" in result.stderr and "sgd, learning rate 0.01" in result.stderr
    assert result.stdout.splitlines()[0].startswith("val: top-1 ")
    assert f"next: vit predict IMAGE --model {tmp_path / 'run'}" in result.stderr
    result = vit("predict", images / "cats" / "0.png", "--model", tmp_path / "run", "--json")
    predictions = json.loads(result.stdout)["predictions"]
    assert {prediction["label"] for prediction in predictions} == {"cats", "dogs"}
    record = json.loads((tmp_path / "run" / "config.json").read_text())["vit"]
    assert record["train"]["model"] == str(pretrained)
    assert record["provenance"]["parent"] == pretrained.name


def test_json_is_one_object_per_line(images, pretrained, tmp_path):
    args = ("--ema", "0.5", "--json", "--quiet", "--log-every", "3")
    result = finetune(images, pretrained, tmp_path / "run", *args)
    events = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "note" and "plan" in kinds and kinds[-1] == "result" and not result.stderr
    (evaluation,) = [event for event in events if event["event"] == "evaluation"]
    assert {"val_top1", "val_loss", "ema_val_top1", "ema_val_loss"} <= set(evaluation)
    last = events[-1]
    assert (last["stored_step"], last["steps"], last["unreadable"]) == (4, 4, 0)
    assert last["stored_average"] is (evaluation["ema_val_top1"] > evaluation["val_top1"])
    assert last["directory"] == str(tmp_path / "run") and 0 <= last["val_top1"] <= 1
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["event"] == "train"] == [1, 3, 4]


def test_run_can_be_repeated_from_its_config(images, tmp_path):
    args = ("pretrain", "--data", images, *TINY, *SHORT, "--scale", "0.4,1", "--seed", "3")
    args += ("--betas", "0.8,0.99", "--eval-every", "3")
    assert vit(*args, "-o", tmp_path / "a").exit_code == 0
    result = vit("pretrain", "--config", tmp_path / "a" / "config.json", "-o", tmp_path / "b")
    assert result.exit_code == 0, result.stderr
    a, b = (json.loads((tmp_path / n / "config.json").read_text())["vit"]["train"] for n in "ab")
    assert a.pop("output") != b.pop("output") and a == b
    assert a["augment"]["crop_area"] == [0.4, 1.0] and a["seed"] == 3
    assert a["betas"] == [0.8, 0.99]
    smaller = build_config("pretrain", {"output": "c", "batch_size": 5}, config=str(tmp_path / "a"))
    assert a["accumulate"] == 1 and smaller.accumulate is None
    longer = build_config("pretrain", {"output": "c", "steps": 50}, config=str(tmp_path / "a"))
    assert longer.warmup is longer.log_every is longer.lr is None and longer.eval_every == 3
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0][-500:] == weights[1][-500:]


@pytest.mark.parametrize(
    "make",
    [
        lambda root: None,
        lambda root: root.mkdir(),
        lambda root: shutil.copytree(root.parent / "pets" / "cats", root / "cats"),
    ],
    ids=["missing", "empty", "one class"],
)
def test_unusable_data_fails_before_download(images, tmp_path, monkeypatch, make):
    monkeypatch.setattr(hub, "fetch", lambda *args, **options: pytest.fail("downloaded"))
    shutil.copytree(images, tmp_path / "pets")
    make(tmp_path / "data")
    result = finetune(tmp_path / "data", "vit-b16-i21k", tmp_path / "run")
    assert str(tmp_path / "data") in error_message(result)
    assert not (tmp_path / "run").exists()


def test_unreadable_images_are_skipped_and_counted(images, pretrained, tmp_path):
    data = tmp_path / "pets"
    for split in ("train", "val", "test"):
        shutil.copytree(images, data / split)
        (data / split / "cats" / "3.png").write_bytes(b"no image")
        (data / split / "dogs" / "gone.png").symlink_to("nowhere")
    args = ("--batch-size", "16", "--workers", "2")
    result = finetune(data, pretrained, tmp_path / "run", *args)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("warning: skipped ") == 7
    assert f"warning: skipped {data / 'val' / 'cats' / '3.png'}: " in result.stderr
    assert "skipped 6 images that could not be read" in result.stderr
    result = finetune(data, pretrained, tmp_path / "strict", "--strict")
    assert "6 of 51 images cannot be read" in error_message(result)
    assert result.stderr.count("warning: ") == 6 and not (tmp_path / "strict").exists()


@pytest.mark.parametrize("rates", ["0.1", "0.1,0.2"])
def test_interrupt_before_first_step_prints_resume_command(
    images, pretrained, tmp_path, monkeypatch, rates
):
    def stop(*arguments):
        raise KeyboardInterrupt

    args = ("--lr", rates, "--freeze", "backbone", "--scale", "1,1", "--no-flip", "--ema", "0.5")
    with monkeypatch.context() as patch:
        patch.setattr(inputs.Features, "_compute", stop)
        result = finetune(images, pretrained, tmp_path / "run", *args)
    assert result.exit_code != 0 and "Traceback" not in result.stderr
    assert f"continue with: vit finetune --resume {tmp_path / 'run'}\n" in result.stderr
    shutil.copytree(images, tmp_path / "moved")
    result = vit("finetune", "--resume", tmp_path / "run", "--data", tmp_path / "moved")
    assert read_train_config(tmp_path / "run").data.path == str(tmp_path / "moved")
    assert result.exit_code == 0 and result.stdout.count("best\n") == rates.count(",")
    assert "(50 trained), 16 x 16 px" in result.stderr  # 2 x 24 weights, 2 biases
    assert re.search(r"step 1 of 4: .*loss 0\.6931", result.stderr)


def test_full_disk_prints_resume_command(images, pretrained, tmp_path, monkeypatch):
    def full(*arguments):
        raise OutputError("cannot be written: No space left on device", where="metrics.jsonl")

    monkeypatch.setattr(RunDirectory, "append", full)
    text = error_message(finetune(images, pretrained, tmp_path / "run"))
    assert f"continue with: vit finetune --resume {tmp_path / 'run'}\n" in text


def test_resume_and_config_reject_conflicting_options(pretrained, tmp_path):
    for args, options in (
        (("--device", "cpu", "--classes", "x", "--steps", "3"), "--classes, --steps"),
        (("--config", pretrained), "--config"),
        (("--force",), "--force"),
    ):
        result = vit("pretrain", "--resume", pretrained, *args)
        assert result.exit_code == 2 and f"leave out {options}" in result.stderr
    for args in (("--resume", pretrained), ("--config", pretrained, "-o", tmp_path / "run")):
        result = vit("finetune", *args)
        assert result.exit_code == 2 and "use `vit pretrain`" in result.stderr
    result = vit("finetune", "--config", pretrained, "--preset", "pets", "-o", tmp_path / "run")
    assert result.exit_code == 2 and "--preset" in result.stderr
