"""What a training run reports while it works; `cli/training_display.py` shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from vitcli.hub.retry import Transfer


@dataclass(frozen=True)
class Event:
    """Base class."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The event as a line of JSON."""
        return {"event": self.kind, **dataclasses.asdict(self)}


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Note(Event):
    """Something good to know."""

    kind = "note"
    text: str


@dataclass(frozen=True)
class Caution(Note):
    """Something that may be wrong and does not stop the run."""

    kind = "warning"


@dataclass(frozen=True)
class Advance(Event):
    """How far a pass over images between two steps is; not part of the JSON."""

    kind = "progress"
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Download(Event):
    """How far the download of the initial weights is; not part of the JSON."""

    kind = "download"
    transfer: Transfer


@dataclass(frozen=True)
class Plan(Event):
    """What a run is about to do, before its first step."""

    kind = "plan"
    model: str
    parameters: int
    trained_parameters: int
    resolution: tuple[int, int]
    patch_size: tuple[int, int]
    tokens: int
    flops: int
    """Of the forward pass of one image."""
    train_images: int
    val_images: int
    classes: int
    steps: int
    from_step: int
    epochs: float
    exaflops: float
    """Of the whole run: three forward passes per image, or one if only the head is trained."""
    batch_size: int
    grad_accum: int
    optimizer: str
    lr: float | None
    warmup: int
    device: str
    precision: str
    ranks: int
    estimated_seconds: float | None
    """None where it is not known before the first steps."""


@dataclass(frozen=True)
class SweepPlan(Plan):
    """The plan of a sweep, whose `lr` is None."""

    sweep: tuple[float, ...]
    retrain: bool


@dataclass(frozen=True)
class Step(Event):
    """A step of training; averages since the event before, and the seconds left."""

    kind = "train"
    step: int
    steps: int
    loss: float
    accuracy: float | None
    """None where the objective has no classes."""
    lr: float
    images_per_second: float
    eta: float


@dataclass(frozen=True)
class Measurement(Event):
    """Metrics of the model after a step."""

    step: int
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {"event": self.kind, "step": self.step, **self.metrics}


class Validation(Measurement):
    """On the validation split: val_loss, val_top1, ...; ema_val_loss, ... of averaged weights."""

    kind = "evaluation"


class Probe(Measurement):
    """Few-shot accuracy of the features: probe_5shot, ..."""

    kind = "probe"


@dataclass(frozen=True)
class TrialStart(Event):
    """The start of a sweep's run; the events that follow are its own, up to its `Trial`."""

    kind = "trial"
    lr: float
    number: int
    of: int


@dataclass(frozen=True)
class Trial(Event):
    """A finished run of a sweep: the metrics of its stored model, or how the loss diverged."""

    kind = "trial_result"
    lr: float
    val_top1: float | None = None
    val_loss: float | None = None
    best_step: int | None = None
    seconds: int | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Choice(Event):
    """The learning rate that a sweep chose."""

    kind = "choice"
    lr: float
    retrain: bool
    trials: tuple[Trial, ...]
