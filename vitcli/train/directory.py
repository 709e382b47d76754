"""A run's directory: what is in it, and when it may be used.

model.safetensors   the best weights on validation, or the last without a validation split
config.json         timm's layout, our description, and the run's whole configuration
decoder.safetensors beside it, what was trained with it and is no part of it: the decoder of
                    --objective mae, the prediction layer of masked-patch
state/              what --resume needs (train/state.py); gone when the run is finished
split.json          which images are held out, if the data does not say
metrics.jsonl       one line per event: training, evaluation
skipped.jsonl       one line per image that cannot be read
README.md           the model card, and its figures (hub/card.py): curves.png, ...
tensorboard/        the same metrics, with --tensorboard
sweep.json  sweep.png  sweep/   of a sweep over learning rates (train/sweep.py)
.lock               while a process runs there
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vitcli.atomic import cannot_write, write_text
from vitcli.config import DataConfig
from vitcli.data.directory import split_directories
from vitcli.data.files import open_file
from vitcli.errors import ConfigError, OutputError, RunError, failing_as
from vitcli.hub.card import FIGURES
from vitcli.train_config import TrainConfig
from vitcli.typed_json import finite, from_json, parse

UNFINISHED = ".unfinished"
"""Suffix of a state that is being written."""


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model = self.path / "model.safetensors"
        self.config = self.path / "config.json"
        self.decoder = self.path / "decoder.safetensors"
        self.states = self.path / "state"
        self.split = self.path / "split.json"
        self.metrics = self.path / "metrics.jsonl"
        self.skipped = self.path / "skipped.jsonl"
        self.card = self.path / "README.md"
        self.sweep = self.path / "sweep.json"
        self.sweep_plot = self.path / "sweep.png"
        self.tensorboard = self.path / "tensorboard"
        self._launch = self.states / "launch"
        self._lock = FileLock(self.path / ".lock", timeout=0)
        self._skipped_lock = FileLock(self.path / ".skipped.lock")
        self._skipped_images = set[str | None]()
        self._skipped_bytes = 0  # of skipped.jsonl, of which those images were read
        self.files = (
            *(self.model, self.decoder, self.config, self.split, self.metrics, self.skipped),
            *(self.card, self.sweep, self.sweep_plot),
            *(self.path / name for name in FIGURES),
        )

    @property
    def name(self) -> str:
        """The run's name; the runs of a sweep have the sweep's."""
        sweep = self._sweep_above()
        return self.path.absolute().name if sweep is None else sweep.path.name

    def _sweep_above(self) -> RunDirectory | None:
        """The directory of the sweep that the run belongs to, if any."""
        path = self.path.absolute()
        above = RunDirectory(path.parents[1]) if path.parent.name == "sweep" else None
        return above if above is not None and above.sweep.exists() else None

    def is_finished(self) -> bool:
        """Whether a run, or a sweep and its last run, is complete."""
        return self.model.exists() and self.state() is None

    def _holds_a_sweep(self) -> bool:
        """Whether there is a sweep that is not complete."""
        return self.sweep.exists() and not self.model.exists()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes out: from now on if the directory exists, else from `start` on.
        The system releases the lock when the process ends, however it ends.

        Raises:
            RunError: another process is using the directory.
            OutputError: it cannot be written to.
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
        """Raises RunError if this is the directory of the dataset, or where its figures would be
        images of another class, or if it holds a run and `force` is not set."""
        root, path = Path(os.path.expanduser(data.path)).resolve(), self.path.resolve()
        local = root.is_dir() and not data.is_remote
        places = split_directories(root).values() if local else ()
        if (local and path == root) or any(path.is_relative_to(place) for place in places):
            raise RunError(
                "the output directory is the dataset's directory or inside it",
                where=self.path,
                hint=f"choose a directory outside it, such as --output {root}-run",
            )
        if force:
            return
        if self.state() is not None or self._holds_a_sweep():
            raise RunError(
                "contains an unfinished run",
                where=self.path,
                hint=f"continue it with --resume {self.path}, or replace it with --force",
            )
        if taken := [file.name for file in self.files if file.exists()]:
            raise RunError(
                "contains a finished run"
                if self.model.exists()
                else f"already contains {taken[0]}",
                where=self.path,
                hint="choose another --output, or replace it with --force",
            )

    def is_begun_by(self, launch: str) -> bool:
        """Whether the run, which is not finished, was started by this launch."""
        return self._launch.exists() and self._launch.read_text() == launch

    def check_resumable(self) -> None:
        """Raises RunError if there is nothing to resume."""
        if self.state() is not None or self._holds_a_sweep():
            return
        if self.model.exists():
            raise RunError("the run is finished; there is nothing to resume", where=self.path)
        raise RunError(
            "no state to resume from",
            where=self.path,
            hint="pass the directory of an interrupted run",
        )

    def start(self, launch: str = "") -> None:
        """Makes and locks the directory, or clears a former run out of it.

        Args:
            launch: the launch that the run belongs to (`distributed.launch_id`).

        Raises:
            RunError: another process is using it.
            OutputError: it cannot be made or cleared.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self.clear()
            if launch:
                self.states.mkdir(exist_ok=True)
                self._launch.write_text(launch)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def clear(self) -> None:
        """Removes what a run writes, and nothing else."""
        self.drop_states()
        if self.sweep.exists():
            shutil.rmtree(self.path / "sweep", ignore_errors=True)
        for file in (*self.files, *self.tensorboard.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)

    def state(self) -> Path | None:
        """The newest state that is complete."""
        complete = [file.parent for file in self.states.glob("step-*[0-9]/progress.json")]
        return max(complete, key=lambda path: int(path.name[5:]), default=None)

    def new_state(self, step: int) -> Path:
        """Where the state after a step is written; `keep_state` ends it."""
        return self.states / f"step-{step}{UNFINISHED}"

    def keep_state(self, path: Path) -> None:
        """Makes a state that is written the one to resume from."""
        path.rename(path.with_suffix(""))
        for other in self.states.glob("step-*"):
            if other.name != path.stem:
                shutil.rmtree(other, ignore_errors=True)

    def drop_states(self, unfinished: bool = False) -> None:
        """Removes all states, or those only that were never finished."""
        if unfinished:
            for path in self.states.glob(f"*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)
        else:
            shutil.rmtree(self.states, ignore_errors=True)

    def read_split(self) -> dict[str, Any] | None:
        """split.json, or None if there is none."""
        if not self.split.exists():
            return None
        try:
            record: dict[str, Any] = json.loads(self.split.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            hint = "start the run again with --force"
            raise RunError(f"cannot be read: {error}", where=self.split, hint=hint) from error
        return record

    def sweep_split(self) -> dict[str, Any] | None:
        """The split.json of the sweep that the run belongs to, or None if there is none."""
        sweep = self._sweep_above()
        return None if sweep is None else sweep.read_split()

    def write_json(self, path: Path, content: Any) -> None:
        """Writes JSON, whole or not at all; in ASCII, as a file's name may not be valid text."""
        write_text(path, json.dumps(content, indent=2) + "\n")

    def append(self, file: Path, line: dict[str, Any]) -> None:
        """Adds one line to metrics.jsonl or skipped.jsonl."""
        with failing_as(OutputError, "cannot be written", file), file.open("ab") as opened:
            opened.write(json.dumps(finite(line)).encode() + b"\n")

    def lines(self, file: Path, start: int = 0) -> list[dict[str, Any]]:
        """The lines of such a file from a byte on, without one that a kill cut short."""
        lines = []
        if file.exists():
            with file.open("rb") as opened:
                opened.seek(start)
                for text in opened:
                    with contextlib.suppress(ValueError):
                        lines.append(json.loads(text))
        return lines

    def append_skipped(self, where: str | None, what: str) -> int:
        """Adds a line to skipped.jsonl, unless it has the image, and returns the number of images
        in it. Ranks, which all write to it, take turns."""
        with failing_as(OutputError, "cannot be written", self.skipped), self._skipped_lock:
            others = self.lines(self.skipped, self._skipped_bytes)
            self._skipped_images |= {line["image"] for line in others}
            if where not in self._skipped_images:
                self.append(self.skipped, {"image": where, "reason": what})
                self._skipped_images.add(where)
            self._skipped_bytes = self.skipped.stat().st_size
        return len(self._skipped_images)

    def rewind_metrics(self, step: int) -> None:
        """Drops what a killed run wrote after its last state: a resumed run writes it again."""
        kept = [line for line in self.lines(self.metrics) if line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in kept))


def read_train_config(path: str | Path) -> TrainConfig:
    """The configuration in a run's directory or its config.json; of an unfinished sweep or a
    sweep.json, the sweep's.

    Raises:
        RunError: there is none.
    """
    given = path = Path(path)
    if path.is_dir():
        directory = RunDirectory(path)
        path = directory.sweep if directory._holds_a_sweep() else directory.config
    hint = "pass the directory of a run, such as runs/flowers"
    try:
        with open_file(path) as file:
            data = parse(file.read())
        config: TrainConfig = from_json(TrainConfig, data["vit"]["train"])
        return config
    except FileNotFoundError as error:
        missing = given == path or not given.is_dir()
        what = "no such file or directory" if missing else "not a run: it has no config.json"
        raise RunError(what, where=given, hint=hint) from error
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise RunError(what, where=path, hint=hint) from error
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        what = f"not the configuration of a run: {reason}"
        raise RunError(what, where=path, hint=hint) from error


def continued(config: TrainConfig) -> TrainConfig:
    """The configuration that the run in `config.output` was started with; what a resumed run may
    change is taken from `config`."""
    changes: dict[str, Any] = {"output": config.output}
    for field in dataclasses.fields(config):
        if (option := field.metadata.get("option")) is not None and option.on_resume:
            changes[field.name] = getattr(config, field.name)
    return dataclasses.replace(read_train_config(config.output), **changes)
