"""Helpers shared by the tests of training runs."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vitcli.config import AugmentConfig, DataConfig
from vitcli.train.config import TrainConfig
from vitcli.train.events import Event

COLORS = {"blue": (40, 60, 200), "green": (50, 180, 60), "red": (200, 50, 40)}
"""The classes of the small dataset, and their mean colors."""
TINY = {"width": 24, "depth": 2, "num_heads": 2, "mlp_dim": 32}
SIZES = {**TINY, "image_size": (16, 16)}
"""Sizes of a small model with patches of 8 x 8."""
NO_AUGMENTATION = AugmentConfig(crop_area=(1.0, 1.0), flip=False)
"""No augmentation: images are preprocessed as for evaluation."""


def make_config(**fields: Any) -> TrainConfig:
    """A configuration whose data and output are not used."""
    return TrainConfig(data=DataConfig("x"), output="y", **fields)


class Killed(BaseException):
    """Simulates SIGKILL: nothing catches it, and nothing is saved."""


def kill_at(step: int | None, kind: str = "train") -> Callable[[Event], None]:
    """An on_event callback that ends the run, as kill -9 would, as soon as an event of this kind
    and step (None: any) is reported."""

    def on_event(event: Any) -> None:
        if event.kind == kind and step in (None, getattr(event, "step", None)):
            raise Killed

    return on_event


def interrupt_at(step: int) -> Callable[[Event], None]:
    """An on_event callback that sends SIGTERM to this process as soon as `step` is reported."""

    def on_event(event: Any) -> None:
        if event.kind == "train" and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return on_event


def filter_events(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event.kind == kind]


def read_metrics(directory: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl with events of one kind (None: any)."""
    lines = map(json.loads, (Path(directory) / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if kind in (None, line["event"])]


def read_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """The weights of the model and, if there is one, of the decoder trained with it."""
    files = (Path(directory) / name for name in ("model.safetensors", "decoder.safetensors"))
    return {k: v for file in files if file.exists() for k, v in load_file(file).items()}


def weights_equal(first: str | Path, second: str | Path) -> bool:
    a, b = read_weights(first), read_weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def max_weight_difference(first: str | Path, second: str | Path) -> float:
    """The largest absolute difference between the weights of two runs."""
    a, b = read_weights(first), read_weights(second)
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def weights_close(first: str | Path, second: str | Path) -> bool:
    return max_weight_difference(first, second) < 2e-5
