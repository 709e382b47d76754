"""Whole runs: they learn, they resume to the bit, they leave a folder in order."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from vitcli.checkpoints.load import load
from vitcli.config import AugmentConfig, DataConfig
from vitcli.errors import ConfigError, OutputError, RunError
from vitcli.evaluate import evaluate
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor
from vitcli.train import inputs, loop, report, setup
from vitcli.train.directory import RunDirectory, read_train_config
from vitcli.train.loop import train


def weights(run) -> dict[str, torch.Tensor]:
    return load_file(Path(run.output) / "model.safetensors")


def assert_same(first, second) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def interrupt_at(step: int):
    """An on_event that sends this process SIGTERM once a step is reported."""

    def on_event(event) -> None:
        if event.kind == "train" and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


def test_a_run_learns_and_writes_its_folder(tiny_run):
    run = tiny_run(steps=60, command="vit pretrain --data colours")
    events = []
    outcome = train(run, on_event=events.append)
    folder = Path(run.output)
    assert outcome.stopped_by is None and outcome.metrics["val_top1"] == 1.0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md", "config.json", "confusion.png", "curves.png", "metrics.jsonl",
        "model.safetensors", "reliability.png", "split.json",
    }  # fmt: skip
    plan = next(event for event in events if event.kind == "plan")
    assert plan.tokens == 5 and plan.steps == 60 and plan.estimated_seconds > 0
    losses = [event.loss for event in events if event.kind == "train"]
    assert losses[-1] < 0.2 < losses[0]
    model = load(folder)
    assert [label.name for label in model.classes] == ["blue", "green", "red"]
    assert "vit pretrain --data colours" in (folder / "README.md").read_text()
    assert model.info.provenance["metrics"]["val_top1"] == 1.0


def test_the_same_seed_gives_the_same_weights_whatever_the_workers(tiny_run, tmp_path):
    first = tiny_run(output=str(tmp_path / "a"), workers=0)
    second = tiny_run(output=str(tmp_path / "b"), workers=2)
    third = tiny_run(output=str(tmp_path / "c"), seed=1)
    for run in (first, second, third):
        train(run)
    assert_same(weights(first), weights(second))
    assert not torch.equal(weights(first)["norm.weight"], weights(third)["norm.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sigterm_and_resume_equal_an_unbroken_run(tiny_run, tmp_path, optimizer):
    fields = {"optimizer": optimizer, "dropout": 0.1, "drop_path": 0.1}
    whole = tiny_run(output=str(tmp_path / "whole"), **fields)
    train(whole)
    broken = tiny_run(output=str(tmp_path / "broken"), **fields)
    outcome = train(broken, on_event=interrupt_at(5))
    assert outcome.stopped_by == signal.SIGTERM and outcome.step == 5
    assert (tmp_path / "broken" / "state.safetensors").exists()
    assert train(broken, resume=True).step == 12
    assert_same(weights(whole), weights(broken))
    steps = {}
    for name in ("whole", "broken"):
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps[name] = [(line["event"], line["step"]) for line in map(json.loads, lines)]
    assert steps["broken"] == steps["whole"]


def test_an_averaged_run_resumes_to_the_bit(tiny_run, tmp_path):
    fields = {"ema": 0.8, "dropout": 0.1, "freeze": 1, "layer_decay": 0.7}
    whole = tiny_run(output=str(tmp_path / "whole"), **fields)
    broken = tiny_run(output=str(tmp_path / "broken"), **fields)
    outcome = train(whole)
    train(broken, on_event=interrupt_at(7))
    train(broken, resume=True)
    assert_same(weights(whole), weights(broken))
    lines = [(tmp_path / n / "metrics.jsonl").read_text().splitlines() for n in ("whole", "broken")]
    evaluations = [
        [line for line in map(json.loads, part) if line["event"] == "evaluation"] for part in lines
    ]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 3
    both = [max(line["val_top1"], line["ema_val_top1"]) for line in evaluations[0]]
    assert outcome.metrics["val_top1"] == max(both)


def test_the_average_is_polyaks_and_the_better_one_is_stored(tiny_run, tmp_path, monkeypatch):
    """Against an average that is kept by hand; of the run's data the average is always right."""
    seen, averages = [], []

    def evaluate(self, model):
        averages.append(model.norm.weight.detach().clone())
        accuracy = 1.0 if model is self.run.averaged.module else 0.5
        return SimpleNamespace(loss=0.0, metrics=lambda name: {f"{name}top1": accuracy})

    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    monkeypatch.setattr(loop, "set_training", lambda model, what: seen.append(model))
    run = tiny_run(ema=0.6, steps=3, eval_every=1, lr=0.1, warmup=0)
    outcome = train(run)
    models, emas = averages[0::2], averages[1::2]
    expected = models[0]  # torch's average starts with the first model
    assert torch.equal(emas[0], expected)
    for model, ema in zip(models[1:], emas[1:], strict=True):
        expected = 0.6 * expected + 0.4 * model
        assert torch.allclose(ema, expected, atol=1e-6)
    assert outcome.stored_averaged and outcome.stored_step == 1
    assert torch.equal(weights(run)["norm.weight"], emas[0])
    assert load(run.output).info.provenance["ema"] == 0.6


def test_patience_ends_a_run_as_if_it_were_finished(tiny_run, monkeypatch):
    run = tiny_run(steps=40, eval_every=2, patience=3, lr=1e-9, workers=1)
    outcome = train(run)
    assert outcome.stopped_by is None and outcome.step == 8 and outcome.stored_step == 2
    assert not (Path(run.output) / "state.safetensors").exists()
    assert outcome.metrics["val_top1"] == load(run.output).info.provenance["metrics"]["val_top1"]


def test_a_run_without_patience_that_is_killed_at_its_end_does_not_go_on(tiny_run, monkeypatch):
    run = tiny_run(steps=40, eval_every=2, patience=3, lr=1e-9)
    finish = report.finish

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "finish", die)
    with pytest.raises(KeyboardInterrupt):
        train(run)
    monkeypatch.setattr(report, "finish", finish)
    assert train(run, resume=True).step == 8


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_training_the_card_and_evaluate_agree_to_the_last_digit(tiny_run, loss, precision):
    config = tiny_run(loss=loss, precision=precision, workers=1)
    outcome = train(config)
    predictor = Predictor(config.output, "cpu", precision)
    found = evaluate(predictor, DataConfig(config.data.path)).evaluation
    assert found.metrics("val_") == outcome.metrics
    lines = [json.loads(line) for line in outcome.directory.metrics.read_text().splitlines()]
    (best,) = [
        line for line in lines if line.get("step") == outcome.stored_step and "val_top1" in line
    ]
    assert {name: best[name] for name in outcome.metrics} == outcome.metrics
    assert best["val_loss"] == found.loss


def test_patience_needs_a_validation_part(tiny_run, colours):
    data = DataConfig(str(colours), val_fraction=0.0)
    with pytest.raises(RunError, match="needs a validation split"):
        train(tiny_run(data=data, patience=2))


def test_without_a_validation_part_the_average_is_stored(tiny_run, colours):
    outcome = train(tiny_run(data=DataConfig(str(colours), val_fraction=0.0), ema=0.5))
    assert outcome.stored_averaged and outcome.stored_step == 12 and outcome.metrics == {}


def test_a_long_average_of_a_short_run_is_warned_of(tiny_run):
    events = []
    train(tiny_run(steps=1, ema=0.9999), on_event=events.append)
    (warning,) = [event.text for event in events if event.kind == "warning"]
    assert "an average over 10,000 steps stays near its start in a run of 1" in warning


def test_a_batch_that_does_not_fit_is_split(tiny_run, tmp_path, monkeypatch):
    """As CUDA says it: above five images there is no memory."""
    forward = ViT.forward

    def limited(self, images):
        if torch.is_grad_enabled() and len(images) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, images)

    monkeypatch.setattr(ViT, "forward", limited)
    events = []
    run = tiny_run(output=str(tmp_path / "split"), steps=3, accumulate=1)
    train(run, on_event=events.append)
    said = [event.text for event in events if event.kind == "warning"]
    assert said == [f"out of memory: continuing with {k} micro-batches" for k in (2, 4)]
    monkeypatch.undo()
    whole = tiny_run(output=str(tmp_path / "whole"), steps=3, accumulate=1)
    train(whole)
    for a, b in zip(weights(run).values(), weights(whole).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_image_that_does_not_fit_ends_the_run(tiny_run, monkeypatch):
    def full(self, images):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ViT, "forward", full)
    with pytest.raises(RunError, match="out of memory with one image"):
        train(tiny_run())


def test_the_first_step_is_told_at_once(tiny_run):
    run = tiny_run(steps=1000, batch_size=4, eval_every=1000)
    events = []

    def until(step):
        stop = interrupt_at(step)

        def on_event(event):
            events.append(event)
            stop(event)

        return on_event

    train(run, on_event=until(10))
    train(run, resume=True, on_event=until(20))
    told = [event.step for event in events if event.kind == "train"]
    assert told == [1, 10, 11, 20]
    lines = (Path(run.output) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 10, 20]


def test_a_run_in_a_folder_that_another_process_uses(tiny_run, monkeypatch):
    run = tiny_run()
    train(run, on_event=interrupt_at(3))
    for fields in ({"resume": True}, {"force": True}):
        with (
            RunDirectory(run.output).locked(),
            pytest.raises(RunError, match="another process is running in this directory"),
        ):
            train(run, **fields)
    assert (Path(run.output) / "state.safetensors").exists()


def test_classes_are_weighed_and_shown_evenly(tiny_run, tmp_path):
    """Both resume; neither is the plain run."""
    plain = tiny_run(output=str(tmp_path / "plain"))
    train(plain)
    for i, fields in enumerate(({"class_weights": {"red": 5.0}}, {"balanced_sampling": True})):
        whole = tiny_run(output=str(tmp_path / f"whole{i}"), **fields)
        broken = tiny_run(output=str(tmp_path / f"broken{i}"), **fields)
        train(whole)
        train(broken, on_event=interrupt_at(5))
        train(read_train_config(broken.output), resume=True)
        assert_same(weights(whole), weights(broken))
        assert not torch.equal(weights(plain)["norm.weight"], weights(whole)["norm.weight"])


class Killed(BaseException):
    """As a kill: nothing catches it, and nothing is saved."""


def kill_at(step: int):
    """An on_event that ends the run once a step is reported, as kill -9 would."""

    def on_event(event) -> None:
        if event.kind == "train" and event.step == step:
            raise Killed

    return on_event


def test_the_best_model_is_in_the_past_of_the_state(tiny_run):
    """Where the same steps come to other bits, another run's model would be stored otherwise."""
    run, events = tiny_run(save_every=100), []
    with pytest.raises(Killed):
        train(run, on_event=kill_at(6))
    train(run, resume=True, on_event=events.append)
    assert [e.from_step for e in events if e.kind == "plan"] == [4]


EVERYTHING = {"ema": 0.8, "layer_decay": 0.7, "dropout": 0.1, "drop_path": 0.1, "patience": 3}
STILL = AugmentConfig(crop_area=(1.0, 1.0), flip=False)


@pytest.mark.parametrize(
    "fields",
    [
        {**EVERYTHING, "freeze": 1, "class_weights": "balanced", "optimizer": "sgd"},
        {**EVERYTHING, "freeze": 1, "balanced_sampling": True, "keep_head": True},
        {"ema": 0.8, "freeze": "backbone", "class_weights": {"red": 3.0}, "augment": STILL},
    ],
    ids=["weights", "balanced", "features"],
)
@pytest.mark.parametrize("step", [3, 8])
def test_all_options_at_once_resume_to_the_bit(tiny_run, tmp_path_factory, colours, fields, step):
    """Killed with a state that is older than the metrics."""
    base = tmp_path_factory.getbasetemp()
    uneven, parent = base / "uneven", base / "uneven-parent"
    if not parent.exists():
        shutil.copytree(colours, uneven)
        for i in range(12):
            (uneven / "red" / f"{i:02}.png").unlink()
        train(tiny_run(data=DataConfig(str(uneven)), output=str(parent), steps=4))
    fields = {"task": "finetune", "model": str(parent), "resolution": None, **fields}
    fields |= {"data": DataConfig(str(uneven), val_fraction=0.2), "save_every": 2, "eval_every": 3}

    def make(name):
        return tiny_run(output=str(base / name), steps=14, lr=0.02, **fields)

    whole = make(f"whole-{fields['freeze']}-{fields.get('keep_head')}")
    if not Path(whole.output).exists():
        train(whole)
    broken = make(f"{Path(whole.output).name}-{step}")
    with pytest.raises(Killed):
        train(broken, on_event=kill_at(step))
    train(read_train_config(broken.output), resume=True)
    assert_same(weights(whole), weights(broken))
    first, second = (load(run.output).info.provenance for run in (whole, broken))
    for said in (first, second):
        said.pop("seconds")
    assert first == second
    kept = [
        [e for e in map(json.loads, (Path(run.output) / "metrics.jsonl").open()) if "val_top1" in e]
        for run in (whole, broken)
    ]
    assert kept[0] == kept[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--ema 0.9 --freeze 1 --layer-decay 0.7 --class-weights balanced --patience 9",
        "--ema 0.9 --freeze 1 --layer-decay 0.7 --balanced-sampling --keep-head",
    ],
)
def test_kill_9_and_resume_equal_an_unbroken_finetune(tiny_run, tmp_path, colours, options):
    """The bar of the issue, through the command line: finetune, kill -9, --resume."""
    parent = tiny_run(output=str(tmp_path / "parent"))
    train(parent)
    command = [sys.executable, "-m", "vitcli", "finetune", "--data", str(colours)]
    command += ["--model", str(tmp_path / "parent"), "--resolution", "24", "--steps", "40"]
    command += ["--batch-size", "12", "--precision", "fp32", "--device", "cpu", *options.split()]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    subprocess.run([*command, "-o", str(whole)], check=True, capture_output=True)
    process = subprocess.Popen([*command, "-o", str(broken)], stderr=subprocess.PIPE)
    metrics, state = broken / "metrics.jsonl", broken / "state.safetensors"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert state.exists(), process.stderr.read().decode()
    (tmp_path / "parent").rename(tmp_path / "gone")  # a run needs its parent no more
    resume = [sys.executable, "-m", "vitcli", "finetune", "--resume", str(broken)]
    subprocess.run(resume, check=True, capture_output=True)
    assert_same(load_file(whole / "model.safetensors"), load_file(broken / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_a_run_that_resumes(tiny_run, tmp_path, number):
    """As a terminal's Ctrl-C and a scheduler's SIGTERM are sent: to the workers too."""
    run = tiny_run(output=str(tmp_path / "run"), steps=100_000, workers=2)
    command = [sys.executable, "-m", "vitcli", "pretrain", "--data", run.data.path]
    command += ["--variant", "Ti/8", "--set", "depth=1", "--resolution", "16", "--batch-size", "8"]
    command += ["--steps", "100000", "--workers", "2", "--device", "cpu", "-o", run.output]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = Path(run.output) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert "continue with: vit pretrain --resume" in said and "Traceback" not in said
    assert f"{loop.STOPPING.text}\n" in said
    assert (Path(run.output) / "state.safetensors").exists()


def test_a_signal_is_answered_before_the_step_ends(tiny_run, monkeypatch):
    events, mixed, told = [], loop.mix, []

    def stop(*batch):
        signal.raise_signal(signal.SIGTERM)
        told.append(events[-1])
        return mixed(*batch)

    monkeypatch.setattr(loop, "mix", stop)
    outcome = train(tiny_run(), on_event=events.append)
    assert outcome.stopped_by == signal.SIGTERM and outcome.step == 1
    assert told == [loop.STOPPING] and events.count(told[0]) == 1


def test_a_signal_is_answered_after_the_event_that_is_being_told(tiny_run):
    told = []

    def on_event(event) -> None:
        told.append(("begun", event.kind))
        interrupt_at(2)(event)
        told.append(("ended", event.kind))

    assert train(tiny_run(), on_event=on_event).step == 2
    assert told[-4:] == [(w, e) for e in ("train", "note") for w in ("begun", "ended")]


def test_a_second_signal_of_another_kind_stops_at_once(tiny_run, monkeypatch):
    def stop(*batch):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(loop, "mix", stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tiny_run())
    finally:
        signal.signal(signal.SIGINT, before)


def test_accumulation_is_the_whole_batch(tiny_run, tmp_path):
    once = tiny_run(output=str(tmp_path / "once"), steps=3, accumulate=1)
    parts = tiny_run(output=str(tmp_path / "parts"), steps=3, accumulate=4)
    for run in (once, parts):
        train(run)
    for a, b in zip(weights(once).values(), weights(parts).values(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_every_augmentation_resumes_to_the_bit(tiny_run, tmp_path):
    augment = AugmentConfig(
        crop_area=(0.3, 1.0), randaugment=(2, 10), erasing=0.3, mixup=0.2, cutmix=1.0
    )
    whole = tiny_run(output=str(tmp_path / "whole"), augment=augment, label_smoothing=0.1)
    broken = dataclasses.replace(whole, output=str(tmp_path / "broken"))
    train(whole)
    train(broken, on_event=interrupt_at(7))
    train(broken, resume=True)
    assert_same(weights(whole), weights(broken))


def test_finetune_resizes_and_starts_with_a_head_of_zeros(tiny_run, tmp_path):
    train(tiny_run(output=str(tmp_path / "parent")))
    run = tiny_run(
        output=str(tmp_path / "child"), task="finetune", model=str(tmp_path / "parent"),
        resolution=(16, 24), optimizer="sgd", lr=1e-9, steps=1, eval_every=1,
    )  # fmt: skip
    train(run)
    model = load(tmp_path / "child")
    assert model.config.image_size == (16, 24) and model.config.grid == (2, 3)
    assert model.head.weight.abs().max() < 1e-6
    assert model.preprocess.crop_mode == "squash"
    parent = load(tmp_path / "parent")
    assert torch.allclose(model.blocks[0].mlp.fc1.weight, parent.blocks[0].mlp.fc1.weight)
    resized = {"method": "bilinear", "from": [2, 2], "to": [2, 3]}
    assert model.info.provenance["posemb_resize"] == resized
    (before,) = model.info.provenance["history"]
    assert before["steps"] in (4, 8, 12) and model.info.provenance["parent"] == "parent"


def test_patches_are_spread_for_larger_images(tiny_run, tmp_path, colours):
    run = tiny_run(
        steps=20, save_patch_size=32, save_dtype="float16", preprocess={"interpolation": "box"}
    )
    figures = train(run).metrics
    model = load(run.output)
    assert model.config.patch_size == (32, 32) and model.preprocess.size == (64, 64)
    assert figures["val_top1"] > 0.9  # of the stored file: the same function of a small image
    assert weights(run)["patch_embed.proj.weight"].dtype is torch.float16


def test_a_folder_with_a_run_is_not_touched(tiny_run):
    run = tiny_run()
    train(run)
    before = weights(run)
    with pytest.raises(RunError, match="holds a finished run"):
        train(run)
    with pytest.raises(RunError, match="nothing to resume"):
        train(run, resume=True)
    assert_same(before, weights(run))
    train(dataclasses.replace(run, seed=5), force=True)
    assert not torch.equal(before["norm.weight"], weights(run)["norm.weight"])


def test_an_unfinished_run_asks_what_to_do(tiny_run):
    run = tiny_run()
    train(run, on_event=interrupt_at(3))
    with pytest.raises(RunError, match="holds an unfinished run") as caught:
        train(run)
    assert "--resume" in caught.value.hint and "--force" in caught.value.hint


def test_a_damaged_state_is_one_line(tiny_run):
    run = tiny_run()
    train(run, on_event=interrupt_at(3))
    state = Path(run.output) / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(RunError, match="state cannot be resumed") as caught:
        train(run, resume=True)
    assert "\n" not in caught.value.what


def test_a_loss_that_is_not_finite_stops_the_run(tiny_run):
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step"):
        train(tiny_run(optimizer="adamw", lr=1e37, clip_norm=None, warmup=0))


def test_a_stop_keeps_no_state_that_is_lost(tiny_run, monkeypatch):
    """The loss has become NaN since it was last looked at, and Ctrl-C comes."""
    run, mixed = tiny_run(steps=1000, batch_size=4, save_every=10), loop.mix

    def spoil(x, y, augment, rng):
        calls.append(1)
        if len(calls) < 15:
            return mixed(x, y, augment, rng)
        os.kill(os.getpid(), signal.SIGTERM)
        return x * torch.nan, y

    calls = []
    monkeypatch.setattr(loop, "mix", spoil)
    assert train(run, on_event=lambda event: None).step == 15
    monkeypatch.undo()
    events = []
    train(run, resume=True, on_event=lambda e: (events.append(e), interrupt_at(11)(e)))
    told = {event.step: event.loss for event in events if event.kind == "train"}
    assert 0 < told[11] < 2


def test_the_rate_is_of_training_alone(tiny_run, monkeypatch):
    """A step takes a second here, an evaluation an hour; step 10 and 20 are told."""
    clock, mixed = [0.0], loop.mix

    def mix(*arguments):
        clock[0] += 1
        return mixed(*arguments)

    def evaluate(self, model):
        clock[0] += 3600
        return SimpleNamespace(loss=0.0, metrics=lambda name: {f"{name}top1": 0.5})

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "mix", mix)
    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    events, stop = [], interrupt_at(20)
    run = tiny_run(steps=1000, batch_size=4, eval_every=15)
    train(run, on_event=lambda event: (events.append(event), stop(event)))
    rates = {e.step: e.images_per_second for e in events if e.kind == "train"}
    assert rates == {1: 4, 10: 4, 20: 4}


def test_states_that_take_long_to_write_are_written_less_often(tiny_run, colours, monkeypatch):
    """A step takes 10 seconds here, a state 30."""
    clock, mixed, saved = [0.0], loop.mix, []

    def mix(*arguments):
        clock[0] += 10
        return mixed(*arguments)

    def save_state(run):
        clock[0] += 30
        saved.append(run.progress.step)

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(loop, "mix", mix)
    monkeypatch.setattr(loop, "save_state", save_state)
    train(tiny_run(data=DataConfig(str(colours), val_fraction=0), steps=150, batch_size=4))
    assert saved == [0, 7, 68, 129, 150]


def test_another_precision_is_told_when_a_run_is_resumed(tiny_run, monkeypatch):
    run, events = tiny_run(precision="auto"), []
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.float32)
    train(run, on_event=interrupt_at(1))
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.bfloat16)
    train(run, resume=True, on_event=events.append)
    (told,) = [event.text for event in events if event.kind == "warning"]
    assert told.startswith("resumed in bfloat16, but started in float32")


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tiny_run, monkeypatch):
    run = tiny_run()

    def full(*arguments):
        raise OutputError("cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_state", full)
        with pytest.raises(OutputError):
            train(run)
    assert not [file for file in Path(run.output).iterdir() if file.name != ".lock"]
    train(run)


def test_a_run_in_the_datas_folder(tiny_run, colours):
    before = sorted(colours.iterdir())
    with pytest.raises(RunError, match="directory of the data"):
        train(tiny_run(output=str(colours)))
    assert sorted(colours.iterdir()) == before


def test_names_that_are_no_text_are_written_down(tiny_run):
    folder = RunDirectory(tiny_run().output)
    folder.start()
    folder.write_json(folder.split, {"val": ["caf\udce9.jpg", "é"]})
    assert folder.read_split() == {"val": ["caf\udce9.jpg", "é"]}


def test_resolution_between_patches_fails_before_anything_is_written(tiny_run):
    run = tiny_run(resolution=(17, 17))
    with pytest.raises(ConfigError, match="height 17 is not a multiple of the patch size 8"):
        train(run)
    assert not Path(run.output).exists()


def test_files_that_are_not_a_runs_are_kept(tiny_run):
    run = tiny_run()
    Path(run.output).mkdir()
    (Path(run.output) / "README.md").write_text("mine")
    with pytest.raises(RunError, match="already holds README.md"):
        train(run)
    assert (Path(run.output) / "README.md").read_text() == "mine"


def test_an_output_that_is_a_file(tiny_run, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="cannot be used as a run's directory"):
        train(tiny_run(output=str(tmp_path / "file" / "run")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("loss", "expected"), [("softmax", math.log(3)), ("sigmoid", 3 * math.log(2))]
)
def test_the_validation_loss_is_the_runs_own(tiny_run, loss, expected):
    """A head of zeros has logits of zero."""
    events = []
    train(tiny_run(loss=loss, lr=1e-9, steps=1, eval_every=1), on_event=events.append)
    (found,) = [event.metrics["val_loss"] for event in events if event.kind == "evaluation"]
    assert found == pytest.approx(expected, rel=1e-3)


def test_one_step_trains(tiny_run):
    """The decay ends after the last step."""
    events = []
    train(tiny_run(steps=1, warmup=0, optimizer="sgd"), on_event=events.append)
    assert [event.lr for event in events if event.kind == "train"] == [3e-3]
