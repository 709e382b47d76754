"""Metrics of a run for TensorBoard: scalars in RUN/tensorboard."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vitcli.errors import MissingExtraError
from vitcli.train.events import Event

_NO_SCALARS = ("event", "step", "steps", "eta")


def require_tensorboard() -> None:
    """Raise MissingExtraError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("tensorboard", "--tensorboard")


@contextmanager
def scalar_log(directory: Path, step: int, wanted: bool) -> Iterator[Callable[[Event], None]]:
    """Yield a function that writes an event's numbers as scalars, and flushes them.

    Args:
        directory: the directory of the event files; those of a resumed run are kept.
        step: the last completed step; scalars of later steps, written before a kill, are purged.
        wanted: whether anything is written.
    """
    if not wanted:
        yield lambda event: None
        return
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    writer = SummaryWriter(str(directory), purge_step=step + 1 if step else None)

    def record(event: Event) -> None:
        line = event.to_json()
        for name, value in line.items():
            if name not in _NO_SCALARS and isinstance(value, int | float):
                prefix, of_validation, metric = name.rpartition("val_")
                tag = f"{prefix}val/{metric}" if of_validation else f"train/{name}"
                if name.startswith("probe_"):
                    tag = name.replace("_", "/", 1)
                writer.add_scalar(tag, value, line["step"])
        writer.flush()

    try:
        yield record
    finally:
        writer.close()
