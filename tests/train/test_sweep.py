"""Sweeps: choice of the learning rate, retraining on all images, and exact resume."""

import dataclasses
import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from train.runs import Killed, filter_events, kill_at, weights_equal
from vitcli.checkpoints.load import load
from vitcli.config import DataConfig
from vitcli.errors import DataError, RunError
from vitcli.train import sweep
from vitcli.train.directory import read_train_config
from vitcli.train.loop import Outcome, train
from vitcli.train.sweep import Trial, _Sweep, best_trial, run_sweep

RATES = (1.0, 3e-3, 1e-3)
"""The first is too high to learn anything."""
SWEEP = {"lr": None, "sweep": RATES, "steps": 8, "eval_every": 4}
SWEEP |= {"ema": 0.5, "layer_decay": 0.9, "class_weights": "balanced"}


@pytest.fixture
def tiny_sweep(tiny_run):
    """Factory of the TrainConfig of a sweep."""
    return functools.partial(tiny_run, **SWEEP)


class Swept(NamedTuple):
    """An uninterrupted sweep."""

    directory: Path
    outcome: Outcome
    events: list[Any]


@pytest.fixture(scope="module")
def full(make_run, tmp_path_factory):
    """Factory of an uninterrupted sweep, run once per value of `retrain`."""

    @functools.cache
    def make(retrain: bool) -> Swept:
        directory, events = tmp_path_factory.mktemp("whole") / "run", []
        config = make_run(output=str(directory), retrain=retrain, **SWEEP)
        return Swept(directory, run_sweep(config, on_event=events.append), events)

    return make


def current_trial(events: list) -> float | None:
    """The learning rate of the current trial; None outside of trials."""
    marks = [event for event in events if event.kind in ("trial", "trial_result")]
    return marks[-1].lr if marks and marks[-1].kind == "trial" else None


def relative_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def read_trials(folder: Path) -> list[dict]:
    """The trials in sweep.json, without their run time."""
    listed = json.loads((folder / "sweep.json").read_text())["trials"]
    return [{k: v for k, v in trial.items() if k != "seconds"} for trial in listed]


def assert_same(first: Path, second: Path) -> None:
    """Check that two sweeps have the same weights, metrics and files."""
    assert weights_equal(first, second)
    assert read_trials(first) == read_trials(second)
    assert relative_files(first) == relative_files(second)


RUN_FILES = {
    "README.md", "config.json", "curves.png", "metrics.jsonl", "model.safetensors", "split.json",
}  # fmt: skip
FIGURES = {"confusion.png", "reliability.png"}
TRIAL_FILES = {*FIGURES, "config.json", "curves.png", "metrics.jsonl", "split.json"}


def test_best_rate_is_retrained_on_all_images(full, tiny_run, colors):
    folder, outcome, events = full(True)
    (choice,) = filter_events(events, "choice")
    by_rate = {trial.lr: trial for trial in choice.trials}
    assert list(by_rate) == list(RATES) and choice.lr == 3e-3
    assert by_rate[3e-3].val_top1 > by_rate[1.0].val_top1
    assert relative_files(folder) == {
        *RUN_FILES, "sweep.json", "sweep.png",
        *(f"sweep/lr-{r}/{name}" for r in ("1.0", "0.003", "0.001") for name in TRIAL_FILES),
    }  # fmt: skip
    # The model equals that of a run at the best rate on all images, at its last step. The average
    # is stored if it is in the best run.
    ema = 0.5 if by_rate[3e-3].stored_average else None
    everything = tiny_run(
        **SWEEP | {"sweep": (), "lr": 3e-3, "ema": ema},
        data=DataConfig(str(colors), val_fraction=0.0),
    )
    train(everything)
    assert weights_equal(folder, everything.output)
    assert outcome.metrics == {} and outcome.directory.path == folder and outcome.step == 8
    provenance = load(folder).info.provenance
    assert provenance["train_images"] == 60 and provenance["steps"] == 8
    assert outcome.stored_averaged == (ema is not None) and provenance.get("ema") == ema
    card = (folder / "README.md").read_text()
    assert "0.003 was the best of 1, 0.003 and 0.001" in card and "# run\n" in card
    again = read_train_config(folder)
    assert again.lr == 3e-3 and again.sweep == () and again.output == str(folder)
    assert read_train_config(folder / "sweep.json").sweep == RATES
    # One plan for the sweep and one for the final run.
    plans = filter_events(events, "plan")
    assert [plan.val_images for plan in plans] == [12, 0]
    assert plans[0].sweep == RATES and plans[1].train_images == 60
    assert plans[0].exaflops == pytest.approx(plans[1].exaflops * (len(RATES) + 1))


def test_best_run_is_kept_without_retraining(full, tiny_run):
    folder, outcome, _ = full(False)
    single_run = tiny_run(**SWEEP | {"sweep": (), "lr": 3e-3})
    metrics = train(single_run).metrics
    assert weights_equal(folder, single_run.output) and outcome.step == 8
    assert load(folder).info.provenance["metrics"] == metrics
    assert relative_files(folder) == {
        *RUN_FILES, *FIGURES, "sweep.json", "sweep.png",
        *(f"sweep/lr-{rate}/{name}" for rate in ("1.0", "0.001") for name in TRIAL_FILES),
    }  # fmt: skip
    assert json.loads((folder / "split.json").read_text())["kind"] == "held out"


@pytest.mark.parametrize("retrain", [True, False])
def test_interrupted_sweep_matches_uninterrupted(tiny_sweep, full, tmp_path, monkeypatch, retrain):
    """Stopped during runs, and killed between them and while the result is moved up."""
    broken, replace = tmp_path / "broken", os.replace
    config, events = tiny_sweep(output=str(broken), retrain=retrain), []

    def run(resume: bool = True, stop: tuple[float | None, int] | None = None) -> Outcome:
        """`stop`: the rate (None: the final run) and step at which to send SIGTERM."""

        def on_event(event) -> None:
            events.append(event)
            if event.kind == "train" and (current_trial(events), event.step) == stop:
                os.kill(os.getpid(), signal.SIGTERM)

        written = read_train_config(broken) if resume else config
        return run_sweep(
            dataclasses.replace(written, output=str(broken)), resume=resume, on_event=on_event
        )

    def killed_in(owner: object, name: str, when: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def kill(*arguments: Any) -> None:
            if when(*arguments):
                raise Killed
            original(*arguments)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owner, name, kill)
            run()

    outcome = run(resume=False, stop=(1.0, 3))
    assert outcome.stopped_by == signal.SIGTERM and outcome.directory.path == broken
    assert outcome.directory.stopped.exists()
    with pytest.raises(RunError, match="contains an unfinished run"):
        run_sweep(config)
    broken = broken.rename(tmp_path / "moved")  # run directories may be moved
    killed_in(_Sweep, "write", lambda sweep: len(sweep.trials) == 2)  # finished, not recorded
    assert not (broken / "state" / "stopped").exists()
    killed_in(_Sweep, "drop_weights", lambda sweep: len(sweep.trials) == 2)
    started = [event.lr for event in filter_events(events, "trial")]
    assert started == [1.0, 1.0, 3e-3, 3e-3]
    assert run(stop=(1e-3, 5)).stopped_by == signal.SIGTERM
    if retrain:
        assert run(stop=(None, 5)).stopped_by == signal.SIGTERM
    killed_in(sweep, "_move_up", lambda *_: True)
    killed_in(
        os, "replace", lambda a, b: Path(b).parent == broken and Path(b).name == "metrics.jsonl"
    )
    assert os.replace is replace and not (broken / "model.safetensors").exists()
    assert run().stopped_by is None
    assert_same(full(retrain).directory, broken)
    with pytest.raises(RunError, match="nothing to resume"):
        run_sweep(dataclasses.replace(config, output=str(broken)), resume=True)


def test_resumed_sweep_keeps_split_if_dataset_grows(tiny_sweep, colors, tmp_path):
    data = shutil.copytree(colors, tmp_path / "data")
    few = {"sweep": RATES[1:], "steps": 2, "probe_every": 2}
    config = tiny_sweep(data=DataConfig(str(data), val_fraction=0.2), **few)
    with pytest.raises(Killed):
        run_sweep(config, on_event=kill_at(None, "trial_result"))
    for i in range(5):  # sorted first: a new split would differ
        shutil.copy(data / "red" / f"{i:02}.png", data / "red" / f"+{i}.png")
    run_sweep(config, resume=True)  # the final run has no split to probe on
    folders = Path(config.output, "sweep").glob("lr-*")
    splits = [json.loads((folder / "split.json").read_text())["val"] for folder in folders]
    assert len(splits) == 2 and splits[0] == splits[1]


def test_diverging_rate_is_reported_and_not_chosen(tiny_sweep):
    rates = {"sweep": (1e37, 3e-3), "retrain": False}
    config, events = tiny_sweep(**rates, clip_norm=None, warmup=0), []
    run_sweep(config, on_event=events.append)
    first, second = filter_events(events, "trial_result")
    assert first.val_top1 is None and "the loss is" in first.failure
    assert second.val_top1 > 0.5 and second.failure is None
    assert read_train_config(config.output).lr == 3e-3


def test_best_trial_converged_and_has_lowest_loss_of_tied():
    diverged = Trial(0.3, None)
    trials = [Trial(0.1, 0.5, 2.0), Trial(0.2, 0.5, 1.0), diverged, Trial(0.4, 0.4, 0.1)]
    assert best_trial(trials).lr == 0.2
    with pytest.raises(RunError, match="the loss diverged with every learning rate"):
        best_trial([diverged])


def test_invalid_sweep_leaves_no_files(tiny_sweep, colors):
    everything = DataConfig(str(colors), val_fraction=0.0)  # no validation images
    for data, error in ((DataConfig("nowhere"), DataError), (everything, RunError)):
        config = tiny_sweep(data=data)
        with pytest.raises(error):
            run_sweep(config)
        assert not Path(config.output).exists()


def test_sweep_does_not_choose_or_train_on_test_split(tiny_sweep, make_splits):
    root = make_splits({"train": range(12), "val": range(12, 16), "test": range(16, 20)})
    config = tiny_sweep(data=DataConfig(str(root), val_fraction=0.0), sweep=RATES[1:], steps=2)
    metrics = run_sweep(config).metrics
    assert "test_top1" in metrics and not any(name.startswith("val") for name in metrics)
    assert load(config.output).info.provenance["train_images"] == 48
    unlucky = np.array([trial["val_top1"] for trial in read_trials(Path(config.output))])
    assert (unlucky * 12 % 1 == pytest.approx(0)) and len(unlucky) == 2


def test_force_removes_only_previous_sweep(full, tiny_run, tmp_path):
    shutil.copytree(full(False).directory, tmp_path / "run")
    (tmp_path / "run" / "mine.txt").write_text("mine")
    train(tiny_run(steps=1), force=True)
    assert relative_files(tmp_path / "run") == {*RUN_FILES, *FIGURES, "mine.txt"}
    (tmp_path / "run" / "sweep").mkdir()  # not of a sweep
    (tmp_path / "run" / "sweep" / "mine.txt").write_text("mine")
    train(tiny_run(steps=1), force=True)
    assert (tmp_path / "run" / "sweep" / "mine.txt").read_text() == "mine"
