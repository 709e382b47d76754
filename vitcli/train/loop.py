"""The training loop: `vit pretrain` and `vit finetune` are this one function.

Everything random about an image is a function of (seed, epoch, sample), everything random about a
batch of (seed, step), so a run that is stopped and resumed sees what it would have seen.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitcli.data.order import batch_rng
from vitcli.data.transforms import mix
from vitcli.devices import ran_out_of_memory
from vitcli.errors import NOT_FINITE, DivergedError, OutputError
from vitcli.train import report, setup
from vitcli.train.directory import RunDirectory
from vitcli.train.inputs import Computed, Inputs, make_inputs
from vitcli.train.layers import set_training
from vitcli.train.objectives import classification_loss, count_correct, soft_targets
from vitcli.train.optim import build_optimizer, learning_rate
from vitcli.train.run import Run
from vitcli.train.state import Progress, load_state, save_state
from vitcli.train.tensorboard import scalar_log
from vitcli.train_config import TrainConfig

Event = dict[str, Any]
"""What the loop reports: {"event": "plan" | "train" | "evaluation" | "progress" | "note" |
"warning", ...}; "progress" is of what takes time between two steps."""

OnEvent = Callable[[Event], None]

LOWER = "try a lower --lr, a longer --warmup, or --precision fp32"

STOPPING = "stopping after this step; once more stops at once"

SAVE_SECONDS = 60.0
"""Between states, at least, where the configuration does not say after how many steps."""
SAVE_SHARE = 0.05
"""Of a run's time that writing them may take then."""


@dataclass
class Outcome:
    """How a run ended."""

    config: TrainConfig
    folder: RunDirectory
    step: int
    """The last one taken."""
    stopped_by: int | None = None
    """The signal that stopped it; `--resume` goes on. None: it is finished."""
    stored_step: int = 0
    """Of the stored weights: the best on validation, else the last."""
    stored_averaged: bool = False
    """Whether these are the average, not the model itself."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of the stored model: those of `Evaluation.figures`, as val_top1, of the parts there are."""


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    force: bool = False,
    offline: bool = False,
    allow_pickle: bool = False,
    on_event: OnEvent = lambda event: None,
    computed: Computed | None = None,
) -> Outcome:
    """Trains a model into `config.output`.

    Args:
        config: the run; what it leaves open is planned (`train/plan.py`).
        resume: go on from the folder's state; `config` is then the one that the run wrote.
        force: replace a run that the folder holds.
        offline: do not touch the network.
        allow_pickle: take a Hub repo whose weights are a pickle only; nothing in it is run.
        on_event: told of the plan, of steps, of evaluations and of what should be known; of one
            event at a time, also where a signal comes meanwhile.
        computed: features that another run on the same model and data has computed; those of this
            one are added.

    Raises:
        RunError: the folder cannot be used, another process uses it, memory runs out with one
            image at a time, or the loss diverges (DivergedError).
        VitError: the data, the model or the configuration does not allow the run.
    """
    folder, on_event = RunDirectory(config.output), _OneByOne(on_event)
    with folder.lock:
        folder.check_resumable() if resume else folder.check_free(force, config.data.path)
        run = setup.prepare(config, folder, resume, offline, on_event, allow_pickle)
        computed = {} if computed is None else computed
        return _train(run, folder, resume, on_event, computed)


def _train(
    run: Run, folder: RunDirectory, resume: bool, on_event: OnEvent, computed: Computed
) -> Outcome:
    config, model = run.config, run.model
    optimizer = build_optimizer(model, config)
    if resume:
        progress = load_state(folder.state, run, optimizer)
        folder.rewind_metrics(progress.step or -1)  # at step 0 everything is done again
    else:
        progress = Progress()
        folder.start()
    try:
        folder.write_json(folder.split, run.split)
        run.write_config(folder, progress)
        save_state(folder.state, run, optimizer, progress)
    except OutputError:
        if not resume:  # half a beginning can neither be resumed nor begun
            folder.clear()
        raise
    for warning in progress.warnings:
        on_event({"event": "warning", "text": warning})
    on_event(run.plan_event(progress.step))

    steps, batch = config.steps or 0, config.batch_size or 0
    started = time.monotonic() - progress.seconds
    inputs = make_inputs(run, on_event, computed)
    last = progress.step if progress.lost_patience(config) else steps
    batches = inputs.batches(progress.step, last)
    log = scalar_log(folder.tensorboard, progress.step, config.tensorboard)
    with closing(batches), log as record, _stop_requested(on_event) as stop:

        def tell(line: Event) -> None:
            folder.append_metrics(line)
            record(line)
            on_event(line)

        if config.keep_head and run.val is not None and progress.step == 0:
            _validate(run, inputs, folder, progress, tell)  # where what is kept starts from
        set_training(model, config.freeze)
        meter, saved_at, saving = _Meter(progress.step, batch, steps), time.monotonic(), 0.0
        for step, (x, labels) in enumerate(batches, start=progress.step + 1):
            if meter.is_first(step):
                meter.leave_out(meter.since)  # the wait for the first batch
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, config) * group["lr_scale"]
            y = soft_targets(labels, model.config.num_classes, config)
            x, y = mix(x, y, config.augment, batch_rng(config.seed, step))
            loss, correct = _backward_that_fits(run, inputs, x, y, on_event)
            run.scaler.unscale_(optimizer)
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            run.scaler.step(optimizer)
            run.scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if run.averaged is not None:
                run.averaged.update_parameters(model)

            progress.step = step
            progress.seconds = time.monotonic() - started
            meter.add(loss, correct)
            if meter.due(step) or meter.is_first(step):
                line = meter.read(step, learning_rate(step, config))
                if not math.isfinite(line["loss"]):
                    raise DivergedError(
                        f"the loss is {line['loss']} at step {step}",
                        where=folder.path,
                        hint=LOWER if step > 1 else NOT_FINITE,  # nothing was learnt at step 1
                    )
                tell(line) if meter.due(step) else on_event(line)
            if run.val is not None and (step % (config.eval_every or steps) == 0 or step == steps):
                begun = time.monotonic()
                _validate(run, inputs, folder, progress, tell)
                set_training(model, config.freeze)
                meter.leave_out(begun)
            ends = step == steps or progress.lost_patience(config)
            stops = stop.signal is not None
            late = time.monotonic() - saved_at > max(SAVE_SECONDS, saving / SAVE_SHARE)
            due = step % config.save_every == 0 if config.save_every else late
            best = progress.best_step == step  # a GPU may not come here again: both are kept
            if (due or best or ends or stops) and meter.finite():
                begun = time.monotonic()
                save_state(folder.state, run, optimizer, progress)
                saved_at = time.monotonic()
                saving = saved_at - begun
            if ends:
                break
            if stops:
                return Outcome(run.config, folder, step, stopped_by=stop.signal)
    if run.val is None:
        progress.best_step, progress.best_averaged = progress.step, run.averaged is not None
        run.write_model(folder, progress)
    figures = report.finish(run, folder, progress, on_event)
    folder.state.unlink(missing_ok=True)
    stored = (progress.best_step, progress.best_averaged)
    return Outcome(run.config, folder, progress.step, None, *stored, figures)


def _backward_that_fits(
    run: Run, inputs: Inputs, x: Tensor, y: Tensor, on_event: OnEvent
) -> tuple[Tensor, Tensor]:
    """`_backward`, in more and smaller parts where the device's memory runs out."""
    while True:
        try:
            return _backward(run, inputs, x, y)
        except RuntimeError as error:
            if not ran_out_of_memory(error):
                raise
        # Out of the except clause: its traceback holds on to the tensors that did not fit.
        run.model.zero_grad(set_to_none=True)
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.split_further()
        text = f"memory ran out: going on with batches in {run.config.accumulate} parts"
        on_event({"event": "warning", "text": text})


def _backward(run: Run, inputs: Inputs, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves a batch's gradients in the model; gives its mean loss and its count of right answers.

    x: (B, ...), y: (B, K); both go through the model in parts, as memory asks for.
    """
    parts = inputs.parts
    loss_sum = torch.zeros((), device=run.device)
    correct = torch.zeros((), dtype=torch.int64, device=run.device)
    for part, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        with run.autocast():
            logits = inputs.logits(part)
        loss = classification_loss(logits, targets, run.config, run.class_weights) / parts
        run.scaler.scale(loss).backward()
        loss_sum += loss.detach()
        correct += count_correct(logits.detach(), targets)
    return loss_sum, correct


def _validate(
    run: Run, inputs: Inputs, folder: RunDirectory, progress: Progress, tell: OnEvent
) -> None:
    """Evaluates the model as it is, and its average; the better one is stored if nothing was
    better before."""
    models: dict[str, Any] = {"val": run.model}
    if run.averaged is not None and progress.step:
        models["ema_val"] = run.averaged.module
    line: Event = {"event": "evaluation", "step": progress.step}
    for name, model in models.items():
        found = inputs.evaluate(model)
        line |= {**found.metrics(f"{name}_"), f"{name}_loss": found.loss}
    tell(line)
    best = max(models, key=lambda name: line[f"{name}_top1"])  # the model itself where they tie
    accuracy = line[f"{best}_top1"]
    progress.stale += 1
    if progress.best_accuracy is None or accuracy > progress.best_accuracy:
        progress.best_accuracy, progress.best_step, progress.stale = accuracy, progress.step, 0
        progress.best_averaged = best != "val"
        run.write_model(folder, progress)


class _Meter:
    """Averages of loss, accuracy and rate since they were last read."""

    def __init__(self, step: int, batch: int, steps: int) -> None:
        self.batch, self.steps = batch, steps
        self.every = max(1, min(50, steps // 100))
        self.start, self.since = step, time.monotonic()
        self.losses: list[Tensor] = []
        self.correct: list[Tensor] = []

    def add(self, loss: Tensor, correct: Tensor) -> None:
        self.losses.append(loss)
        self.correct.append(correct)

    def due(self, step: int) -> bool:
        """Whether metrics.jsonl gets a line: the first step, the last, and some between."""
        return step == 1 or step % self.every == 0 or step == self.steps

    def is_first(self, step: int) -> bool:
        """Whether a line should show that the run, or what is left of it, is under way."""
        return step == self.start + 1

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

    def leave_out(self, begun: float) -> None:
        """Leaves what has taken since then (an evaluation) out of the rate."""
        self.since += time.monotonic() - begun


class _OneByOne:
    """Tells events one after the other: one that a signal's handler has to tell while another is
    being told (a line may be half written) comes right after it."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event, self.waiting, self.telling = on_event, list[Event](), False

    def __call__(self, event: Event) -> None:
        self.waiting.append(event)
        if self.telling:
            return
        self.telling = True
        try:
            while self.waiting:
                self.on_event(self.waiting.pop(0))
        finally:
            self.telling = False


@dataclass
class _Stop:
    """Which signal asked the run to stop, if any did."""

    signal: int | None = None


@contextmanager
def _stop_requested(on_event: OnEvent) -> Iterator[_Stop]:
    """Notes the first Ctrl-C or SIGTERM, which lets the step end and the state be saved, and says
    so; a second one acts at once. Outside the main thread signals are left alone."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for s, handler in before.items():
            signal.signal(s, handler)

    def request(number: int, frame: object) -> None:
        stop.signal = number
        restore()
        on_event({"event": "note", "text": STOPPING})

    for s in before:
        signal.signal(s, request)
    try:
        yield stop
    finally:
        restore()
