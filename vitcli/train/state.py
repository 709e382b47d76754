"""The state of a run, from which it resumes exactly where it stopped.

    RUN/state/step-120/shard-00001-....safetensors   one or more of each rank
                       progress.json                 progress of the run, and the environment that
                                                     bitwise reproducibility depends on; written
                                                     last, so that it marks a complete state

torch.distributed.checkpoint writes the state in the background, each rank its own part, and loads
it on any number of ranks, sharded (FSDP2) or not. Its default format is a pickle, which could
contain code, so its safetensors storage is used. Data loading needs no state: every batch is a
function of the step.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast
from warnings import filterwarnings

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.errors import CheckpointError, DivergedError, OutputError, RunError
from vitcli.machine import is_launched
from vitcli.train.directory import RunDirectory
from vitcli.train.events import Caution
from vitcli.train.run import Progress, Run

# A single process has no group. A global filter, as the warning is issued in a thread of torch.
filterwarnings("ignore", message="torch.distributed is disabled")

SAVE_SECONDS = 60.0
"""Minimum seconds between states, unless --save-every is set."""
SAVE_SHARE = 0.05
"""Largest fraction of the time that a run may wait for states, unless --save-every is set."""


class Saver:
    """Writes the states of a run in the background, one at a time."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._saved_at, self._save_time = time.monotonic(), 0.0
        self._writing: Future[Any] | None = None
        self._path: Path
        self._progress: dict[str, Any]

    def is_due(self, step: int) -> bool:
        """Whether a state is due: often enough to lose little, rarely enough to cost little."""
        if self.run.config.save_every:
            return step % self.run.config.save_every == 0
        return time.monotonic() - self._saved_at > max(SAVE_SECONDS, self._save_time / SAVE_SHARE)

    def start(self) -> None:
        """Copy the current state, and write the copy in a thread; a collective operation."""
        started, run = time.monotonic(), self.run
        self.finish()
        self._path = run.directory.states / f"step-{run.progress.step}"
        self._progress = {
            "progress": dict(vars(run.progress)),
            "scaler": run.scaler.state_dict(),
            "model": run.info.to_metadata(),
            **_environment(run),
        }
        if run.ranks.is_first:
            run.directory.keep_state(run.directory.state())
        run.ranks.barrier()
        writer = HuggingFaceStorageWriter(str(self._path), save_distributed=True)
        group = run.ranks.background
        saving = async_save(_state_tensors(run), storage_writer=writer, process_group=group)
        self._writing = cast("Future[Any]", saving)
        self._saved_at = time.monotonic()
        self._save_time = self._saved_at - started

    def poll(self) -> None:
        """Call `finish` if the state has been written."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Call `finish` if a run ends early, unless it would wait for ranks that are gone. A loss
        diverges on all ranks, and a sweep continues afterwards."""
        can_wait = self.run.ranks.world_size == 1 or error_type is DivergedError
        if can_wait or (self._writing is not None and self._writing.done()):
            with contextlib.suppress(OutputError):
                self.finish()

    def finish(self) -> None:
        """Wait for the state that is being written, which becomes the one to resume from.

        Raises:
            OutputError: the state could not be written; the previous one is kept.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
            if self.run.ranks.is_first:
                self.run.directory.check_exists()
                self.run.directory.write_json(self._path / "progress.json", self._progress)
                self.run.directory.keep_state(self._path)
        except (CheckpointException, OSError) as error:
            cause = _cause(error)
            reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
            raise OutputError(f"cannot be written: {reason}", where=self._path.parent) from error


def read_state_info(directory: RunDirectory) -> CheckpointInfo:
    """Read the metadata of a state's model: a resumed run needs no other checkpoint.

    Raises:
        RunError: the state is damaged.
    """
    with _open_newest(directory) as (path, record):
        info = CheckpointInfo.from_metadata(record["model"], where=path)
        if info is None:
            raise CheckpointError("it has no description of the model")
        return info


def load_state(run: Run) -> None:
    """Load a run's objective, average, optimizer, scaler and progress in place, restore torch's
    random generators, and warn of changes that may make results differ from an uninterrupted run.

    Raises:
        RunError: the state is damaged or belongs to another model.
    """
    with _open_newest(run.directory) as (path, record):
        reader = HuggingFaceStorageReader(str(path))
        saved = reader.read_metadata().state_dict_metadata
        _allocate_slots(run, saved)
        tensors = {k: v for k, v in _state_tensors(run).items() if k in saved or k[:4] != "rng."}
        load(tensors, storage_reader=reader, process_group=run.ranks.control)
        run.scaler.load_state_dict(record["scaler"])
        run.progress = Progress(**record["progress"])
        recorded = {name: record[name] for name in _environment(run)}
    for key, value in tensors.items():
        if key == f"rng.{run.ranks.rank}.cpu":
            torch.set_rng_state(value)
        elif key == f"rng.{run.ranks.rank}.{run.device.type}":
            torch.get_device_module(run.device).set_rng_state(value, run.device)
    for name, current in _environment(run).items():
        if recorded[name] != current:
            diff = f"{name} was {recorded[name]} and is now {current}"
            run.on_event(Caution(f"results may differ from those of an uninterrupted run: {diff}"))


@contextlib.contextmanager
def _open_newest(directory: RunDirectory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the newest state and its progress.json. Raises RunError if there is none, or if the
    body raises an error, which means that the state is damaged, unless it is a signal or a lost
    rank."""
    path = directory.state()
    if path is None:
        raise RunError("no state to resume from", where=directory.path)
    try:
        yield path, json.loads((path / "progress.json").read_text(encoding="utf-8"))
    except (Exception, CheckpointException) as error:
        cause = _cause(error)
        if isinstance(cause, KeyboardInterrupt | SystemExit):
            raise cause from None
        if is_launched() and isinstance(error, RuntimeError):  # own errors of a rank are wrapped
            raise
        first_line = str(cause).partition("\n")[0]
        raise RunError(
            f"the state cannot be resumed ({type(cause).__name__}: {first_line})",
            where=path,
            hint="start the run again from the beginning with --force",
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What a rank raised, if torch.distributed.checkpoint wrapped it (it also wraps signals)."""
    causes = error.failures.values() if isinstance(error, CheckpointException) else [error]
    return next((c[0] if isinstance(c, tuple) else c for c in causes), error)


def _state_tensors(run: Run) -> dict[str, Tensor]:
    """Return all tensors of the state by name; only the states of random generators are copies."""
    tensors: dict[str, Tensor] = dict(run.objective.state_dict())
    if run.averaged is not None:
        tensors |= {f"average.{k}": v for k, v in run.averaged.state_dict().items()}
    for name, parameter in run.objective.named_parameters():
        for slot, value in run.optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"optimizer.{slot}.{name}"] = torch.as_tensor(value)
    tensors[f"rng.{run.ranks.rank}.cpu"] = torch.get_rng_state()
    if run.device.type != "cpu":
        device = torch.get_device_module(run.device)
        tensors[f"rng.{run.ranks.rank}.{run.device.type}"] = device.get_rng_state(run.device)
    return tensors


def _allocate_slots(run: Run, saved: Mapping[str, Any]) -> None:
    """Allocate the optimizer's state of each parameter, which does not exist before its first step.
    State with the shape of the parameter is sharded like the parameter."""
    parameters = dict(run.objective.named_parameters())
    for key, entry in saved.items():
        if key.startswith("optimizer."):
            shape = entry.size
            slot, name = key.removeprefix("optimizer.").split(".", 1)
            p = parameters[name]
            # A fused optimizer keeps its step counts on the device (torch/optim/adam.py).
            zeros = torch.zeros_like(p) if shape == p.shape else torch.zeros(shape, device=p.device)
            run.optimizer.state[p][slot] = zeros


def _environment(run: Run) -> dict[str, Any]:
    """Return what bitwise reproducibility depends on, apart from the configuration."""
    return {
        "precision": run.precision,
        "device": run.device.type,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.world_size,
    }
