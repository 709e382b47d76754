"""The directory of a run: its files, and checks on whether it may be used.

model.safetensors   the best weights on validation, or the last without a validation split
config.json         timm's layout, our metadata, and the full configuration of the run
decoder.safetensors weights trained with the model that are not part of it: the decoder of
                    --objective mae, the prediction layer of masked-patch
state/              the state for --resume (train/state.py); removed when the run is finished
state/stopped       exists after a signal has stopped the run, until it is resumed
split.json          the held-out images, if the dataset does not define them
metrics.jsonl       one line per event: training, evaluation
skipped.jsonl       one line per unreadable image
README.md           the model card, and its figures (hub/card.py): curves.png, ...
tensorboard/        the same metrics, with --tensorboard
sweep.json  sweep.png  sweep/   files of a learning-rate sweep (train/sweep.py)
.lock               while a process is using the directory
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vitcli.atomic import cannot_write, write_text
from vitcli.config import DataConfig
from vitcli.data.directory import split_directories
from vitcli.data.files import read_limited
from vitcli.errors import ConfigError, OutputError, RunError, wrap_os_errors
from vitcli.hub.card import FIGURES
from vitcli.train.config import TrainConfig
from vitcli.typed_json import from_json, non_finite_to_none, parse
from vitcli.words import quote


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model = self.path / "model.safetensors"
        self.config = self.path / "config.json"
        self.decoder = self.path / "decoder.safetensors"
        self.states = self.path / "state"
        self.stopped = self.states / "stopped"
        self.split = self.path / "split.json"
        self.metrics = self.path / "metrics.jsonl"
        self.skipped = self.path / "skipped.jsonl"
        self.card = self.path / "README.md"
        self.sweep = self.path / "sweep.json"
        self.sweep_plot = self.path / "sweep.png"
        self.tensorboard = self.path / "tensorboard"
        self._lock = FileLock(self.path / ".lock", timeout=0)
        self._skipped_lock = FileLock(self.path / ".skipped.lock")
        self._skipped_images = set[str | None]()
        self._skipped_bytes = 0  # how much of skipped.jsonl has been read
        self.files = (
            self.model,
            self.decoder,
            self.config,
            self.split,
            self.metrics,
            self.skipped,
            self.card,
            self.sweep,
            self.sweep_plot,
            *(self.path / name for name in FIGURES),
        )

    @property
    def name(self) -> str:
        """The run's name; for a run of a sweep, the sweep's."""
        sweep = self._parent_sweep()
        return self.path.absolute().name if sweep is None else sweep.path.name

    def _parent_sweep(self) -> RunDirectory | None:
        """The directory of the sweep that this run belongs to, if any."""
        path = self.path.absolute()
        parent = RunDirectory(path.parents[1]) if path.parent.name == "sweep" else None
        return parent if parent is not None and parent.sweep.exists() else None

    def is_finished(self) -> bool:
        """Whether the run, or the sweep including its final run, is complete."""
        return self.model.exists() and self.state() is None

    def is_only_begun(self) -> bool:
        """Whether a run ended before its first state was saved. It can be started again here."""
        has_progressed = self.model.exists() or self.sweep.exists() or self.state() is not None
        return self.states.exists() and not has_progressed

    def is_resumable(self) -> bool:
        """Whether the directory contains a state or an unfinished sweep."""
        return self.state() is not None or self._has_unfinished_sweep()

    def _has_unfinished_sweep(self) -> bool:
        return self.sweep.exists() and not self.model.exists()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory against other processes: at once if it exists, else from `start` on.
        The operating system releases the lock however the process ends.

        Raises:
            RunError: another process is using the directory.
            OutputError: the directory is not writable.
        """
        try:
            if self.path.is_dir():
                self._acquire()
            yield
        finally:
            if self._lock.is_locked:
                for name in (".lock", ".skipped.lock"):
                    with contextlib.suppress(OSError):  # Windows does not remove open files
                        (self.path / name).unlink()
                self._lock.release()

    def _acquire(self) -> None:
        if self._lock.is_locked:
            return
        try:
            self._lock.acquire()
        except Timeout as error:
            raise RunError(
                "another process is training in this directory",
                where=self.path,
                hint="wait for it, stop it, or choose another --output",
            ) from error
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", where=self.path) from error

    def check_free(self, force: bool, data: DataConfig) -> None:
        """Raise RunError if this is the directory of the dataset or of one of its splits, or inside
        a split (figures would become its images), or if it has a run and `force` is not set."""
        root, path = Path(data.path).resolve(), self.path.resolve()
        is_local = root.is_dir() and not data.is_remote
        splits = split_directories(root).values() if is_local else ()
        if (is_local and path == root) or any(path.is_relative_to(split) for split in splits):
            raise RunError(
                "the output directory is the dataset's directory or inside it",
                where=self.path,
                hint=f"choose a directory outside it, such as --output {quote(f'{root}-run')}",
            )
        if force or self.is_only_begun():
            return
        if self.is_resumable():
            raise RunError(
                "contains an unfinished run",
                where=self.path,
                hint=f"continue it with --resume {quote(str(self.path))}, or replace it with "
                "--force",
            )
        if existing := [file.name for file in self.files if file.exists()]:
            raise RunError(
                "contains a finished run"
                if self.model.exists()
                else f"already contains {existing[0]}",
                where=self.path,
                hint="choose another --output, or replace it with --force",
            )

    def check_resumable(self, task: str) -> None:
        """Raise RunError if there is nothing to resume, for a run with this `TrainConfig.task`."""
        if self.is_resumable() or self.is_only_begun():
            return
        if self.model.exists():
            options = f"--model {quote(str(self.path))}" + " --keep-head" * (task == "finetune")
            raise RunError(
                "the run is finished; there is nothing to resume",
                where=self.path,
                hint=f"to train it further, start another run with {options}",
            )
        raise RunError(
            "no state to resume from",
            where=self.path,
            hint="pass the directory of an interrupted run",
        )

    def start(self) -> None:
        """Create and lock the directory, or clear it of a previous run.

        Raises:
            RunError: another process is using the directory.
            OutputError: the directory cannot be created or cleared.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self.clear()
            self.states.mkdir()
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def clear(self) -> None:
        """Remove the files that a run writes, and nothing else. The states, which may take long,
        are last: a kill meanwhile leaves a run that is only begun, not one that looks finished."""
        for file in self.states.glob("step-*/progress.json"):
            file.unlink(missing_ok=True)
        if self.sweep.exists():
            shutil.rmtree(self.path / "sweep", ignore_errors=True)
        for file in (*self.files, *self.tensorboard.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)
        self.drop_states()

    def check_exists(self) -> None:
        """Raise OutputError if the directory has been deleted since the run began. Whatever writes
        to it creates it again, but without split.json."""
        if not self.split.is_file():
            raise OutputError("the directory was deleted during the run", where=self.path)

    def state(self) -> Path | None:
        """The newest complete state, if any: progress.json is written last and removed first."""
        complete = [file.parent for file in self.states.glob("step-*/progress.json")]
        return max(complete, key=lambda path: int(path.name[5:]), default=None)

    def keep_state(self, kept: Path | None) -> None:
        """Remove all states, complete or not, except one."""
        for path in self.states.glob("step-*"):
            if path != kept:
                (path / "progress.json").unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)

    def drop_states(self) -> None:
        """Remove all states."""
        self.keep_state(None)
        shutil.rmtree(self.states, ignore_errors=True)

    def read_split(self) -> dict[str, Any] | None:
        """Read split.json; None if it does not exist."""
        if not self.split.is_file():
            return None
        try:
            record: dict[str, Any] = json.loads(self.split.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            hint = "start the run again with --force"
            raise RunError(f"cannot be read: {error}", where=self.split, hint=hint) from error
        return record

    def sweep_split(self) -> dict[str, Any] | None:
        """Read split.json of the sweep that this run belongs to; None if it does not exist."""
        sweep = self._parent_sweep()
        return None if sweep is None else sweep.read_split()

    def write_json(self, path: Path, content: Any) -> None:
        """Write JSON, whole or not at all; in ASCII, as file names may not be valid Unicode."""
        write_text(path, json.dumps(content, indent=2) + "\n")

    def append(self, file: Path, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl or skipped.jsonl."""
        with wrap_os_errors(OutputError, "cannot be written", file), file.open("ab") as stream:
            stream.write(json.dumps(non_finite_to_none(line)).encode() + b"\n")

    def lines(self, file: Path, start: int = 0) -> list[dict[str, Any]]:
        """Parse the lines of such a file from byte `start`, skipping any truncated by a kill."""
        lines = []
        if file.exists():
            with file.open("rb") as stream:
                stream.seek(start)
                for line in stream:
                    with contextlib.suppress(ValueError):
                        lines.append(json.loads(line))
        return lines

    def append_skipped(self, image: str | None, reason: str) -> int:
        """Append an image to skipped.jsonl unless it is already there, and return the number of
        images in the file. All ranks write to it, one at a time."""
        with wrap_os_errors(OutputError, "cannot be written", self.skipped), self._skipped_lock:
            new_lines = self.lines(self.skipped, self._skipped_bytes)
            self._skipped_images |= {line["image"] for line in new_lines}
            if image not in self._skipped_images:
                self.append(self.skipped, {"image": image, "reason": reason})
                self._skipped_images.add(image)
            self._skipped_bytes = self.skipped.stat().st_size
        return len(self._skipped_images)

    def rewind_metrics(self, step: int) -> None:
        """Drop metrics that a killed run logged after its last state: resuming logs them again."""
        kept = [line for line in self.lines(self.metrics) if line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def read_train_config(path: str | Path) -> TrainConfig:
    """Read the configuration from a run's directory or config.json; from the directory of an
    unfinished sweep or a sweep.json, that of the sweep.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    original = path = Path(path)
    if path.is_dir():
        directory = RunDirectory(path)
        path = directory.sweep if directory._has_unfinished_sweep() else directory.config
    hint = "pass a run directory, such as runs/flowers"
    try:
        with open(path, "rb") as file:
            data = parse(b"".join(read_limited(file, path)))
        config: TrainConfig = from_json(TrainConfig, data["vit"]["train"])
        return config
    except FileNotFoundError as error:
        missing = original == path or not original.is_dir()
        no_config = "not a run directory: it has no config.json"
        message = "no such file or directory" if missing else no_config
        raise RunError(message, where=original, hint=hint) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise RunError(message, where=path, hint=hint) from error
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        is_other = isinstance(error, KeyError | TypeError)
        reason = "it contains no training options" if is_other else getattr(error, "what", error)
        message = f"not a run configuration: {reason}"
        raise RunError(message, where=path, hint=hint) from error


def resumed_config(config: TrainConfig) -> TrainConfig:
    """Return the configuration that the run in `config.output` was started with, with the options
    that may change on resume taken from `config`."""
    stored = read_train_config(config.output)
    data = dataclasses.replace(stored.data, path=config.data.path)  # which may have moved
    changes: dict[str, Any] = {"output": config.output, "data": data}
    for field in dataclasses.fields(config):
        if (option := field.metadata.get("option")) is not None and option.on_resume:
            changes[field.name] = getattr(config, field.name)
    return dataclasses.replace(stored, **changes)
