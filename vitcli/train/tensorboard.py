"""The figures of a run for TensorBoard: scalars under RUN/tensorboard."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitcli.errors import MissingExtraError

_NO_SCALARS = ("event", "step", "steps", "eta")


def require_tensorboard() -> None:
    """Raises MissingExtraError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingExtraError("tensorboard", "tensorboard", "--tensorboard")


@contextmanager
def scalar_log(
    folder: Path, step: int, wanted: bool
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Gives a function that writes a line of metrics.jsonl as scalars, each line at once.

    Args:
        folder: where the event files are; those of a run that is resumed stay.
        step: the last one taken: what was written for later ones before a kill is void.
        wanted: otherwise nothing is written.
    """
    if not wanted:
        yield lambda line: None
        return
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def record(line: Mapping[str, Any]) -> None:
        for name, value in line.items():
            if name not in _NO_SCALARS and isinstance(value, int | float):
                part, is_of_validation, figure = name.rpartition("val_")
                tag = f"{part}val/{figure}" if is_of_validation else f"train/{name}"
                writer.add_scalar(tag, value, line["step"])
        writer.flush()

    try:
        yield record
    finally:
        writer.close()
