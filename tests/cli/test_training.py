"""`vit pretrain` and `vit finetune` as they are typed: what is printed, and the exit code."""

from __future__ import annotations

import json
import shutil

import pytest

from cli.training_runs import SHORT, TINY, vit
from vitcli.cli.training import build_config
from vitcli.errors import OutputError
from vitcli.hub import fetch as hub
from vitcli.train import inputs
from vitcli.train.directory import RunDirectory


def failure(result) -> str:
    """What a failed command says; nothing else may be on stderr but notes above it."""
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    return result.stderr[result.stderr.index("error: ") :]


def test_finetune_prints_the_plan_the_result_and_what_to_type_next(images, parent, tmp_path):
    folder = tmp_path / "run"
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    result = vit(*words, "--resolution", "24", "-o", folder)
    assert result.exit_code == 0, result.stderr
    assert "24 x 24 px in patches of 8: 10 tokens an image" in result.stderr
    assert "4 steps of 8" in result.stderr and "sgd, learning rate 0.01" in result.stderr
    assert result.stdout.splitlines()[0].startswith("val: top-1 ")
    assert f"next: vit predict IMAGE --model {folder}" in result.stderr
    again = vit("predict", images / "cats" / "0.png", "--model", folder, "--json")
    (line,) = again.stdout.splitlines()
    assert {p["label"] for p in json.loads(line)["predictions"]} == {"cats", "dogs"}


def test_json_is_one_object_a_line(images, parent, tmp_path):
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    result = vit(*words, "-o", tmp_path / "run", "--json", "--quiet")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "note" and "plan" in kinds and kinds[-1] == "result"
    assert 0 <= events[-1]["val_top1"] <= 1
    assert result.stderr == ""


def test_a_run_can_be_run_again_from_its_config(images, tmp_path):
    words = ("pretrain", "--data", images, *TINY, *SHORT, "--crop-area", "0.4,1", "--seed", "3")
    assert vit(*words, "-o", tmp_path / "a").exit_code == 0
    result = vit("pretrain", "--config", tmp_path / "a" / "config.json", "-o", tmp_path / "b")
    assert result.exit_code == 0, result.stderr
    a, b = (json.loads((tmp_path / n / "config.json").read_text())["vit"]["train"] for n in "ab")
    assert a.pop("output") != b.pop("output") and a == b
    assert a["augment"]["crop_area"] == [0.4, 1.0] and a["seed"] == 3
    again = build_config("pretrain", {"output": "c", "batch_size": 5}, config=str(tmp_path / "a"))
    assert a["accumulate"] == 1 and again.accumulate is None
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0][-500:] == weights[1][-500:]


def test_the_best_model_is_replaced_by_ours_where_there_is_no_network(images, monkeypatch):
    monkeypatch.setattr(hub, "cached", lambda repo, revision=None: None)
    monkeypatch.setattr(hub, "reachable", lambda timeout, repo: timeout > 3)
    result = vit("finetune", "--data", images, "--resolution", "225", "-o", "never-made")
    lines = result.stderr.splitlines()
    assert "cannot be reached: starting from" in lines[0] and "vit-b16-i21k" in lines[0]
    text = failure(result)
    assert "height 225 is not a multiple of the patch size 16" in text
    assert "hint: use a resolution of 224 or 240" in text


def test_resolution_between_patches(images, parent):
    text = failure(vit("finetune", "--data", images, "--model", parent, "--resolution", "25"))
    assert text == (
        "error: height 25 is not a multiple of the patch size 8\n"
        "hint: use a resolution of 24 or 32\n"
    )


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda root: None, "there is no such file or directory"),
        (lambda root: root.mkdir(), "no images"),
        (lambda root: shutil.copytree(root.parent / "pets" / "cats", root / "cats"), "one class"),
    ],
    ids=["missing", "empty", "one class"],
)
def test_data_that_cannot_be_learnt(images, parent, tmp_path, make, said):
    shutil.copytree(images, tmp_path / "pets")
    make(tmp_path / "odd")
    words = ("finetune", "--data", tmp_path / "odd", "--model", parent, "-o", tmp_path / "run")
    for rates in ("0.1", "0.1,0.01"):
        text = failure(vit(*words, "--lr", rates))
        assert said in text and str(tmp_path / "odd") in text
        assert len(text.splitlines()) <= 2
        assert not (tmp_path / "run").exists()


def test_a_class_with_one_image_is_trained_on(images, parent, tmp_path):
    shutil.copytree(images, tmp_path / "pets")
    (tmp_path / "pets" / "birds").mkdir()
    shutil.copy(images / "cats" / "0.png", tmp_path / "pets" / "birds" / "only.png")
    words = ("finetune", "--data", tmp_path / "pets", "--model", parent, *SHORT, "--device", "cpu")
    result = vit(*words, "-o", tmp_path / "run")
    assert result.exit_code == 0
    assert "only one image of 'birds': trained on, not validated on" in result.stderr


def test_an_output_that_cannot_be_written(images, parent, tmp_path):
    (tmp_path / "file").write_text("mine")
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    text = failure(vit(*words, "-o", tmp_path / "file" / "run"))
    assert f"error: {tmp_path}/file/run: cannot be used as a run's folder" in text


def test_a_image_that_cannot_be_decoded_is_named(images, parent, tmp_path):
    shutil.copytree(images, tmp_path / "pets")
    (tmp_path / "pets" / "cats" / "3.png").write_bytes(b"no image")
    words = ("finetune", "--data", tmp_path / "pets", "--model", parent, *SHORT, "--device", "cpu")
    text = failure(vit(*words, "--val-fraction", "0", "-o", tmp_path / "run"))
    assert "cats/3.png" in text


def test_a_linear_probe_says_what_it_trains_and_stores(images, parent, tmp_path):
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    still = ("--freeze", "backbone", "--crop-area", "1,1", "--no-flip", "--ema", "0.5")
    result = vit(*words, *still, "-o", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "(50 trained), 16 x 16 px" in result.stderr  # 2 x 24 weights, 2 biases
    assert "the features of 16 images are computed once: nothing changes them" in result.stderr
    assert "step 4: validation accuracy " in result.stderr and "of the average" in result.stderr
    assert "step 1 of 4: loss 0.6931" in result.stderr
    assert "stored: the" in result.stderr and ", the best on validation\n" in result.stderr


@pytest.mark.parametrize("rates", ["0.1", "0.1,0.2"])
def test_a_stop_before_the_first_step_says_how_to_go_on(
    images, parent, tmp_path, monkeypatch, rates
):
    def stop(*arguments):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "-o", folder, "--lr", rates)
    with monkeypatch.context() as patch:
        patch.setattr(inputs.Features, "_compute", stop)
        result = vit(*words, "--freeze", "backbone", "--crop-area", "1,1", "--no-flip")
    assert result.exit_code != 0 and "Traceback" not in result.stderr
    assert f"stopped; continue with: vit finetune --resume {folder}\n" in result.stderr
    assert vit("finetune", "--resume", folder).exit_code == 0


def test_a_full_disk_says_how_to_go_on(images, parent, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def full(*arguments):
        raise OutputError("cannot be written: No space left on device", where="metrics.jsonl")

    monkeypatch.setattr(RunDirectory, "append_metrics", full)
    result = vit("finetune", "--data", images, "--model", parent, *SHORT, "-o", folder)
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "error: metrics.jsonl: cannot be written: No space left on device\n"
        f"stopped; continue with: vit finetune --resume {folder}\n"
    )


def test_a_image_that_cannot_be_read_says_how_to_go_on(images, parent, tmp_path):
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(images, data)
    broken = data / "cats" / "gone.png"
    broken.symlink_to("nowhere")
    words = ("finetune", "--data", data, "--model", parent, *SHORT, "-o", folder)
    result = vit(*words, "--val-fraction", "0", "--workers", "0", "--batch-size", "17")
    assert result.exit_code == 1
    assert result.stderr.endswith(
        f"error: {broken}: there is no such file\n"
        "hint: repair or remove the file\n"
        f"stopped; continue with: vit finetune --resume {folder}\n"
    )
    broken.unlink()
    assert vit("finetune", "--resume", folder).exit_code == 0


def test_a_kept_head_is_measured_before_step_1(images, parent, tmp_path):
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    result = vit(*words, "--keep-head", "-o", tmp_path / "run", "--patience", "1")
    assert result.exit_code == 0, result.stderr
    assert "head: the rows of 2 of 2 classes are kept" in result.stderr
    assert "before step 1: validation accuracy " in result.stderr
    shutil.copytree(images / "cats", tmp_path / "other" / "lions")
    shutil.copytree(images / "dogs", tmp_path / "other" / "wolves")
    text = failure(vit("finetune", "--data", tmp_path / "other", "--model", parent, "--keep-head"))
    assert "knows none of 'lions' and 'wolves'" in text and "'cats' and 'dogs'" in text


def test_json_tells_what_was_stored(images, parent, tmp_path):
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "--device", "cpu")
    result = vit(*words, "--ema", "0.5", "-o", tmp_path / "run", "--json", "--quiet")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    (evaluation,) = [event for event in events if event["event"] == "evaluation"]
    assert {"val_top1", "val_loss", "ema_val_top1", "ema_val_loss"} <= set(evaluation)
    assert events[-1]["stored_step"] == 4 and events[-1]["steps"] == 4
    better = evaluation["ema_val_top1"] > evaluation["val_top1"]
    assert events[-1]["stored_average"] is better


@pytest.mark.parametrize(
    "options, said",
    [
        (("--class-weights", "nowhere"), "nowhere: class weights cannot be read: No such file"),
        (("--class-weights", "WEIGHTS"), "'lions' is not among the 2 classes of the data"),
        (("--freeze", "2"), "cannot freeze 2 blocks: the model has 1"),
        (("--patience", "2", "--val-fraction", "0"), "no validation part"),
    ],
)
def test_options_that_no_run_can_have(images, parent, tmp_path, options, said):
    (tmp_path / "weights.csv").write_text("lions,3\n")
    options = [word.replace("WEIGHTS", str(tmp_path / "weights.csv")) for word in options]
    words = ("finetune", "--data", images, "--model", parent, *SHORT, "-o", tmp_path / "run")
    text = failure(vit(*words, *options))
    assert said in text and len(text.splitlines()) <= 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lr", ["0.1", "0.1,0.01"])
def test_a_class_that_is_only_validated_is_named(images, parent, tmp_path, lr):
    """Whatever form the data has; in a sweep too, before anything is written."""
    for part in ("train", "val"):
        shutil.copytree(images, tmp_path / "pets" / part)
    shutil.copytree(images / "cats", tmp_path / "pets" / "val" / "lynx")
    listed, rows = tmp_path / "pets.csv", ["path,label,split"]
    for path in sorted((tmp_path / "pets").rglob("*.*")):
        rows.append(f"{path},{path.parent.name},{path.parents[1].name}")
    listed.write_text("\n".join(rows))
    for data in (tmp_path / "pets", listed):
        words = ("finetune", "--data", data, "--model", parent, *SHORT, "-o", tmp_path / "run")
        assert failure(vit(*words, "--lr", lr)) == (
            f"error: {data}: no training images of 'lynx'\n"
            "hint: add some, or remove the class from the validation split\n"
        )
        assert not (tmp_path / "run").exists()


def test_a_wrong_call_is_typers(images):
    for words, said in [
        (("finetune",), "--data"),
        (("finetune", "--data", images, "--resolution", "a"), "is not a size such as"),
        (("finetune", "--data", images, "--preprocess", "x=1"), "is not KEY=VALUE"),
        (("pretrain", "--data", images, "--set", "depth=six"), "depth: 'six' is not a whole"),
        (("finetune", "--data", images, "--freeze", "some"), "is not backbone or a whole number"),
        (("finetune", "--data", images, "--ema", "1"), "'--ema': 1.0 is not"),
        (("finetune", "--data", images, "--layer-decay", "1.5"), "'--layer-decay': 1.5 is not"),
        (("finetune", "--data", images, "--val-fraction", "1"), "'--val-fraction': 1.0 is not"),
        (("finetune", "--data", images, "--lr", "0.1,abc"), "'--lr': 'abc' is not a number"),
        (("finetune", "--data", images, "--lr", "0.1,nan"), "'--lr': nan is not above 0"),
        (("finetune", "--data", images, "--lr", "0.01,1e-2"), "lr: 0.01 is given more than once"),
        (("finetune", "--data", images, "--no-retrain"), "several learning rates"),
        (("finetune", "--data", images, "--preset", "flower"), "'--preset'"),
        (
            ("finetune", "--data", images, "--class-weights", "balanced", "--balanced-sampling"),
            "cannot be combined",
        ),
        (("finetune", "--data", images, "-b", "10", "--grad-accum", "3"), "does not split"),
        (("finetune", "--data", images, "--patience", "0"), "--patience"),
        (("finetune", "--data", images, "--optimizer", "lion"), "lion"),
        (("finetune", "--data", images, "--steps", "3", "--epochs", "1"), "--epochs"),
        (("pretrain", "--data", images, "--model", "x", "--variant", "B/16"), "--variant"),
    ]:
        result = vit(*words)
        assert result.exit_code == 2 and said in result.stderr


def test_a_run_is_resumed_as_it_was(parent):
    words = ("pretrain", "--resume", parent, "--device", "cpu", "--classes", "x", "--steps", "3")
    result = vit(*words)
    assert result.exit_code == 2 and "leave out --classes, --steps" in result.stderr


def test_resume_of_nothing(tmp_path):
    text = failure(vit("finetune", "--resume", tmp_path))
    assert "config.json: cannot be read" in text


def test_more_than_4096_tokens_are_warned_of(images, parent, tmp_path):
    words = ("finetune", "--data", images, "--model", parent, "--resolution", "520")
    words += ("--steps", "1", "--batch-size", "2", "--device", "cpu", "-o", tmp_path / "run")
    result = vit(*words)
    assert "4,226 tokens an image: attention's time and memory grow" in result.stderr
