"""A sweep: a run at each of several peak learning rates, and what becomes of the best.

The paper's protocol (section B.1.1): choose the rate on a held-out part of the training images,
then train with it on all of them. A test part chooses nothing.

RUN/sweep.json        the configuration without gaps, and the figures of the runs that are done
RUN/sweep/lr-0.01/    a run for each rate; its weights go once its figures are written down
RUN/sweep/retrain/    the run on everything, until it is finished
RUN/sweep.png         accuracy against learning rate

At the end the files of the last run (of the best one, where nothing is trained again) move up into
RUN. What is there says what is done, so a sweep goes on wherever it was stopped, and ends as it
would have ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from typing import Any

from vitcli import plots
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.errors import DivergedError, RunError
from vitcli.train import setup
from vitcli.train.directory import RunDirectory, config_to_json, read_train_config
from vitcli.train.inputs import Computed, has_fixed_features
from vitcli.train.loop import Event, OnEvent, Outcome, train
from vitcli.train_config import TrainConfig


@dataclass(frozen=True)
class Trial:
    """A run of the sweep that is done."""

    lr: float
    """Its peak learning rate."""
    val_top1: float | None = None
    """Of its stored model, in [0, 1]; None where the loss diverged."""
    val_loss: float | None = None
    best_step: int | None = None
    """The step of the stored model."""
    seconds: int | None = None
    failure: str | None = None
    """What is known of a loss that diverged."""


def choose(trials: list[Trial]) -> Trial:
    """The trial of the highest validation accuracy; among equals, of the lowest loss.

    Raises:
        RunError: the loss diverged in all of them.
    """
    sound = [trial for trial in trials if trial.val_top1 is not None]
    if not sound:
        raise RunError(
            f"no learning rate will do: {trials[0].failure} with {trials[0].lr:g}",
            hint="try lower ones, a longer --warmup, or --precision fp32",
        )
    return max(sound, key=lambda trial: (trial.val_top1, -(trial.val_loss or 0.0)))


def run_sweep(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    on_event: OnEvent = lambda event: None,
) -> Outcome:
    """Trains at each rate of `config.sweep`, and leaves the chosen model in `config.output`.

    Args:
        config: the run; what it leaves open is planned once and holds for all of its runs.
        resume: go on with the sweep in the folder; `config` is then the one that it wrote.
        force: replace what the folder holds.
        offline, allow_pickle: as `train`.
        on_event: told what `train` tells, with the rate as "trial"; and {"event": "trial" |
            "trial_result" | "choice"}.

    Raises:
        RunError: nothing is held out to choose by, or the loss diverges at every rate.
        VitError: as `train`.
    """
    folder, tell = RunDirectory(config.output), _without_repeats(on_event)
    with folder.lock:
        if resume:
            folder.check_resumable()
            trials = _read_trials(folder)
            text = f"{len(trials)} of {len(config.sweep)} learning rates are done"
            tell({"event": "note", "text": text})
        else:
            folder.check_free(force, config.data.path)
            config, trials = _plan(config, folder, offline, allow_pickle, tell), []
            folder.start()
            _write_record(folder, config, trials)
        return _go_on(config, folder, trials, offline, allow_pickle, tell)


def _plan(
    config: TrainConfig, folder: RunDirectory, offline: bool, allow_pickle: bool, tell: OnEvent
) -> TrainConfig:
    """The configuration without gaps. All that can be wrong is found before a file is written."""
    prepared = setup.prepare(config, folder, False, offline, tell, allow_pickle)
    if prepared.val is None:
        raise RunError(
            "nothing is held out that could choose a learning rate",
            where=config.data.path,
            hint="leave --val-fraction 0 out, or give one learning rate",
        )
    plan = prepared.plan_event(0)
    rates = 1 if has_fixed_features(prepared) else len(config.sweep)
    plan["estimated_seconds"] *= rates + config.retrain
    tell(plan | {"lr": None, "sweep": list(config.sweep), "retrain": config.retrain})
    return dataclasses.replace(prepared.config, lr=None)


def _go_on(
    config: TrainConfig,
    folder: RunDirectory,
    trials: list[Trial],
    offline: bool,
    allow_pickle: bool,
    tell: OnEvent,
) -> Outcome:
    """What is still to do of a sweep."""
    computed: Computed = {}
    rates = ", ".join(f"{rate:g}" for rate in config.sweep)
    note = f"the best on validation of the learning rates {rates}"
    done = {trial.lr for trial in trials}
    for number, lr in enumerate(config.sweep, start=1):
        if lr in done:
            continue
        place = folder.trial(f"lr-{lr!r}")
        trial_config = _part(config, place, lr=lr, note=note)
        tell({"event": "trial", "lr": lr, "number": number, "of": len(config.sweep)})
        try:
            outcome = _train(trial_config, offline, allow_pickle, _of_trial(lr, tell), computed)
        except DivergedError as error:
            trials.append(Trial(lr, failure=error.what))
        else:
            if outcome.stopped_by is not None:
                return dataclasses.replace(outcome, folder=folder)
            trials.append(_result(place, lr))
        _write_record(folder, config, trials)
        _drop_weights(config, folder, trials)
        tell({"event": "trial_result", **dataclasses.asdict(trials[-1])})
    _drop_weights(config, folder, trials)
    best = choose(trials)
    figures = [(trial.lr, trial.val_top1) for trial in trials]
    plots.accuracy_by_rate(figures, best.lr, folder.sweep_image)
    listed = [dataclasses.asdict(trial) for trial in trials]
    tell({"event": "choice", "lr": best.lr, "retrain": config.retrain, "trials": listed})
    place = folder.trial(f"lr-{best.lr!r}")
    if config.retrain:
        place = folder.trial("retrain")
        note = (
            f"the learning rate {best.lr:g} was the best of {rates}, with {best.val_top1:.1%} on "
        )
        note += "validation; then all images were trained on, and the last step was kept"
        fields = {"data": dataclasses.replace(config.data, merge_val=True), "patience": None}
        computed.clear()  # of other parts
        last = _part(config, place, lr=best.lr, note=note, **fields)
        outcome = _train(last, offline, allow_pickle, tell, computed)
        if outcome.stopped_by is not None:
            return dataclasses.replace(outcome, folder=folder)
    provenance = _provenance(place)
    _move_up(place, folder)
    stored = (provenance["steps"], "ema" in provenance)
    return Outcome(config, folder, config.steps or 0, None, *stored, provenance["metrics"])


def _part(config: TrainConfig, place: RunDirectory, **fields: Any) -> TrainConfig:
    """One run of the sweep."""
    return dataclasses.replace(config, output=str(place.path), sweep=(), **fields)


def _train(
    config: TrainConfig, offline: bool, allow_pickle: bool, tell: OnEvent, computed: Computed
) -> Outcome:
    """Trains, from wherever a former call was stopped."""
    folder = RunDirectory(config.output)
    if folder.is_finished():
        return Outcome(config, folder, config.steps or 0)
    if not folder.state.exists():
        return train(
            config,
            force=True,
            offline=offline,
            allow_pickle=allow_pickle,
            on_event=tell,
            computed=computed,
        )
    written = read_train_config(folder.path)
    config = dataclasses.replace(
        written, output=config.output, device=config.device, workers=config.workers
    )
    return train(config, resume=True, offline=offline, on_event=tell, computed=computed)


def _result(place: RunDirectory, lr: float) -> Trial:
    """The figures of a finished run, from its folder."""
    said = _provenance(place)
    step, accuracy = said["steps"], said["metrics"]["val_top1"]
    name = "ema_val_loss" if "ema" in said else "val_loss"
    losses = {line["step"]: line[name] for line in place.read_metrics() if name in line}
    return Trial(lr, accuracy, losses.get(step), step, said["seconds"])


def _provenance(place: RunDirectory) -> dict[str, Any]:
    header = tensor_file.read_header(place.model)
    info = CheckpointInfo.from_metadata(header.metadata, where=place.model)
    if info is None:
        raise RunError("does not say which run it is of", where=place.model)
    return info.provenance


def _read_trials(folder: RunDirectory) -> list[Trial]:
    try:
        record = json.loads(folder.sweep.read_text(encoding="utf-8"))
        return [Trial(**trial) for trial in record["trials"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "the record of the sweep is damaged",
            where=folder.sweep,
            hint="start the sweep anew with --force",
        ) from error


def _write_record(folder: RunDirectory, config: TrainConfig, trials: list[Trial]) -> None:
    """sweep.json: `--config RUN/sweep.json` sweeps again."""
    listed = [dataclasses.asdict(trial) for trial in trials]
    record = {"vit": {"train": config_to_json(config)}, "trials": listed}
    folder.write_json(folder.sweep, record)


def _drop_weights(config: TrainConfig, folder: RunDirectory, trials: list[Trial]) -> None:
    """Of all trials; where none is trained again, of all but the best so far."""
    kept = None
    if not config.retrain and any(trial.val_top1 is not None for trial in trials):
        kept = choose(trials).lr
    for trial in trials:
        if trial.lr != kept:
            place = folder.trial(f"lr-{trial.lr!r}")
            for file in (place.model, place.card, place.state):
                file.unlink(missing_ok=True)


def _move_up(place: RunDirectory, folder: RunDirectory) -> None:
    """Makes a finished run the result of the sweep. The model comes last: it says that all is
    done; stopped before, this is done once more."""
    if place.config.exists():
        config = json.loads(place.config.read_text(encoding="utf-8"))
        config["vit"]["train"]["output"] = str(folder.path)
        place.write_json(place.config, config)
    place.lock.path.unlink(missing_ok=True)  # of a run that was killed
    for file in sorted(place.path.iterdir(), key=lambda file: file == place.model):
        target = folder.path / file.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(file, target)
    place.path.rmdir()


def _of_trial(lr: float, tell: OnEvent) -> OnEvent:
    """Events of a trial, with its rate; its plan is the sweep's."""

    def on_event(event: Event) -> None:
        if event["event"] != "plan":
            tell(event | {"trial": lr})

    return on_event


def _without_repeats(on_event: OnEvent) -> OnEvent:
    """Every run of a sweep has the same to say of the data and the model: said once."""
    said: set[str] = set()

    def tell(event: Event) -> None:
        text = event.get("text")
        if text is None or text not in said:
            said.add(text or "")
            on_event(event)

    return tell
