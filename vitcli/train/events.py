"""What a training run reports while it works. `cli/training_display.py` shows it; with `--json`
each event is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class."""

    kind: ClassVar[str]
    """Its name in JSON."""
    trial: float | None = None
    """The learning rate of the run, in a sweep."""

    def to_json(self) -> dict[str, Any]:
        """The event as a line of JSON."""
        fields = dataclasses.asdict(self)
        if fields["trial"] is None:
            del fields["trial"]
        return {"event": self.kind, **fields}


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
class Plan(Event):
    """What a run is about to do, before its first step."""

    kind = "plan"
    model: str
    parameters: int
    trained_parameters: int
    resolution: tuple[int, int]
    patch_size: tuple[int, int]
    tokens: int
    train_images: int
    val_images: int
    classes: int
    steps: int
    from_step: int
    epochs: float
    batch_size: int
    accumulate: int
    optimizer: str
    lr: float | None
    """None in a sweep."""
    warmup: int
    device: str
    precision: str
    estimated_seconds: float
    sweep: tuple[float, ...] = ()
    retrain: bool = False

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        if not self.sweep:
            del fields["sweep"], fields["retrain"]
        return fields


@dataclass(frozen=True)
class Step(Event):
    """A step of training; averages since the event before."""

    kind = "train"
    step: int
    steps: int
    loss: float
    accuracy: float
    lr: float
    images_per_second: float
    eta: float
    """Seconds left."""


@dataclass(frozen=True)
class Validation(Event):
    """An evaluation on the validation split."""

    kind = "evaluation"
    step: int
    metrics: dict[str, float]
    """As val_top1 and val_loss; ema_val_top1 of the averaged weights."""

    def to_json(self) -> dict[str, Any]:
        fields = super().to_json()
        metrics: dict[str, float] = fields.pop("metrics")
        return fields | metrics


@dataclass(frozen=True)
class TrialStart(Event):
    """The start of a sweep's run."""

    kind = "trial"
    lr: float
    number: int
    of: int


@dataclass(frozen=True)
class Trial(Event):
    """A finished run of a sweep."""

    kind = "trial_result"
    lr: float
    val_top1: float | None = None
    """Of its stored model, in [0, 1]; None if the loss diverged."""
    val_loss: float | None = None
    best_step: int | None = None
    """The step of the stored model."""
    seconds: int | None = None
    failure: str | None = None
    """How the loss diverged."""


@dataclass(frozen=True)
class Choice(Event):
    """The learning rate that a sweep chose."""

    kind = "choice"
    lr: float
    retrain: bool
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"trials": [trial_fields(trial) for trial in self.trials]}


def trial_fields(trial: Trial) -> dict[str, Any]:
    """A trial as sweep.json has it."""
    fields = trial.to_json()
    del fields["event"]
    return fields
