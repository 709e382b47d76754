"""Events that a training run reports; `cli/training_display.py` displays them."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from vitcli.hub_requests import Transfer


@dataclass(frozen=True)
class Event:
    """Base class of all events."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The event as a JSON object."""
        return {"event": self.kind, **dataclasses.asdict(self)}


OnEvent = Callable[[Event], None]


class EventQueue:
    """Delivers events one at a time: an event from a signal handler that interrupts the display of
    another event (perhaps in the middle of a line) is delivered after it."""

    def __init__(self, on_event: OnEvent) -> None:
        self.on_event, self.queue, self.delivering = on_event, list[Event](), False

    def __call__(self, event: Event) -> None:
        self.queue.append(event)
        if self.delivering:
            return
        self.delivering = True
        try:
            while self.queue:
                self.on_event(self.queue.pop(0))
        finally:
            self.delivering = False


@dataclass(frozen=True)
class Note(Event):
    """An informational message."""

    kind = "note"
    text: str


@dataclass(frozen=True)
class Caution(Note):
    """A warning; the run continues."""

    kind = "warning"


@dataclass(frozen=True)
class Advance(Event):
    """Progress of a pass over images between two steps; not part of the JSON output."""

    kind = "progress"
    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Download(Event):
    """Progress of downloading initial or teacher weights; not part of the JSON output."""

    kind = "download"
    transfer: Transfer


@dataclass(frozen=True)
class Plan(Event):
    """Summary of a run, reported before its first step."""

    kind = "plan"
    model: str
    parameters: int
    trained_parameters: int
    resolution: tuple[int, int]
    patch_size: tuple[int, int]
    tokens: int
    flops: int
    """FLOPs of the forward pass of one image."""
    train_images: int
    val_images: int
    classes: int
    class_names: tuple[str, ...]
    """The first ten."""
    steps: int
    from_step: int
    epochs: float
    exaflops: float
    """Cost of the whole run or sweep, including backward passes."""
    batch_size: int
    grad_accum: int
    optimizer: str
    lr: float | None
    warmup: int
    device: str
    precision: str
    ranks: int
    estimated_seconds: float | None
    """None if it is unknown before the first steps."""


@dataclass(frozen=True)
class SweepPlan(Plan):
    """The plan of a sweep, whose `lr` is None."""

    sweep: tuple[float, ...]
    retrain: bool


@dataclass(frozen=True)
class Step(Event):
    """A training step: averages since the previous event, and the seconds left (`eta`)."""

    kind = "train"
    step: int
    steps: int
    loss: float
    accuracy: float | None
    """None if the objective has no classes."""
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
    """Validation metrics: val_loss, val_top1, ...; ema_val_loss, ... of averaged weights."""

    kind = "evaluation"


class Probe(Measurement):
    """Few-shot accuracy of the features: probe_5shot, ..."""

    kind = "probe"


@dataclass(frozen=True)
class TrialStart(Event):
    """Start of a run of a sweep; all events up to its `Trial` belong to it."""

    kind = "trial"
    lr: float
    number: int
    of: int


@dataclass(frozen=True)
class Trial(Event):
    """Result of a run of a sweep: metrics of its stored model, or how the loss diverged."""

    kind = "trial_result"
    lr: float
    val_top1: float | None = None
    val_loss: float | None = None
    best_step: int | None = None
    stored_average: bool | None = None
    seconds: int | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Choice(Event):
    """The learning rate chosen by a sweep."""

    kind = "choice"
    lr: float
    retrain: bool
    trials: tuple[Trial, ...]
