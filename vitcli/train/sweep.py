"""A learning-rate sweep: a run at each of several peak learning rates, then a final run.

The paper's protocol (section B.1.1): choose the rate on held-out training images, then train with
it on all of them. The test split is never used for the choice.

RUN/sweep.json        the complete configuration, and the metrics of the finished runs
RUN/split.json        the images that all runs hold out, if the dataset does not define them
RUN/sweep/lr-0.01/    a run per rate; its weights are deleted once its metrics are recorded
RUN/sweep/retrain/    the final run, on all images, until it is finished
RUN/sweep.png         accuracy against learning rate

At the end the files of the final run (of the best one with --no-retrain) move up into RUN. A sweep
resumes from its files wherever it was interrupted, with the same result.
"""

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from typing import Any, Unpack, cast

from vitcli.checkpoints.read import Fetching, read_info
from vitcli.data.dataset import require_mergeable
from vitcli.distributed import Ranks
from vitcli.errors import DivergedError, RunError
from vitcli.figures import plots
from vitcli.train import setup
from vitcli.train.config import TrainConfig
from vitcli.train.directory import RunDirectory
from vitcli.train.events import (
    Choice,
    Event,
    Note,
    OnEvent,
    Plan,
    SweepPlan,
    Trial,
    TrialStart,
)
from vitcli.train.inputs import CachedFeatures, has_fixed_features
from vitcli.train.loop import Outcome, open_run, train
from vitcli.train.plan import build_plan
from vitcli.train.run import Run
from vitcli.words import join_numbers


def best_trial(trials: list[Trial]) -> Trial:
    """Return the trial with the highest validation accuracy; if tied, the lowest loss.

    Raises:
        RunError: the loss diverged in all trials.
    """
    converged = [trial for trial in trials if trial.val_top1 is not None]
    if not converged:
        raise RunError(
            f"the loss diverged with every learning rate: {trials[0].failure} with "
            f"{trials[0].lr:g}",
            hint="try lower rates or a longer --warmup; with bf16 or fp16, try --precision fp32",
        )
    return max(converged, key=lambda trial: (trial.val_top1, -(trial.val_loss or 0.0)))


def run_sweep(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: OnEvent = lambda event: None,
    **fetching: Unpack[Fetching],
) -> Outcome:
    """Train at each rate of `config.sweep`, and leave the final model in `config.output`.

    Args:
        config: options that it leaves unset are planned once, for all runs of the sweep.
        resume: continue the sweep in the directory; `config` is then the one that it wrote.
        force, fetching: as `train`.
        on_event: called with the events of the sweep and of all its runs.

    Raises:
        RunError: there are no validation images, or the loss diverges at every rate.
        VitError: as `train`.
    """
    on_event = _without_repeats(on_event)
    with open_run(config, resume, force, on_event) as (config, resume, directory, ranks, emit):
        if resume:
            trials = ranks.broadcast(_read_trials(directory) if ranks.is_first else [])
            emit(Note(f"{len(trials)} of {len(config.sweep)} learning rates are done"))
        else:
            prepared = setup.prepare(config, directory, ranks, emit, **fetching)
            config, split = _plan_sweep(prepared, emit)
            del prepared  # its model must be freed before the trials
            trials = []
            if ranks.is_first:
                directory.start()
                ranks.begin(directory.path)
                directory.write_json(directory.split, split)
        sweep = _Sweep(config, directory, ranks, trials, emit, fetching)
        if not resume:
            sweep.write()
            ranks.barrier()
        outcome = sweep.try_rates() or sweep.finish()
        if outcome.stopped_by is not None and ranks.is_first:
            directory.stopped.touch()
        return dataclasses.replace(outcome, directory=directory)


def _plan_sweep(prepared: Run, emit: OnEvent) -> tuple[TrainConfig, dict[str, Any]]:
    """Return the complete configuration and the record of the split. Errors are found here, before
    any file is written."""
    config: TrainConfig = prepared.config
    if prepared.splits.val is None:
        raise RunError(
            "choosing a learning rate requires validation images",
            where=config.data.path,
            hint="hold out images with --val-fraction, or pass a single learning rate",
        )
    if config.retrain:
        require_mergeable(prepared.splits.train)
    runs = (1 if has_fixed_features(prepared) else len(config.sweep)) + config.retrain
    plan = vars(build_plan(prepared))
    plan |= {"lr": None, "estimated_seconds": (plan["estimated_seconds"] or 0) * runs or None}
    plan["exaflops"] *= runs
    emit(SweepPlan(**plan, sweep=config.sweep, retrain=config.retrain))
    return dataclasses.replace(config, lr=None), prepared.splits.record


@dataclass
class _Sweep:
    """A sweep in progress. All ranks call its methods; rank 0 writes."""

    config: TrainConfig
    directory: RunDirectory
    ranks: Ranks
    trials: list[Trial]
    emit: OnEvent
    fetching: Fetching
    feature_cache: CachedFeatures = field(default_factory=dict)

    def train(self, run: RunDirectory, lr: float, **fields: Any) -> Outcome:
        """Start or resume a run. `strict` is off, as the images were checked once for all runs."""
        config = dataclasses.replace(
            self.config, output=str(run.path), lr=lr, sweep=(), strict=False, **fields
        )
        finished, started = self.ranks.broadcast((run.is_finished(), run.state() is not None))
        if finished:
            return Outcome(config, run, config.steps or 0)
        return train(
            config,
            resume=started,
            force=True,
            on_event=self.emit,
            feature_cache=self.feature_cache,
            **self.fetching,
        )

    def trial_directory(self, lr: float) -> RunDirectory:
        """The directory of the run at a rate."""
        return RunDirectory(self.directory.path / "sweep" / f"lr-{lr!r}")

    def try_rates(self) -> Outcome | None:
        """Run the missing trials. Return the outcome of a run that a signal interrupted, if any."""
        rates, done = self.config.sweep, {trial.lr for trial in self.trials}
        note = f"the best of the learning rates {join_numbers(rates)} on the validation split"
        for number, lr in enumerate(rates, start=1):
            if lr in done:
                continue
            self.emit(TrialStart(lr, number, len(rates)))
            try:
                outcome = self.train(self.trial_directory(lr), lr, note=note)
            except DivergedError as error:
                self.trials.append(Trial(lr, failure=error.what))
            else:
                if outcome.stopped_by is not None:
                    return outcome
                trial = _read_trial(self.trial_directory(lr), lr) if self.ranks.is_first else None
                self.trials.append(cast(Trial, self.ranks.broadcast(trial)))
            self.write()
            self.drop_weights()
            self.emit(self.trials[-1])
        best = best_trial(self.trials)
        self.drop_weights()
        if self.ranks.is_first:
            metrics = [(trial.lr, trial.val_top1) for trial in self.trials]
            plots.accuracy_by_rate(metrics, best.lr, self.directory.sweep_plot)
        self.emit(Choice(best.lr, self.config.retrain, tuple(self.trials)))
        return None

    def finish(self) -> Outcome:
        """Train on all images with `retrain`, and move the result up."""
        config, best = self.config, best_trial(self.trials)
        run = self.trial_directory(best.lr)
        if config.retrain:
            run = RunDirectory(self.directory.path / "sweep" / "retrain")
            note = (
                f"the learning rate {best.lr:g} was the best of {join_numbers(config.sweep)}, "
                f"with {best.val_top1:.1%} on the validation split; the model was then trained on "
                "the training and validation images, and the last weights were stored"
            )
            data = dataclasses.replace(config.data, merge_val=True)
            without_val = {"data": data, "patience": None, "probe_every": None}
            if best.stored_average is False:  # without validation, the average would be stored
                without_val["ema"] = None
            outcome = self.train(run, best.lr, note=note, **without_val)
            if outcome.stopped_by is not None:
                return outcome
        provenance = self.ranks.broadcast(_read_provenance(run) if self.ranks.is_first else {})
        if self.ranks.is_first:
            _move_up(run, self.directory)
            self.directory.drop_states()
        stored = (provenance["steps"], "ema" in provenance, provenance["metrics"])
        skipped = len(self.directory.lines(self.directory.skipped))
        logged = self.directory.lines(self.directory.metrics)
        steps = max((line["step"] for line in logged), default=0)
        return Outcome(config, self.directory, steps, None, *stored, skipped)

    def write(self) -> None:
        """Write sweep.json; `--config RUN/sweep.json` repeats the sweep."""
        if self.ranks.is_first:
            trials = [dataclasses.asdict(trial) for trial in self.trials]
            record = {"vit": {"train": dataclasses.asdict(self.config)}, "trials": trials}
            self.directory.write_json(self.directory.sweep, record)

    def drop_weights(self) -> None:
        """Delete the weights of all trials, or with --no-retrain of all but the best so far."""
        kept_lr = None
        if not self.config.retrain and any(trial.val_top1 is not None for trial in self.trials):
            kept_lr = best_trial(self.trials).lr
        for trial in self.trials:
            if trial.lr != kept_lr and self.ranks.is_first:
                run = self.trial_directory(trial.lr)
                run.drop_states()
                for file in (run.model, run.card):
                    file.unlink(missing_ok=True)


def _read_trial(run: RunDirectory, lr: float) -> Trial:
    """Read the metrics of a finished run from its directory."""
    provenance = _read_provenance(run)
    step, accuracy = provenance["steps"], provenance["metrics"]["val_top1"]
    name = "ema_val_loss" if "ema" in provenance else "val_loss"
    losses = {line["step"]: line[name] for line in run.lines(run.metrics) if name in line}
    return Trial(lr, accuracy, losses.get(step), step, "ema" in provenance, provenance["seconds"])


def _read_provenance(run: RunDirectory) -> dict[str, Any]:
    return read_info(run.path, offline=True)[0].provenance


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


def _move_up(source: RunDirectory, destination: RunDirectory) -> None:
    """Move the files of a finished run up into the sweep's directory. The model comes last, to mark
    completion: if interrupted before, this is repeated."""
    if source.config.exists():
        config = json.loads(source.config.read_text(encoding="utf-8"))
        config["vit"]["train"]["output"] = str(destination.path)
        source.write_json(source.config, config)
    (source.path / ".lock").unlink(missing_ok=True)  # left by a run that was killed
    for file in sorted(source.path.iterdir(), key=lambda file: file == source.model):
        target = destination.path / file.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(file, target)
    source.path.rmdir()


def _without_repeats(on_event: OnEvent) -> OnEvent:
    """Forward each note only once, as all runs share data and model, and drop plans of trials."""
    seen = set[Event]()
    in_trial = False

    def emit(event: Event) -> None:
        nonlocal in_trial
        if isinstance(event, TrialStart | Trial):
            in_trial = isinstance(event, TrialStart)
        if isinstance(event, Note):
            if event in seen:
                return
            seen.add(event)
        if not (in_trial and isinstance(event, Plan)):
            on_event(event)

    return emit
