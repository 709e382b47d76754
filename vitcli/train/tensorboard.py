"""Metrics of a run for TensorBoard: scalars in RUN/tensorboard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vitcli.train.events import Event

_NO_SCALARS = ("event", "step", "steps", "eta")


@contextmanager
def scalar_log(directory: Path, step: int, enabled: bool) -> Iterator[Callable[[Event], None]]:
    """Yield a function that writes an event's numbers as scalars, and flushes them.

    Args:
        directory: the directory of the event files; those of a resumed run are kept.
        step: the last completed step; scalars of later steps, written before a kill, are purged.
        enabled: whether anything is written.
    """
    if not enabled:
        yield lambda event: None
        return
    from torch.utils.tensorboard import SummaryWriter  # takes seconds

    writer = SummaryWriter(str(directory), purge_step=step + 1 if step else 0)

    def record(event: Event) -> None:
        fields = event.to_json()
        for name, value in fields.items():
            if name not in _NO_SCALARS and isinstance(value, int | float):
                prefix, is_val, metric = name.rpartition("val_")
                tag = f"{prefix}val/{metric}" if is_val else f"train/{name}"
                if name.startswith("probe_"):
                    tag = name.replace("_", "/", 1)
                writer.add_scalar(tag, value, fields["step"])
        writer.flush()

    try:
        yield record
    finally:
        writer.close()
