"""Whole runs: they learn, they resume bit-exactly, they fit into memory."""

import errno
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.state_dict_saver import async_save

from conftest import wait_for
from train.runs import (
    STILL,
    Killed,
    close_weights,
    interrupt_at,
    kill_at,
    metrics,
    of_kind,
    same_weights,
    weights,
)
from vitcli import plots
from vitcli.checkpoints.load import load
from vitcli.config import AugmentConfig, DataConfig
from vitcli.errors import DivergedError, OutputError, RunError
from vitcli.evaluate import evaluate, open_labelled
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor
from vitcli.train import inputs, loop, report, setup, state
from vitcli.train.directory import RunDirectory, read_train_config
from vitcli.train.loop import train
from vitcli.train.objectives import Classification
from vitcli.train.state import Saver
from vitcli.train.stop import STOPPING


def test_the_time_left_includes_evaluations(tiny_run, monkeypatch):
    validate, events = loop._validate, []

    def slowly(*args):
        time.sleep(0.1)
        validate(*args)

    monkeypatch.setattr(loop, "_validate", slowly)
    train(tiny_run(steps=6, eval_every=1, log_every=1), on_event=events.append)
    assert [event.eta for event in of_kind(events, "train")][2] >= 3 * 0.1
    assert of_kind(events, "train")[-1].eta == 0


def test_a_run_learns_and_writes_its_directory(tiny_run, drawn):
    run = tiny_run(steps=40, command="vit pretrain --data colours")
    events = []
    outcome = train(run, on_event=events.append)
    directory = Path(run.output)
    assert outcome.stopped_by is None and outcome.metrics["val_top1"] == 1.0
    assert {path.name for path in directory.iterdir()} == {
        "README.md", "config.json", "confusion.png", "curves.png", "metrics.jsonl",
        "model.safetensors", "reliability.png", "split.json",
    }  # fmt: skip
    (plan,) = of_kind(events, "plan")
    assert plan.tokens == 5 and plan.steps == 40 and plan.estimated_seconds > 0
    # a run costs three forward passes for each image that it trains on
    assert plan.exaflops == pytest.approx(3 * plan.flops * 40 * plan.batch_size / 1e18)
    losses = [event.loss for event in of_kind(events, "train")]
    assert losses[-1] < 0.4 < losses[0]
    model = load(directory)
    assert [label.name for label in model.classes] == ["blue", "green", "red"]
    assert "vit pretrain --data colours" in (directory / "README.md").read_text()
    assert model.info.provenance["metrics"]["val_top1"] == 1.0


def test_classes_of_one_name_are_told_apart_in_the_figures(tiny_run, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(plots, "confusion_matrix", lambda _, names, path: drawn.extend(names))
    (tmp_path / "classes.txt").write_text("blue\tcrane\ngreen\tcrane\nred\n")
    data = replace(tiny_run().data, classes=str(tmp_path / "classes.txt"))
    train(tiny_run(steps=1, data=data))
    assert "crane" not in drawn and len({*drawn}) == len(drawn)


def test_the_same_seed_gives_the_same_weights_whatever_the_workers(tiny_run, finished):
    run = tiny_run(workers=2)
    train(run)
    assert same_weights(finished, run.output)
    train(tiny_run(seed=1), force=True)
    assert not same_weights(finished, run.output)


AUGMENT = AugmentConfig(
    crop_area=(0.3, 1.0), randaugment=(2, 10), erasing=0.3, mixup=0.2, cutmix=1.0
)
NOISY = {"dropout": 0.1, "drop_path": 0.1, "patience": 4}
TUNED = {"task": "finetune", "resolution": None, "lr": 0.02, "ema": 0.8, "freeze": 1}


@pytest.fixture(scope="module")
def uneven(colours, tmp_path_factory) -> Path:
    """The colours, with fewer red images than others."""
    root = shutil.copytree(colours, tmp_path_factory.mktemp("uneven") / "colours")
    for i in range(12):
        (root / "red" / f"{i:02}.png").unlink()
    return root


@pytest.mark.parametrize(
    "fields",
    [
        {**NOISY, "augment": AUGMENT, "label_smoothing": 0.1, "loss": "sigmoid"},
        {**TUNED, **NOISY, "layer_decay": 0.7, "class_weights": "balanced", "optimizer": "sgd"},
        {**TUNED, **NOISY, "layer_decay": 0.7, "balanced_sampling": True, "keep_head": True},
        {**TUNED, "freeze": "backbone", "class_weights": {"red": 3.0}, "augment": STILL},
        {**TUNED, **NOISY, "freeze": None, "lora": 4},
        {**NOISY, "augment": AUGMENT, "ema": 0.8, "teacher": "", "teacher_weight": 0.7},
        {"dropout": 0.1, "ema": 0.8, "objective": "mae", "probe_every": 7, "optimizer": "muon"},
        {"dropout": 0.1, "ema": 0.8, "objective": "masked-patch"},
    ],
    ids=["scratch", "weights", "balanced", "features", "lora", "teacher", "mae", "masked-patch"],
)
def test_a_run_that_is_broken_off_again_and_again_ends_as_an_unbroken_one(
    make_run, tmp_path, uneven, finished, fields
):
    """Killed twice, with a state that is older than the metrics, and stopped by SIGTERM."""
    fields |= {"data": DataConfig(str(uneven), val_fraction=0.2), "steps": 14, "eval_every": 3}
    parent = shutil.copytree(finished, tmp_path / "parent")
    if fields.get("task") == "finetune":
        fields["model"] = str(parent)
    if "teacher" in fields:
        fields["teacher"] = str(finished)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    outcome = train(make_run(output=str(whole), save_every=2, **fields))
    with pytest.raises(Killed):
        train(make_run(output=str(broken), save_every=2, **fields), on_event=kill_at(3))
    shutil.rmtree(parent)  # a run needs it no more
    run = read_train_config(broken)
    with pytest.raises(Killed):
        train(run, resume=True, on_event=kill_at(8))
    stopped = train(run, resume=True, on_event=interrupt_at(9))
    assert (stopped.stopped_by, stopped.step) == (signal.SIGTERM, 9)
    assert RunDirectory(broken).state()
    assert train(run, resume=True).step == outcome.step
    assert same_weights(whole, broken)
    evaluations = metrics(whole, "evaluation")
    assert evaluations == metrics(broken, "evaluation")
    steps = [[line["step"] for line in metrics(name, "train")] for name in (whole, broken)]
    assert steps[0] == steps[1]
    first, second = (load(name).info.provenance for name in (whole, broken))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    for name, best in (("top1", max), ("loss", min)):
        if f"val_{name}" in outcome.metrics:
            values = [v for line in evaluations for k, v in line.items() if name in k]
            assert outcome.metrics[f"val_{name}"] == best(values)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_leaves_a_run_that_resumes(tiny_run, number):
    """As a terminal's Ctrl-C and a scheduler's SIGTERM are sent: to the workers too."""
    run = tiny_run()
    command = [sys.executable, "-m", "vitcli", "pretrain", "--data", run.data.path]
    command += ["--variant", "Ti/8", "--set", "depth=1", "--resolution", "16", "--batch-size", "8"]
    command += ["--steps", "100000", "--workers", "2", "--device", "cpu", "-o", run.output]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((Path(run.output) / "metrics.jsonl").exists, process)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 128 + number, said
    assert "continue with: vit pretrain --resume" in said and "Traceback" not in said
    assert f"{STOPPING.text}\n" in said
    assert RunDirectory(run.output).state()


def before_each_step(monkeypatch, act) -> None:
    """Calls act(step, x) when a batch is prepared; what it gives takes the place of the images."""
    prepare = Classification.prepare

    def acted(self, x, labels, step, *place):
        acts = act(step, x) if step else None  # the plan prepares a batch of step 0
        return prepare(self, x if acts is None else acts, labels, step, *place)

    monkeypatch.setattr(Classification, "prepare", acted)


def test_a_signal_is_answered_before_the_step_ends(tiny_run, monkeypatch):
    events, told = [], []

    def stop(step, x):
        signal.raise_signal(signal.SIGTERM)
        told.append(events[-1])

    before_each_step(monkeypatch, stop)
    outcome = train(tiny_run(), on_event=events.append)
    assert outcome.stopped_by == signal.SIGTERM and outcome.step == 1
    assert told == [STOPPING] and events.count(STOPPING) == 1


def test_a_signal_is_answered_after_the_event_that_is_being_shown(tiny_run):
    shown = []

    def on_event(event) -> None:
        shown.append(("begun", event.kind))
        interrupt_at(2)(event)
        shown.append(("ended", event.kind))

    assert train(tiny_run(), on_event=on_event).step == 2
    assert shown[-4:] == [(w, e) for e in ("train", "note") for w in ("begun", "ended")]


def test_a_second_signal_of_another_kind_stops_at_once(tiny_run, monkeypatch):
    def stop(step, x):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("went on")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    before_each_step(monkeypatch, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tiny_run())
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_average_is_polyaks_and_the_better_one_is_stored(tiny_run, monkeypatch):
    """Against an average that is kept by hand; the average is made the better one here."""
    seen: list[torch.Tensor] = []

    def evaluate(self, objective):
        seen.append(objective.model.norm.weight.detach().clone())
        return {"top1": 1.0 if objective is self.run.averaged.module else 0.5, "loss": 0.0}

    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    run = tiny_run(ema=0.6, steps=3, eval_every=1, lr=0.1, warmup=0)
    outcome = train(run)
    models, averages = seen[0::2], seen[1::2]
    expected = models[0]  # torch's average starts with the first model
    for model, average in zip(models, averages, strict=True):
        expected = 0.6 * expected + 0.4 * model
        assert torch.allclose(average, expected, atol=1e-6)
    assert outcome.stored_averaged and outcome.stored_step == 1
    assert torch.equal(weights(run.output)["norm.weight"], averages[0])
    assert load(run.output).info.provenance["ema"] == 0.6


def test_patience_ends_a_run_as_if_it_were_finished(tiny_run, monkeypatch):
    run = tiny_run(steps=40, eval_every=2, patience=3, lr=1e-9)

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report, "finish", die)
        train(run)
    outcome = train(run, resume=True)  # it does not go on
    assert outcome.stopped_by is None and outcome.step == 8 and outcome.stored_step == 2
    assert not (Path(run.output) / "state").exists()
    assert outcome.metrics["val_top1"] == load(run.output).info.provenance["metrics"]["val_top1"]


def test_the_last_weights_are_stored_where_these_are_asked_for(tiny_run, monkeypatch):
    accuracies = iter([0.5, 0.9, 0.7])
    monkeypatch.setattr(
        inputs.Images, "evaluate", lambda self, objective: {"top1": next(accuracies), "loss": 0.0}
    )
    config = tiny_run(store="last", steps=3, eval_every=1)
    outcome = train(config)
    assert outcome.stored_step == 3
    assert load(config.output).info.provenance["store"] == "last"


@pytest.mark.parametrize(("loss", "precision"), [("softmax", "bf16"), ("sigmoid", "fp32")])
def test_training_the_card_and_evaluate_agree_to_the_last_digit(tiny_run, loss, precision):
    config = tiny_run(loss=loss, precision=precision)
    outcome = train(config)
    predictor = Predictor(config.output, "cpu", precision)
    images = open_labelled(predictor, DataConfig(config.data.path))
    found = evaluate(predictor, images).evaluation
    assert found.metrics("val_") == outcome.metrics
    evaluations = {line["step"]: line for line in metrics(config.output, "evaluation")}
    best = evaluations[outcome.stored_step]
    assert {name: best[name] for name in outcome.metrics} == outcome.metrics
    assert best["val_loss"] == found.loss


def test_a_run_is_finished_though_no_image_of_its_test_split_can_be_read(
    tiny_run, colours, tmp_path
):
    data = tmp_path / "data"
    shutil.copytree(colours, data / "train")
    for name in (path.name for path in colours.iterdir()):
        (data / "test" / name).mkdir(parents=True)
        (data / "test" / name / "x.png").write_bytes(b"damaged")
    events = []
    outcome = train(tiny_run(data=DataConfig(str(data))), on_event=events.append)
    assert outcome.metrics.keys() >= {"val_top1"} and "test_top1" not in outcome.metrics
    assert any("test split" in event.text for event in of_kind(events, "warning"))


def test_without_a_validation_split_the_average_is_stored(tiny_run, colours):
    data = DataConfig(str(colours), val_fraction=0.0)
    outcome = train(tiny_run(data=data, ema=0.5))
    assert outcome.stored_averaged and outcome.stored_step == 12 and outcome.metrics == {}


def test_micro_batches_are_the_whole_batch_and_made_where_memory_runs_out(
    make_run, tmp_path, monkeypatch
):
    """As CUDA reports it: above five images there is no memory."""
    forward, limit = ViT.forward, 5
    run = functools.partial(make_run, steps=3, eval_every=3)
    whole, parts, split = (str(tmp_path / name) for name in ("whole", "parts", "split"))

    def limited(self, images):
        if torch.is_grad_enabled() and len(images) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, images)

    train(run(output=whole, accumulate=1))
    for count in (4, 3):  # of equal and of unequal size
        train(run(output=parts, accumulate=count), force=True)
        assert close_weights(whole, parts)
    monkeypatch.setattr(ViT, "forward", limited)
    events = []
    train(run(output=split, accumulate=1, ema=0.9999), on_event=events.append)
    assert len(of_kind(events, "warning")) == 3  # of 2 and 4 micro-batches, and of a long average
    assert close_weights(whole, split)
    limit = 0
    with pytest.raises(RunError, match="out of memory"):
        train(run(output=whole), force=True)


def test_the_first_step_is_shown_at_once(tiny_run):
    run = tiny_run(steps=1000, batch_size=4, eval_every=1000)
    events = []
    for step, resume in ((10, False), (20, True)):
        stop = interrupt_at(step)
        train(run, resume=resume, on_event=lambda e, stop=stop: (events.append(e), stop(e)))
    assert [event.step for event in of_kind(events, "train")] == [1, 10, 11, 20]
    assert [line["step"] for line in metrics(run.output, "train")] == [1, 10, 20]


def test_the_best_model_is_in_the_past_of_the_state(tiny_run):
    """On a device where the same steps come to other bits, another model would be stored."""
    run, events = tiny_run(save_every=100), []
    with pytest.raises(Killed):
        train(run, on_event=kill_at(6))
    train(run, resume=True, on_event=events.append)
    assert [event.from_step for event in of_kind(events, "plan")] == [4]


@pytest.mark.parametrize(
    ("loss", "expected"), [("softmax", math.log(3)), ("sigmoid", 3 * math.log(2))]
)
def test_finetune_resizes_and_starts_with_a_head_of_zeros(tiny_run, finished, loss, expected):
    run = tiny_run(
        task="finetune", model=str(finished), resolution=(16, 24), optimizer="sgd", lr=1e-9,
        steps=1, loss=loss,
    )  # fmt: skip
    train(run)
    (validation,) = metrics(run.output, "evaluation")
    assert validation["val_loss"] == pytest.approx(expected, rel=1e-3)  # all logits are zero
    model = load(run.output)
    assert model.config.image_size == (16, 24) and model.config.grid == (2, 3)
    assert model.head.weight.abs().max() < 1e-6
    assert model.preprocess.crop_mode == "squash"
    parent = load(finished)
    assert torch.allclose(model.blocks[0].mlp.fc1.weight, parent.blocks[0].mlp.fc1.weight)
    resized = {"method": "bilinear", "from": [2, 2], "to": [2, 3]}
    assert model.info.provenance["posemb_resize"] == resized
    (before,) = model.info.provenance["history"]
    assert before["steps"] in (4, 8, 12) and model.info.provenance["parent"] == "run"


def test_patches_are_enlarged_for_larger_images(tiny_run):
    run = tiny_run(
        steps=20, save_patch_size=32, save_dtype="float16", preprocess={"interpolation": "box"}
    )
    found = train(run).metrics
    model = load(run.output)
    assert model.config.patch_size == (32, 32) and model.preprocess.size == (64, 64)
    assert found["val_top1"] > 0.9  # of the stored file: the same function of a small image
    assert weights(run.output)["patch_embed.proj.weight"].dtype is torch.float16


def test_a_loss_that_is_not_finite_stops_the_run(tiny_run, monkeypatch):
    diverging = {"optimizer": "adamw", "lr": 1e37, "clip_norm": None, "warmup": 0}
    for interval, words in (
        (1, "the loss is nan at step 2"),
        (12, "the val_loss is nan at step 4"),
    ):
        with pytest.raises(DivergedError, match=words):
            train(tiny_run(**diverging, log_every=interval), force=True)


def test_ranks_that_diverge_wait_for_the_state_that_is_being_written(tiny_run):
    """The next run of a sweep would use the same group of ranks."""
    ranks, writing = SimpleNamespace(count=2, is_first=False), Future[None]()
    run: Any = SimpleNamespace(ranks=ranks, directory=RunDirectory(tiny_run().output))
    saver = Saver(run)
    for error, waits in ((RuntimeError, False), (DivergedError, True)):
        saver._writing, end = writing, threading.Timer(0.1, writing.set_result, [None])
        if waits:
            end.start()
        with pytest.raises(error), saver:
            raise error("")
        assert writing.done() == waits


def test_a_stop_keeps_no_diverged_state(tiny_run, monkeypatch):
    """The loss has become NaN since it was last read, and Ctrl-C comes."""
    run = tiny_run(steps=1000, batch_size=4, save_every=10)

    def spoil(step, x):
        if step == 15:
            os.kill(os.getpid(), signal.SIGTERM)
            return x * torch.nan
        return x

    with monkeypatch.context() as patch:
        before_each_step(patch, spoil)
        assert train(run).step == 15
    events = []
    train(run, resume=True, on_event=lambda e: (events.append(e), interrupt_at(11)(e)))
    (first,) = [event for event in of_kind(events, "train") if event.step == 11]
    assert 0 < first.loss < 2


def test_the_rate_is_of_training_only(tiny_run, monkeypatch):
    """By a clock on which a step takes a second, and an evaluation an hour."""
    now, events = [0.0], []

    def evaluate(self, objective):
        now[0] += 3600
        return {"top1": 0.5, "loss": 0.0}

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before_each_step(monkeypatch, lambda step, x: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    run, stop = tiny_run(steps=1000, batch_size=4, eval_every=15), interrupt_at(20)
    train(run, on_event=lambda event: (events.append(event), stop(event)))
    rates = {event.step: event.images_per_second for event in of_kind(events, "train")}
    assert rates == {1: 4, 10: 4, 20: 4}


def test_states_that_take_long_to_write_are_written_less_often(tiny_run, colours, monkeypatch):
    """By a clock on which a step takes half a minute, and a state another half."""
    now, saved = [0.0], []

    def slow(tensors, storage_writer, **among):
        now[0] += 30
        saved.append(storage_writer.path.stem)
        return async_save(tensors, storage_writer=storage_writer, **among)

    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(state, "async_save", slow)
    before_each_step(monkeypatch, lambda step, x: now.__setitem__(0, now[0] + 30))
    train(tiny_run(data=DataConfig(str(colours), val_fraction=0), steps=50, batch_size=4))
    assert saved == [f"step-{step}" for step in (0, 3, 24, 45, 50)]


def test_another_precision_is_warned_of_on_resume(tiny_run, monkeypatch):
    run, events = tiny_run(precision="auto"), []
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.float32)
    train(run, on_event=interrupt_at(1))
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.bfloat16)
    train(run, resume=True, on_event=events.append)
    (warning,) = of_kind(events, "warning")
    assert "bfloat16" in warning.text and "float32" in warning.text


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tiny_run, monkeypatch):
    run = tiny_run(steps=1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left"):
        patch.setattr(filesystem, "_write_item", full)
        train(run)
    assert not list(Path(run.output).iterdir())
    train(run)
