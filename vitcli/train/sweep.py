"""A sweep: a run at each of several peak learning rates, and what becomes of the best.

The paper's protocol (section B.1.1): choose the rate on held-out training images, then train with
it on all of them. A test split chooses nothing.

RUN/sweep.json        the configuration without gaps, and the metrics of the finished runs
RUN/sweep/lr-0.01/    a run per rate; its weights are deleted once its metrics are recorded
RUN/sweep/retrain/    the last run, on all images, until it is finished
RUN/sweep.png         accuracy against learning rate

At the end the files of the last run (of the best one with --no-retrain) move up into RUN. A sweep
continues from its files wherever it was stopped, and ends as it would have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from typing import Any, cast

from vitcli import plots
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.data.dataset import require_mergeable
from vitcli.devices import choose_device
from vitcli.distributed import Ranks, joined, restarts
from vitcli.errors import DivergedError, RunError
from vitcli.train import setup
from vitcli.train.directory import RunDirectory, config_to_json, continued
from vitcli.train.events import Choice, Event, Note, OnEvent, Plan, SweepPlan, Trial, TrialStart
from vitcli.train.inputs import Computed, has_fixed_features
from vitcli.train.loop import Outcome, train
from vitcli.train.plan import plan_of
from vitcli.train.run import Run
from vitcli.train_config import TrainConfig

Train = Callable[[TrainConfig], Outcome]
"""One run of the sweep, from wherever a former call was stopped."""


def choose(trials: list[Trial]) -> Trial:
    """The trial with the highest validation accuracy; among equals, the lowest loss.

    Raises:
        RunError: the loss diverged in all of them.
    """
    sound = [trial for trial in trials if trial.val_top1 is not None]
    if not sound:
        raise RunError(
            f"the loss diverged with every learning rate: {trials[0].failure} with "
            f"{trials[0].lr:g}",
            hint="try lower rates, a longer --warmup, or --precision fp32",
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
        resume: continue the sweep in the directory; `config` is then the one that it wrote.
        force, offline, allow_pickle: as `train`.
        on_event: called with the events of the sweep and of all its runs.

    Raises:
        RunError: nothing is held out to choose by, or the loss diverges at every rate.
        VitError: as `train`.
    """
    with joined(choose_device(config.device), config.rank_timeout) as ranks:
        directory, computed = RunDirectory(config.output), Computed()
        tell = _without_repeats(on_event if ranks.is_first else lambda event: None)

        def run(part: TrainConfig) -> Outcome:
            place = RunDirectory(part.output)
            finished, started = ranks.from_first((place.is_finished(), place.state() is not None))
            if finished:
                return Outcome(part, place, part.steps or 0)
            return train(
                continued(part) if started else part,
                resume=started,
                force=True,
                offline=offline,
                allow_pickle=allow_pickle,
                on_event=tell,
                computed=computed,
            )

        resume = resume or (restarts() > 0 and ranks.from_first(directory.sweep.exists()))
        with directory.locked() if ranks.is_first else contextlib.nullcontext():
            if resume:
                if ranks.is_first:
                    directory.check_resumable()
                config = continued(config)
                trials = ranks.from_first(_read_trials(directory) if ranks.is_first else [])
                tell(Note(f"{len(trials)} of {len(config.sweep)} learning rates are done"))
            else:
                if ranks.is_first:
                    directory.check_free(force, config.data.path)
                options = (tell, False, offline, allow_pickle)
                prepared = setup.prepare(config, directory, ranks, *options)
                config, trials = _plan(prepared, tell), []
                if ranks.is_first:
                    directory.start()
                    _write_record(directory, config, trials)
                ranks.wait()
            outcome = _try_rates(config, directory, ranks, trials, run, tell)
            return outcome or _finish(config, directory, ranks, choose(trials), run, tell)


def _plan(prepared: Run, tell: OnEvent) -> TrainConfig:
    """The configuration without gaps. Whatever can be wrong is found before a file is written."""
    config: TrainConfig = prepared.config
    if prepared.splits.val is None:
        raise RunError(
            "choosing a learning rate requires validation images",
            where=config.data.path,
            hint="leave out --val-fraction 0, or pass a single learning rate",
        )
    if config.retrain:
        require_mergeable(prepared.splits.train)
    runs = (1 if has_fixed_features(prepared) else len(config.sweep)) + config.retrain
    plan = vars(plan_of(prepared))
    plan |= {"lr": None, "estimated_seconds": (plan["estimated_seconds"] or 0) * runs or None}
    tell(SweepPlan(**plan, sweep=config.sweep, retrain=config.retrain))
    return dataclasses.replace(config, lr=None)


def _try_rates(
    config: TrainConfig,
    directory: RunDirectory,
    ranks: Ranks,
    trials: list[Trial],
    run: Train,
    tell: OnEvent,
) -> Outcome | None:
    """Adds the trials that are missing; gives the outcome of a run that a signal stopped."""
    note = f"the best on validation of the learning rates {_listed(config.sweep)}"
    done = {trial.lr for trial in trials}
    for number, lr in enumerate(config.sweep, start=1):
        if lr in done:
            continue
        place = directory.trial(f"lr-{lr!r}")
        tell(TrialStart(lr, number, len(config.sweep)))
        try:
            outcome = run(_part(config, place, lr=lr, note=note))
        except DivergedError as error:
            trials.append(Trial(lr, failure=error.what))
        else:
            if outcome.stopped_by is not None:
                return dataclasses.replace(outcome, directory=directory)
            found = _result(place, lr) if ranks.is_first else None
            trials.append(cast(Trial, ranks.from_first(found)))
        if ranks.is_first:
            _write_record(directory, config, trials)
            _drop_weights(config, directory, trials)
        tell(trials[-1])
    best = choose(trials)
    if ranks.is_first:
        _drop_weights(config, directory, trials)
        metrics = [(trial.lr, trial.val_top1) for trial in trials]
        plots.accuracy_by_rate(metrics, best.lr, directory.sweep_plot)
    tell(Choice(best.lr, config.retrain, tuple(trials)))
    return None


def _finish(
    config: TrainConfig,
    directory: RunDirectory,
    ranks: Ranks,
    best: Trial,
    run: Train,
    tell: OnEvent,
) -> Outcome:
    """Trains on all images if that is wanted, and moves the result up."""
    place = directory.trial(f"lr-{best.lr!r}")
    if config.retrain:
        place = directory.trial("retrain")
        note = (
            f"the learning rate {best.lr:g} was the best of {_listed(config.sweep)}, with "
            f"{best.val_top1:.1%} on validation; then all images were trained on, and the last "
            "step was kept"
        )
        data = dataclasses.replace(config.data, merge_val=True)
        last = _part(config, place, lr=best.lr, note=note, data=data, patience=None)
        outcome = run(last)
        if outcome.stopped_by is not None:
            return dataclasses.replace(outcome, directory=directory)
    provenance = ranks.from_first(_provenance(place) if ranks.is_first else {})
    if ranks.is_first:
        _move_up(place, directory)
    stored = (provenance["steps"], "ema" in provenance)
    return Outcome(config, directory, config.steps or 0, None, *stored, provenance["metrics"])


def _listed(rates: tuple[float, ...]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _part(config: TrainConfig, place: RunDirectory, **fields: Any) -> TrainConfig:
    """One run of the sweep; `strict` was seen to once for all."""
    return dataclasses.replace(config, output=str(place.path), sweep=(), strict=False, **fields)


def _result(place: RunDirectory, lr: float) -> Trial:
    """The metrics of a finished run, from its directory."""
    provenance = _provenance(place)
    step, accuracy = provenance["steps"], provenance["metrics"]["val_top1"]
    name = "ema_val_loss" if "ema" in provenance else "val_loss"
    losses = {line["step"]: line[name] for line in place.read_metrics() if name in line}
    return Trial(lr, accuracy, losses.get(step), step, provenance["seconds"])


def _provenance(place: RunDirectory) -> dict[str, Any]:
    header = tensor_file.read_header(place.model)
    info = CheckpointInfo.from_metadata(header.metadata, where=place.model)
    if info is None:
        raise RunError("no description of the run in this checkpoint", where=place.model)
    return info.provenance


def _read_trials(directory: RunDirectory) -> list[Trial]:
    try:
        record = json.loads(directory.sweep.read_text(encoding="utf-8"))
        return [Trial(**trial) for trial in record["trials"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "the record of the sweep is damaged",
            where=directory.sweep,
            hint="start the sweep again from the beginning with --force",
        ) from error


def _write_record(directory: RunDirectory, config: TrainConfig, trials: list[Trial]) -> None:
    """sweep.json: `--config RUN/sweep.json` sweeps again."""
    listed = [dataclasses.asdict(trial) for trial in trials]
    record = {"vit": {"train": config_to_json(config)}, "trials": listed}
    directory.write_json(directory.sweep, record)


def _drop_weights(config: TrainConfig, directory: RunDirectory, trials: list[Trial]) -> None:
    """Deletes the weights of all trials, or with --no-retrain of all but the best so far."""
    kept = None
    if not config.retrain and any(trial.val_top1 is not None for trial in trials):
        kept = choose(trials).lr
    for trial in trials:
        if trial.lr != kept:
            place = directory.trial(f"lr-{trial.lr!r}")
            place.drop_states()
            for file in (place.model, place.card):
                file.unlink(missing_ok=True)


def _move_up(place: RunDirectory, directory: RunDirectory) -> None:
    """Makes a finished run the result of the sweep. The model comes last, as the sign that all is
    done; interrupted before, this is done once more."""
    if place.config.exists():
        config = json.loads(place.config.read_text(encoding="utf-8"))
        config["vit"]["train"]["output"] = str(directory.path)
        place.write_json(place.config, config)
    (place.path / ".lock").unlink(missing_ok=True)  # of a run that was killed
    for file in sorted(place.path.iterdir(), key=lambda file: file == place.model):
        target = directory.path / file.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(file, target)
    place.path.rmdir()


def _without_repeats(on_event: OnEvent) -> OnEvent:
    """Passes each note on once, as all runs have the same data and model; without their plans."""
    seen = set[Event]()
    in_trial = False

    def tell(event: Event) -> None:
        nonlocal in_trial
        if isinstance(event, TrialStart | Trial):
            in_trial = isinstance(event, TrialStart)
        if isinstance(event, Note):
            if event in seen:
                return
            seen.add(event)
        if not (in_trial and isinstance(event, Plan)):
            on_event(event)

    return tell
