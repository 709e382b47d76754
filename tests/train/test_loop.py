"""Complete runs: convergence, bit-exact resume, signals, metrics and memory."""

import errno
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from conftest import wait_for
from train.runs import (
    COLORS,
    NO_AUGMENTATION,
    Killed,
    filter_events,
    interrupt_at,
    kill_at,
    read_metrics,
    read_weights,
    weights_close,
    weights_equal,
)
from vitcli.checkpoints.load import load
from vitcli.config import AugmentConfig, DataConfig
from vitcli.errors import DivergedError, OutputError, RunError
from vitcli.evaluation.evaluate import evaluate, open_labeled
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor
from vitcli.train import inputs, loop, report, setup, state
from vitcli.train.directory import RunDirectory, read_train_config
from vitcli.train.loop import train
from vitcli.train.objectives import Classification
from vitcli.train.stop import STOPPING


def test_run_converges_and_writes_directory(tiny_run, draw_figures):
    run = tiny_run(steps=40, eval_every=20, command="vit pretrain --data colors")
    events = []
    outcome = train(run, on_event=events.append)
    directory = Path(run.output)
    assert outcome.stopped_by is None and outcome.metrics["val_top1"] == 1.0
    assert {path.name for path in directory.iterdir()} == {
        "README.md", "config.json", "confusion.png", "curves.png", "metrics.jsonl",
        "model.safetensors", "reliability.png", "split.json",
    }  # fmt: skip
    (plan,) = filter_events(events, "plan")
    assert plan.tokens == 5 and plan.steps == 40 and plan.estimated_seconds > 0
    assert plan.class_names == ("blue", "green", "red")
    # training on an image costs three forward passes
    assert plan.exaflops == pytest.approx(3 * plan.flops * 40 * plan.batch_size / 1e18)
    losses = [event.loss for event in filter_events(events, "train")]
    assert losses[-1] < 0.4 < losses[0]
    model = load(directory)
    assert [label.name for label in model.classes] == ["blue", "green", "red"]
    assert "vit pretrain --data colors" in (directory / "README.md").read_text()
    assert model.info.provenance["metrics"]["val_top1"] == 1.0


def test_weights_depend_on_seed_but_not_workers(tiny_run, finished):
    run = tiny_run(workers=2)
    train(run)
    assert weights_equal(finished, run.output)
    train(tiny_run(seed=1, steps=1), force=True)
    assert not weights_equal(finished, run.output)


AUGMENT = AugmentConfig(
    crop_area=(0.3, 1.0), randaugment=(2, 10), erasing=0.3, mixup=0.2, cutmix=1.0
)
NOISY = {"dropout": 0.1, "drop_path": 0.1, "patience": 4}
BALANCED = {"balanced_sampling": True, "class_weights": {"red": 3.0}}
TUNED = {"task": "finetune", "resolution": None, "lr": 0.02, "ema": 0.8, "freeze": 1}


@pytest.fixture(scope="module")
def imbalanced(colors, tmp_path_factory) -> Path:
    """The `colors` dataset with fewer red images than others."""
    root = shutil.copytree(colors, tmp_path_factory.mktemp("imbalanced") / "colors")
    for i in range(12):
        (root / "red" / f"{i:02}.png").unlink()
    return root


@pytest.mark.parametrize(
    "fields",
    [
        {**NOISY, "augment": AUGMENT, "label_smoothing": 0.1, "loss": "sigmoid"},
        {**TUNED, **NOISY, **BALANCED, "layer_decay": 0.7, "keep_head": True, "optimizer": "sgd"},
        {**TUNED, "freeze": "backbone", "class_weights": {"red": 3.0}, "augment": NO_AUGMENTATION},
        {**TUNED, **NOISY, "freeze": None, "lora": 4, "teacher": "", "teacher_weight": 0.7},
        {"dropout": 0.1, "ema": 0.8, "objective": "mae", "probe_every": 7, "optimizer": "muon"},
        {"dropout": 0.1, "ema": 0.8, "objective": "masked-patch"},
    ],
    ids=["scratch", "weights", "features", "lora", "mae", "masked-patch"],
)
def test_interrupted_run_matches_uninterrupted(make_run, tmp_path, imbalanced, finished, fields):
    """Killed twice, with a state older than the metrics, then stopped by SIGTERM. The uninterrupted
    run saves a state only with each best model."""
    fields |= {"data": DataConfig(str(imbalanced), val_fraction=0.2), "steps": 14, "eval_every": 3}
    parent = shutil.copytree(finished, tmp_path / "parent")
    if fields.get("task") == "finetune":
        fields["model"] = str(parent)
    if "teacher" in fields:
        fields["teacher"] = str(finished)
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    outcome = train(make_run(output=str(full), **fields))
    with pytest.raises(Killed):
        train(make_run(output=str(resumed), save_every=3, **fields), on_event=kill_at(4))
    shutil.rmtree(parent)  # no longer needed
    run = read_train_config(resumed)
    with pytest.raises(Killed):
        train(run, resume=True, on_event=kill_at(8))
    stopped = train(run, resume=True, on_event=interrupt_at(10))
    assert (stopped.stopped_by, stopped.step) == (signal.SIGTERM, 10)
    assert RunDirectory(resumed).state()
    assert train(run, resume=True).step == outcome.step
    assert weights_equal(full, resumed)
    evaluations = read_metrics(full, "evaluation")
    assert evaluations == read_metrics(resumed, "evaluation")
    steps = [[line["step"] for line in read_metrics(name, "train")] for name in (full, resumed)]
    assert steps[0] == steps[1]
    first, second = (load(name).info.provenance for name in (full, resumed))
    assert first | {"seconds": 0} == second | {"seconds": 0}
    for name, best in (("top1", max), ("loss", min)):
        if f"val_{name}" in outcome.metrics:
            values = [v for line in evaluations for k, v in line.items() if name in k]
            assert outcome.metrics[f"val_{name}"] == best(values)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_resumes_after_signal_to_process_group(tiny_run, number):
    """Ctrl-C in a terminal and SIGTERM from a scheduler reach the workers too."""
    run = tiny_run()
    command = [sys.executable, "-m", "vitcli", "pretrain", "--data", run.data.path]
    command += ["--variant", "Ti/8", "--set", "depth=1", "--resolution", "16", "--batch-size", "8"]
    command += ["--steps", "100000", "--workers", "2", "--device", "cpu", "-o", run.output]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for((Path(run.output) / "metrics.jsonl").exists, process)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 128 + number, stderr
    assert "continue with: vit pretrain --resume" in stderr and "Traceback" not in stderr
    assert f"{STOPPING.text}\n" in stderr
    assert RunDirectory(run.output).state()


def before_each_step(monkeypatch, act) -> None:
    """Call act(step, x) when a batch is prepared; if not None, its result replaces the images."""
    prepare = Classification.prepare

    def patched(self, x, labels, step, *place):
        result = act(step, x) if step else None  # step 0: the batches timed for the plan
        return prepare(self, x if result is None else result, labels, step, *place)

    monkeypatch.setattr(Classification, "prepare", patched)


def test_second_signal_stops_immediately(tiny_run, monkeypatch):
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


def test_better_of_model_and_average_is_stored(tiny_run, monkeypatch):
    """Compare with a moving average computed by hand; `evaluate` always prefers the average."""
    seen: list[torch.Tensor] = []

    def evaluate(self, objective):
        seen.append(objective.model.norm.weight.detach().clone())
        return {"top1": 1.0 if objective is self.run.averaged.module else 0.5, "loss": 0.0}

    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    run = tiny_run(ema=0.6, steps=3, eval_every=1, lr=0.1, warmup=0)
    outcome = train(run)
    models, averages = seen[0::2], seen[1::2]
    expected = models[0]  # torch's average starts at the first model
    for model, average in zip(models, averages, strict=True):
        expected = 0.6 * expected + 0.4 * model
        assert torch.allclose(average, expected, atol=1e-6)
    assert outcome.stored_averaged and outcome.stored_step == 1
    assert torch.equal(read_weights(run.output)["norm.weight"], averages[0])
    assert load(run.output).info.provenance["ema"] == 0.6


def test_early_stopping_finishes_run(tiny_run, monkeypatch):
    run = tiny_run(steps=40, eval_every=2, patience=3)
    monkeypatch.setattr(inputs.Images, "evaluate", lambda *_: {"top1": 0.5, "loss": 1.0})

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(report, "finish", die)
        train(run)
    outcome = train(run, resume=True)  # does not train further
    assert outcome.stopped_by is None and outcome.step == 8 and outcome.stored_step == 2
    assert not (Path(run.output) / "state").exists()
    assert outcome.metrics["val_top1"] == load(run.output).info.provenance["metrics"]["val_top1"]


@pytest.mark.parametrize(("store", "step"), [("best", 3), ("last", 5)])
def test_best_or_last_weights_are_stored(tiny_run, monkeypatch, store, step):
    """If tied, the best have the lowest loss."""
    evaluations = iter([(0.5, 0.1), (0.9, 0.5), (0.9, 0.3), (0.9, 0.4), (0.7, 0.2)])
    monkeypatch.setattr(
        inputs.Images,
        "evaluate",
        lambda self, objective: dict(zip(("top1", "loss"), next(evaluations), strict=True)),
    )
    config = tiny_run(store=store, steps=5, eval_every=1)
    assert train(config).stored_step == step
    assert load(config.output).info.provenance.get("store", "best") == store


@pytest.mark.parametrize(("loss", "precision"), [("softmax", "bf16"), ("sigmoid", "fp32")])
def test_training_metrics_match_evaluate_exactly(tiny_run, loss, precision):
    config = tiny_run(loss=loss, precision=precision, steps=6, eval_every=3)
    outcome = train(config)
    predictor = Predictor(config.output, "cpu", precision)
    images = open_labeled(predictor, DataConfig(config.data.path))
    found = evaluate(predictor, images).evaluation
    assert found.metrics("val_") == outcome.metrics
    evaluations = {line["step"]: line for line in read_metrics(config.output, "evaluation")}
    best = evaluations[outcome.stored_step]
    assert {name: best[name] for name in outcome.metrics} == outcome.metrics
    assert best["val_loss"] == found.loss


def test_unreadable_test_split_does_not_fail_run(tiny_run, make_splits):
    damaged = [f"test/{name}/00.png" for name in COLORS]
    data = make_splits({"train": range(20), "test": [0]}, damaged)
    events = []
    outcome = train(tiny_run(data=DataConfig(str(data)), steps=2), on_event=events.append)
    assert outcome.metrics.keys() >= {"val_top1"} and "test_top1" not in outcome.metrics
    assert any("test split" in event.text for event in filter_events(events, "warning"))


def test_gradient_accumulation_and_out_of_memory(make_run, tmp_path, monkeypatch):
    """Simulate CUDA running out of memory above five images."""
    forward, limit = ViT.forward, 5
    # AdamW and clipping hide the scale of gradients, and AdamW magnifies rounding errors.
    plain = {"optimizer": "sgd", "lr": 0.1, "clip_norm": None}
    run = functools.partial(make_run, steps=3, eval_every=3, **plain)
    whole, parts, split = (str(tmp_path / name) for name in ("whole", "parts", "split"))

    def limited(self, images):
        if torch.is_grad_enabled() and len(images) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, images)

    train(run(output=whole, accumulate=1))
    for count in (4, 5):  # equal and unequal sizes
        train(run(output=parts, accumulate=count), force=True)
        assert weights_close(whole, parts)
    monkeypatch.setattr(ViT, "forward", limited)
    events = []
    train(run(output=split, accumulate=1, ema=0.9999), on_event=events.append)
    # Of 2 and 4 micro-batches, and a long average.
    assert len(filter_events(events, "warning")) == 3
    assert weights_close(whole, split)
    limit = 0
    with pytest.raises(RunError, match="out of memory"):
        train(run(output=whole), force=True)


def test_state_is_saved_with_each_best_model(tiny_run):
    """Otherwise, without bitwise reproducibility, a resumed run could store another model."""
    run, events = tiny_run(steps=7, save_every=100), []
    with pytest.raises(Killed):
        train(run, on_event=kill_at(6))
    train(run, resume=True, on_event=events.append)
    assert [event.from_step for event in filter_events(events, "plan")] == [4]


@pytest.mark.parametrize(
    ("loss", "expected"), [("softmax", math.log(3)), ("sigmoid", 3 * math.log(2))]
)
def test_finetuning_resizes_and_starts_with_zero_head(tiny_run, finished, loss, expected):
    run = tiny_run(
        task="finetune", model=str(finished), resolution=(16, 24), optimizer="sgd", lr=1e-9,
        steps=1, loss=loss,
    )  # fmt: skip
    train(run)
    (validation,) = read_metrics(run.output, "evaluation")
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


def test_saved_patch_size_can_be_larger(tiny_run):
    saved = {"save_patch_size": 32, "save_dtype": "float16"}
    run = tiny_run(steps=20, eval_every=20, preprocess={"interpolation": "box"}, **saved)
    found = train(run).metrics
    model = load(run.output)
    assert model.config.patch_size == (32, 32) and model.preprocess.size == (64, 64)
    assert found["val_top1"] > 0.9  # of the stored file: the same function at the lower resolution
    assert read_weights(run.output)["patch_embed.proj.weight"].dtype is torch.float16


def test_non_finite_loss_stops_run(tiny_run, monkeypatch):
    diverging = {"optimizer": "adamw", "lr": 1e37, "clip_norm": None, "warmup": 0}
    for interval, name, step in ((1, "loss", "[23]"), (12, "val_loss", "4")):
        with pytest.raises(DivergedError, match=f"the {name} is nan at step {step}") as caught:
            train(tiny_run(**diverging, log_every=interval), force=True)
        assert "with bf16 or fp16, try --precision fp32" in caught.value.hint


def test_stop_does_not_save_diverged_state(tiny_run, monkeypatch):
    """A signal arrives after the loss has become NaN, but before it is read."""
    run = tiny_run(steps=1000, batch_size=4, save_every=10, eval_every=1000)

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
    (first,) = [event for event in filter_events(events, "train") if event.step == 11]
    assert 0 < first.loss < 2


def test_throughput_excludes_evaluation_but_eta_includes_it(tiny_run, monkeypatch):
    """On a fake clock, a step takes a second and an evaluation an hour."""
    now, events = [0.0], []

    def evaluate(self, objective):
        now[0] += 3600
        return {"top1": 0.5, "loss": 0.0}

    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    before_each_step(monkeypatch, lambda step, x: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(inputs.Images, "evaluate", evaluate)
    run, stop = tiny_run(steps=1000, batch_size=4, eval_every=15), interrupt_at(20)
    train(run, on_event=lambda event: (events.append(event), stop(event)))
    steps = filter_events(events, "train")
    assert {event.step: event.images_per_second for event in steps} == {1: 4, 10: 4, 20: 4}
    assert steps[-1].eta == pytest.approx(980 * (3600 + 19) / 19)


def test_resume_warns_of_changed_precision(tiny_run, monkeypatch):
    run, events = tiny_run(precision="auto", steps=2), []
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.float32)
    train(run, on_event=interrupt_at(1))
    monkeypatch.setattr(setup, "choose_precision", lambda name, device: torch.bfloat16)
    train(run, resume=True, on_event=events.append)
    (warning,) = filter_events(events, "warning")
    assert "bfloat16" in warning.text and "float32" in warning.text


@pytest.mark.parametrize("resume", [False, True])
def test_run_without_a_state_can_be_started_again(tiny_run, monkeypatch, resume):
    run = tiny_run(steps=1)

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OutputError, match="No space left"):
        patch.setattr(filesystem, "_write_item", full)
        train(run)
    train(run, resume=resume)
    assert RunDirectory(run.output).is_finished()


def test_deleted_directory_ends_run(tiny_run):
    run = tiny_run(save_every=2, log_every=100)

    def delete(event):
        if event.kind == "train" and event.step == 1:
            shutil.rmtree(run.output)

    with pytest.raises(OutputError, match="the directory was deleted during the run"):
        train(run, on_event=delete)


@pytest.mark.parametrize(
    ("in_load", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (SystemExit(143), SystemExit),
        (ValueError("bad shape"), RunError),
    ],
    ids=["ctrl-c", "sigterm", "damage"],
)
def test_signal_while_loading_is_no_damage(tiny_run, monkeypatch, in_load, raised):
    run = tiny_run(steps=2)
    train(run, on_event=interrupt_at(1))

    def fail(*arguments, **among):
        raise in_load

    monkeypatch.setattr(state.HuggingFaceStorageReader, "read_data", fail)
    with pytest.raises(raised) as caught:
        train(run, resume=True)
    if raised is RunError:
        assert "state cannot be resumed (ValueError: bad shape)" in caught.value.what
