"""The training loop of both `vit pretrain` and `vit finetune`.

All randomness of an image is a function of (seed, epoch, sample), and that of a batch a function
of (seed, step), so a resumed run sees the same inputs as an uninterrupted one.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from vitcli.checkpoints.read import Fetching
from vitcli.devices import choose_device, is_out_of_memory
from vitcli.distributed import Ranks, join_ranks
from vitcli.errors import NOT_FINITE, DivergedError, RankError, handle_warnings
from vitcli.train import probe, report, setup
from vitcli.train.config import TrainConfig
from vitcli.train.directory import RunDirectory, resumed_config
from vitcli.train.events import Caution, Event, EventQueue, OnEvent, Probe, Step, Validation
from vitcli.train.inputs import CachedFeatures, Features, Images, Inputs, has_fixed_features
from vitcli.train.optim import learning_rate, set_training
from vitcli.train.parallel import data_parallel, gradient_sync
from vitcli.train.plan import build_plan
from vitcli.train.run import Run
from vitcli.train.state import Saver, load_state
from vitcli.train.stop import stop_requested
from vitcli.train.tensorboard import scalar_log

DIVERGED_HINT = "try a lower --lr or a longer --warmup; with bf16 or fp16, try --precision fp32"


@dataclass
class Outcome:
    """How a run ended."""

    config: TrainConfig
    directory: RunDirectory
    step: int
    """The last completed step."""
    stopped_by: int | None = None
    """The signal that interrupted the run; None if it finished."""
    stored_step: int = 0
    """The step of the stored weights (`TrainConfig.store`)."""
    stored_averaged: bool = False
    """Whether the stored weights are the moving average."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the stored model, such as val_top1 and test_top1."""
    skipped: int = 0
    """Number of unreadable images."""

    def to_json(self) -> dict[str, Any]:
        """The outcome as the last JSON object of the output."""
        stored = {"stored_step": self.stored_step, "stored_average": self.stored_averaged}
        result = {"event": "result", "directory": str(self.directory.path), "steps": self.step}
        return {**result, **stored, "unreadable": self.skipped, **self.metrics}


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    on_event: OnEvent = lambda event: None,
    feature_cache: CachedFeatures | None = None,
    **fetching: Unpack[Fetching],
) -> Outcome:
    """Train a model, and write the run to `config.output`.

    Args:
        config: the run's configuration; options that it leaves unset are planned (`train/plan.py`).
        resume: continue from the state in the directory; `config` is then the one the run wrote.
        force: replace an existing run in the directory.
        on_event: called with every event, one at a time, even if a signal arrives meanwhile.
        feature_cache: features that other runs with the same model and data have
            computed; this run adds its own.
        fetching: options of the download of the initial model and the teacher.

    Raises:
        RunError: the directory cannot be used or is in use by another process, memory runs out
            with one image at a time, or the loss diverges (DivergedError).
        VitError: the data, the model or the configuration does not allow the run.
    """
    with open_run(config, resume, force, on_event) as (config, resume, directory, ranks, on_event):
        run = setup.prepare(config, directory, ranks, on_event, resume, **fetching)
        _start(run, resume)
        on_event(build_plan(run))
        return _train(run, {} if feature_cache is None else feature_cache)


@contextlib.contextmanager
def open_run(
    config: TrainConfig, resume: bool, force: bool, on_event: OnEvent
) -> Iterator[tuple[TrainConfig, bool, RunDirectory, Ranks, OnEvent]]:
    """Join the ranks, and check and lock the directory of a run or a sweep. What an earlier attempt
    of this launch has begun there is resumed, or started again if it has no state yet. `on_event`
    becomes a no-op on all ranks but the first."""
    directory, device = RunDirectory(config.output), choose_device(config.device)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(device, config.rank_timeout))
        emit = EventQueue(on_event) if ranks.is_first else lambda event: None
        stack.enter_context(handle_warnings(lambda text: emit(Caution(text))))
        if not resume and ranks.has_begun(directory.path):
            resume = ranks.broadcast(directory.is_resumable())
            force = force or not directory.is_finished()
        elif resume and ranks.broadcast(directory.is_only_begun()):
            resume, force = False, True
        if ranks.is_first:
            stack.enter_context(directory.locked())
            if resume:
                directory.check_resumable(config.task)
                directory.stopped.unlink(missing_ok=True)
            else:
                directory.check_free(force, config.data)
        yield resumed_config(config) if resume else config, resume, directory, ranks, emit


def _start(run: Run, resume: bool) -> None:
    """Load the state of a resumed run, and write the initial files of a new one."""
    directory, first = run.directory, run.ranks.is_first
    if resume:
        load_state(run)
        if run.ranks.has_begun(directory.path):
            run.on_event(Caution(f"a process failed: resuming from step {run.progress.step}"))
    if first and resume:  # a run that is resumed at step 0 redoes everything
        directory.rewind_metrics(run.progress.step or -1)
    elif first:
        directory.start()
    if first:
        run.ranks.begin(directory.path)
        directory.write_json(directory.split, run.splits.record)
        run.write_config()
    run.ranks.barrier()
    if not resume:
        saver = Saver(run)
        saver.start()
        saver.finish()


def _train(run: Run, feature_cache: CachedFeatures) -> Outcome:
    config, objective, optimizer = run.config, run.objective, run.optimizer
    directory, progress, steps = run.directory, run.progress, run.steps
    val, ranks = run.splits.val, run.ranks
    started = time.monotonic() - progress.seconds
    inputs: Inputs = Features(run, feature_cache) if has_fixed_features(run) else Images(run)
    last_step = progress.step if progress.should_stop_early(config) else steps
    batches = inputs.batches(progress.step, last_step)
    parallel, saver = data_parallel(objective, run.device, ranks), Saver(run)
    log = scalar_log(directory.tensorboard, progress.step, config.tensorboard and ranks.is_first)
    with contextlib.closing(batches), saver, log as record, stop_requested(run.on_event) as stop:

        def emit(event: Event) -> None:
            if ranks.is_first:
                directory.append(directory.metrics, event.to_json())
                record(event)
                run.on_event(event)

        if config.keep_head and val is not None and progress.step == 0:
            _validate(run, inputs, emit)  # the baseline of the kept head
        set_training(objective, config.freeze)
        meter = _Meter(run)
        for step, (x, labels) in enumerate(batches, start=progress.step + 1):
            if meter.is_first(step):
                meter.restart_clock()  # exclude the wait for the first batch
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config) * group["lr_scale"]
            x, y = objective.prepare(x, labels, step, run.part.start, inputs.lead)
            loss, correct = _backward_within_memory(run, inputs, parallel, x, y)
            run.scaler.unscale_(optimizer)
            if config.clip_norm:
                torch.nn.utils.clip_grad_norm_(objective.parameters(), config.clip_norm)
            run.scaler.step(optimizer)
            run.scaler.update()
            optimizer.zero_grad(set_to_none=True)
            saver.poll()
            if run.averaged is not None:
                run.averaged.update_parameters(objective)

            progress.step = step
            progress.seconds = time.monotonic() - started
            meter.add(loss, correct)
            if meter.is_due(step) or meter.is_first(step):
                event = meter.average(step)
                _check_finite(run, "loss", event.loss, step - 1)
                if meter.is_due(step):
                    emit(event)
                    meter.restart()
                else:
                    run.on_event(event)
                    meter.restart_clock()
                if meter.is_first(step):
                    meter.first_step_ended = time.monotonic()
            if val is not None and (step % (config.eval_every or steps) == 0 or step == steps):
                with meter.paused():
                    _validate(run, inputs, emit)
            if config.probe_every and (step % config.probe_every == 0 or step == steps):
                with meter.paused():
                    emit(Probe(step, probe.measure(run)))
            is_last = step == steps or progress.should_stop_early(config)
            is_best = progress.best_step == step  # a GPU may not reproduce these weights
            # A signal on one rank, or a state that is due on one, applies to all.
            stopped_by, is_due = ranks.all_max(stop.signal or 0, saver.is_due(step))
            if (is_due or is_best or is_last or stopped_by) and meter.is_finite():
                with meter.paused():
                    saver.start()
                    if is_best:  # keep the stored model and the state in sync
                        saver.finish()
            if is_last:
                break
            if stopped_by:
                ranks.end_launch(128 + stopped_by)  # the launcher may take the stop for a failure
                if ranks.is_first:
                    directory.stopped.touch()
                saver.finish()
                return Outcome(run.config, directory, step, stopped_by=stopped_by)
    saver.finish()
    if val is None:
        progress.best_step, progress.best_averaged = progress.step, run.averaged is not None
        run.write_model()
    metrics = report.finish(run)
    if ranks.is_first:
        directory.drop_states()
    ranks.barrier()
    stored = (progress.best_step, progress.best_averaged)
    skipped = len(directory.lines(directory.skipped))
    return Outcome(run.config, directory, progress.step, None, *stored, metrics, skipped)


def _backward_within_memory(
    run: Run, inputs: Inputs, module: nn.Module, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Run `_backward`, in more and smaller micro-batches if the device runs out of memory."""
    while True:
        try:
            return _backward(run, inputs, module, x, y)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if run.ranks.world_size > 1:  # the other ranks wait for its gradients
                more = 2 * run.micro_batches
                raise RankError(
                    f"rank {run.ranks.rank} ran out of memory",
                    where=run.directory.path,
                    hint=f"use --shard, --grad-checkpointing or --grad-accum {more}",
                ) from error
        # Outside the except clause, whose traceback keeps the tensors alive that did not fit.
        run.objective.zero_grad(set_to_none=True)
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.split_further()
        run.on_event(Caution(f"out of memory: continuing with {run.micro_batches} micro-batches"))


def _backward(
    run: Run, inputs: Inputs, module: nn.Module, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Accumulate a batch's gradients in the objective, and return this rank's share of the mean
    loss and of the number of correct predictions.

    x: (b, ...), y: (b, ...), this rank's part of a batch. It is split into micro-batches, and the
    gradients are averaged over the ranks after the last one.
    """
    # The same on every rank, also where their parts of the batch differ by an image.
    num_parts = min(inputs.micro_batches, run.batch_size // run.ranks.world_size)
    loss_sum = torch.zeros((), device=run.device)
    correct_sum = torch.zeros((), dtype=torch.int64, device=run.device)
    micro_batches = list(zip(x.tensor_split(num_parts), y.tensor_split(num_parts), strict=True))
    for number, (x_part, y_part) in enumerate(micro_batches, start=1):
        with gradient_sync(module, number == len(micro_batches)):
            with run.autocast():
                losses, correct = module(x_part, y_part)
            loss = losses.sum() / run.batch_size
            run.scaler.scale(loss * run.ranks.world_size).backward()
        loss_sum += loss.detach()
        correct_sum += correct.sum()
    return loss_sum, correct_sum


def _validate(run: Run, inputs: Inputs, emit: OnEvent) -> None:
    """Evaluate the model and its average. Store the better of the two if it is the best so far, or
    if the last weights are to be stored (`TrainConfig.store`). If tied, the lowest loss is best."""
    progress = run.progress
    objectives: dict[str, Any] = {"val": run.objective}
    if run.averaged is not None and progress.step:
        objectives["ema_val"] = run.averaged.module
    metrics, scores = dict[str, float](), dict[str, float]()
    for name, objective in objectives.items():
        result = inputs.evaluate(objective)
        metrics |= {f"{name}_{key}": value for key, value in result.items()}
        scores[name] = result.get("top1", -result["loss"])
    emit(Validation(progress.step, metrics))
    for name in objectives:
        _check_finite(run, f"{name}_loss", metrics[f"{name}_loss"], progress.step)
    report.draw(run)
    better = max(scores, key=lambda name: (scores[name], -metrics[f"{name}_loss"]))
    score, loss = scores[better], metrics[f"{better}_loss"]
    best = progress.best_score
    is_better = best is None or score > best
    is_best = is_better or (score == best and loss < progress.best_loss)
    progress.stale = 0 if is_better else progress.stale + 1
    if is_best:
        progress.best_score, progress.best_loss = score, loss
    if is_best or run.config.store == "last":
        progress.best_step, progress.best_averaged = progress.step, better != "val"
        progress.stored_score = score
        run.write_model()


def _check_finite(run: Run, name: str, loss: float, updates: int) -> None:
    """Raise DivergedError if the loss after this many updates is not finite."""
    if not math.isfinite(loss):
        raise DivergedError(
            f"the {name} is {loss} at step {run.progress.step}",
            where=run.directory.path,
            hint=DIVERGED_HINT if updates else NOT_FINITE,
        )


class _Meter:
    """Averages of loss, accuracy and images per second since the last restart."""

    def __init__(self, run: Run) -> None:
        self.run, self.start = run, run.progress.step
        self.first_step_ended = 0.0
        """When the first step was done; the remaining time is estimated from all time since,
        including evaluations."""
        self.losses: list[Tensor]
        self.correct: list[Tensor]
        self.restart()

    def add(self, loss: Tensor, correct: Tensor) -> None:
        self.losses.append(loss)
        self.correct.append(correct)

    def is_due(self, step: int) -> bool:
        """Whether the step is logged to metrics.jsonl: the first, the last, every `log_every`."""
        return step in (1, self.run.steps) or step % (self.run.config.log_every or 1) == 0

    def is_first(self, step: int) -> bool:
        """Whether this is the first step of the process, which is reported to show progress."""
        return step == self.start + 1

    def average(self, step: int) -> Step:
        """Return the averages. Synchronizes with the device: too slow for every step."""
        run, images = self.run, len(self.losses) * self.run.batch_size
        timed_images = images - self.untimed_images
        loss = run.ranks.sum(torch.stack(self.losses)).mean().item()
        correct = run.ranks.sum(torch.stack(self.correct)).sum().item()
        accuracy = correct / images if run.objective.classifies else None
        rate = timed_images / max(time.monotonic() - self.clock_started, 1e-9)
        seconds = run.batch_size / rate  # per step
        if step > self.start + 1:
            seconds = (time.monotonic() - self.first_step_ended) / (step - self.start - 1)
        eta = (run.steps - step) * seconds
        lr = learning_rate(step, run.config)
        return Step(step, run.steps, loss, accuracy, lr, rate, eta)

    def restart(self) -> None:
        """Reset all averages."""
        self.losses, self.correct = [], []
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time and the images so far from the images per second."""
        self.clock_started = time.monotonic()
        self.untimed_images = len(self.losses) * self.run.batch_size

    def is_finite(self) -> bool:
        """Whether all losses since the last restart are finite: a diverged state is not saved."""
        diverged = bool(self.losses) and not torch.stack(self.losses).isfinite().all()
        return not self.run.ranks.all_max(diverged)[0]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the images per second."""
        started = time.monotonic()
        yield
        self.clock_started += time.monotonic() - started
