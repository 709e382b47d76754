"""The training loop: `vit pretrain` and `vit finetune` are this one function.

Everything random about a picture is a function of (seed, epoch, sample), everything random about a
batch of (seed, step), so a run that is stopped and resumed sees what it would have seen.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vitcli.config import TrainConfig
from vitcli.data.loader import train_batches
from vitcli.data.transforms import batch_rng, mix, to_float
from vitcli.errors import DivergedError
from vitcli.evaluate import evaluate_model
from vitcli.train import report, setup
from vitcli.train.folder import RunFolder
from vitcli.train.objectives import classification_loss, count_correct, soft_targets
from vitcli.train.optim import build_optimizer, learning_rate
from vitcli.train.state import Progress, load_state, save_state
from vitcli.train.tensorboard import scalar_log

Event = dict[str, Any]
"""What the loop reports: {"event": "plan" | "train" | "evaluation" | "note" | "warning",
...}."""

SAVE_SECONDS = 60.0
"""Between states, where the configuration does not say after how many steps."""


@dataclass
class Outcome:
    """How a run ended."""

    config: TrainConfig
    folder: RunFolder
    step: int
    """The last one taken."""
    stopped_by: int | None = None
    """The signal that stopped it; `--resume` goes on. None: it is finished."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of the stored model: those of `Evaluation.figures`, as val_top1, of the parts there are."""


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Trains a model into `config.output`.

    Args:
        config: the run; what it leaves open is planned (`train/plan.py`).
        resume: go on from the folder's state; `config` is then the one that the run wrote.
        force: replace a run that the folder holds.
        offline: do not touch the network.
        on_event: told of the plan, of steps, of evaluations and of what should be known.

    Raises:
        RunError: the folder cannot be used, or the loss diverges (DivergedError).
        VitError: the data, the model or the configuration does not allow the run.
    """
    folder = RunFolder(config.output)
    folder.check_resumable() if resume else folder.check_free(force)
    run = setup.prepare(config, folder, resume, offline, on_event)
    config, model, device, dtype = run.config, run.model, run.device, run.dtype
    optimizer = build_optimizer(model, config)
    if resume:
        progress = load_state(folder.state, model, optimizer, run.scaler)
        folder.rewind_metrics(progress.step)
    else:
        progress = Progress()
        folder.start()
    folder.write_json(folder.split, run.split)
    run.write_config(folder)
    save_state(folder.state, model, optimizer, run.scaler, progress, run.info)
    for warning in progress.warnings:
        on_event({"event": "warning", "text": warning})
    on_event(run.plan_event(progress.step))

    steps, batch, parts = config.steps or 0, config.batch_size or 0, config.accumulate or 1
    meter = _Meter(progress.step, batch, steps)
    saved_at, started = time.monotonic(), time.monotonic() - progress.seconds
    batches = train_batches(
        run.train,
        run.train_transform,
        batch_size=batch,
        seed=config.seed,
        start_step=progress.step,
        steps=steps,
        workers=config.workers or 0,
    )
    model.train()
    log = scalar_log(folder.tensorboard, progress.step, config.tensorboard)
    with _stop_requested() as stop, log as record:
        for step, (pixels, labels, _) in enumerate(batches, start=progress.step + 1):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config)
            images = to_float(pixels.to(device, non_blocking=True), run.preprocess)
            targets = soft_targets(labels.to(device), model.config.num_classes, config)
            rng = batch_rng(config.seed, step)
            images, targets = mix(images, targets, config.augment, rng)
            loss_sum = torch.zeros((), device=device)
            correct = torch.zeros((), dtype=torch.int64, device=device)
            for x, y in zip(images.chunk(parts), targets.chunk(parts), strict=True):
                with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                    logits = model(x)
                loss = classification_loss(logits, y, config) / parts
                run.scaler.scale(loss).backward()
                loss_sum += loss.detach()
                correct += count_correct(logits.detach(), y)
            run.scaler.unscale_(optimizer)
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            run.scaler.step(optimizer)
            run.scaler.update()
            optimizer.zero_grad(set_to_none=True)

            progress.step = step
            progress.seconds = time.monotonic() - started
            meter.add(loss_sum, correct)
            if meter.due(step):
                line = meter.read(step, learning_rate(step, config))
                if not math.isfinite(line["loss"]):
                    raise DivergedError(
                        f"the loss is {line['loss']} at step {step}",
                        where=folder.path,
                        hint="try a lower --lr, a longer --warmup, or --precision fp32",
                    )
                folder.append_metrics(line)
                record(line)
                on_event(line)
            if run.val is not None and (step % (config.eval_every or steps) == 0 or step == steps):
                part, workers = batch // parts, config.workers or 0
                evaluation = evaluate_model(
                    model, run.val, run.preprocess, part, device, dtype, workers, config.loss
                )
                model.train()
                accuracy = evaluation.top1
                line = {"event": "evaluation", "step": step, "val_top1": accuracy}
                line |= {**evaluation.figures("val_"), "val_loss": evaluation.loss}
                folder.append_metrics(line)
                record(line)
                on_event(line)
                if progress.best_accuracy is None or accuracy > progress.best_accuracy:
                    progress.best_accuracy, progress.best_step = accuracy, step
                    run.write_model(folder, progress)
                meter.skip_time()
            late = time.monotonic() - saved_at > SAVE_SECONDS
            due = step % config.save_every == 0 if config.save_every else late
            if (due or step == steps) and meter.finite():
                save_state(folder.state, model, optimizer, run.scaler, progress, run.info)
                saved_at = time.monotonic()
            if stop.signal is not None and step < steps:
                save_state(folder.state, model, optimizer, run.scaler, progress, run.info)
                return Outcome(config, folder, step, stopped_by=stop.signal)
    if run.val is None:
        progress.best_step = steps
        run.write_model(folder, progress)
    figures = report.finish(run, folder, progress)
    folder.state.unlink(missing_ok=True)
    return Outcome(config, folder, steps, figures=figures)


class _Meter:
    """Averages of loss, accuracy and rate since they were last read."""

    def __init__(self, step: int, batch: int, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.every = max(1, min(50, steps // 100))
        self.first, self.since = step, time.monotonic()
        self.losses: list[torch.Tensor] = []
        self.correct: list[torch.Tensor] = []

    def add(self, loss: torch.Tensor, correct: torch.Tensor) -> None:
        self.losses.append(loss)
        self.correct.append(correct)

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def read(self, step: int, lr: float) -> Event:
        """Waits for the device: not to be called after every step of a small model."""
        count = len(self.losses)
        loss = torch.stack(self.losses).mean().item()
        accuracy = torch.stack(self.correct).sum().item() / (count * self.batch)
        now = time.monotonic()
        rate = count * self.batch / max(now - self.since, 1e-9)
        self.losses, self.correct, self.since = [], [], now
        return {
            "event": "train",
            "step": step,
            "steps": self.steps,
            "loss": loss,
            "accuracy": accuracy,
            "lr": lr,
            "images_per_second": rate,
            "eta": (self.steps - step) * self.batch / rate,
        }

    def finite(self) -> bool:
        """Whether the losses since the last reading are finite: what is lost is not kept."""
        return not self.losses or bool(torch.stack(self.losses).isfinite().all())

    def skip_time(self) -> None:
        """Leaves an evaluation out of the rate."""
        self.since = time.monotonic() if not self.losses else self.since


@dataclass
class _Stop:
    """Which signal asked the run to stop, if any did."""

    signal: int | None = None


@contextmanager
def _stop_requested() -> Iterator[_Stop]:
    """Notes the first Ctrl-C or SIGTERM, which lets the step end and the state be saved; a second
    one acts at once. Outside the main thread signals are left alone."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: object) -> None:
        stop.signal = number
        signal.signal(number, before[signal.Signals(number)])

    for s in before:
        signal.signal(s, request)
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
