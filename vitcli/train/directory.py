"""A run's folder: what is in it, and when it may be used.

model.safetensors   the best weights on validation if there is one, else the last
config.json         timm's layout, our description, and the run's whole configuration
state.safetensors   what --resume needs, from step 0 on; gone when the run is finished
split.json          which files are held out, where the data does not say
metrics.jsonl       one line an event: training, evaluation
curves.png  confusion.png  reliability.png  README.md
tensorboard/   the same figures, where they are asked for
sweep.json  sweep.png  sweep/   of a sweep over learning rates (train/sweep.py)
.lock               while a process runs there
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from vitcli.atomic import whole_file
from vitcli.errors import ConfigError, OutputError, RunError
from vitcli.train.lock import RunLock
from vitcli.train_config import TrainConfig
from vitcli.typed_json import from_json


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.model = self.path / "model.safetensors"
        self.config = self.path / "config.json"
        self.state = self.path / "state.safetensors"
        self.split = self.path / "split.json"
        self.metrics = self.path / "metrics.jsonl"
        self.curves = self.path / "curves.png"
        self.confusion = self.path / "confusion.png"
        self.reliability = self.path / "reliability.png"
        self.card = self.path / "README.md"
        self.sweep = self.path / "sweep.json"
        self.sweep_image = self.path / "sweep.png"
        self.tensorboard = self.path / "tensorboard"
        self.lock = RunLock(self.path / ".lock")
        self.files = (
            *(self.model, self.config, self.state, self.split, self.metrics),
            *(self.curves, self.confusion, self.reliability, self.card),
            *(self.sweep, self.sweep_image),
        )

    @property
    def name(self) -> str:
        """What the run is called; a run of a sweep is called as the sweep is."""
        path = self.path.absolute()
        if path.parent.name == "sweep" and (path.parents[1] / self.sweep.name).exists():
            return path.parents[1].name
        return path.name

    def trial(self, name: str) -> RunDirectory:
        """The folder of one run of a sweep."""
        return RunDirectory(self.path / "sweep" / name)

    def is_finished(self) -> bool:
        """Whether a run, or a sweep and what follows it, came to its end here."""
        return self.model.exists() and not self.state.exists()

    def check_free(self, force: bool, data: str) -> None:
        """Raises RunError where the folder is that of the data, or holds a run and `force` is not
        set."""
        if self.path.resolve() == Path(data).resolve():
            raise RunError("is the data's folder", where=self.path, hint="choose another --output")
        if (self.state.exists() or self._holds_a_sweep()) and not force:
            raise RunError(
                "holds an unfinished run",
                where=self.path,
                hint=f"go on with --resume {self.path}, or start anew with --force",
            )
        taken = [file.name for file in self.files if file.exists()]
        if taken and not force:
            raise RunError(
                "holds a finished run" if self.model.exists() else f"already holds {taken[0]}",
                where=self.path,
                hint="choose another --output, or replace it with --force",
            )

    def start(self) -> None:
        """Makes the folder, or clears a former run out of it, and locks it.

        Raises:
            RunError: another process has it.
            OutputError: it cannot be made or cleared.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.take()
            self.clear()
        except OSError as error:
            raise OutputError(
                f"cannot be used as a run's folder: {error.strerror}", where=self.path
            ) from error

    def clear(self) -> None:
        """Removes what a run writes, and nothing else."""
        if self.sweep.exists():
            shutil.rmtree(self.path / "sweep", ignore_errors=True)
        for file in (*self.files, *self.tensorboard.glob("events.out.tfevents.*")):
            file.unlink(missing_ok=True)

    def check_resumable(self) -> None:
        """Raises RunError where there is nothing to go on with."""
        if self.state.exists() or self._holds_a_sweep():
            return
        if self.model.exists():
            raise RunError("holds a finished run; there is nothing to resume", where=self.path)
        raise RunError(
            "holds no state to resume",
            where=self.path,
            hint="give the folder that an interrupted run wrote to",
        )

    def _holds_a_sweep(self) -> bool:
        """Whether a sweep was begun here and did not come to its end."""
        return self.sweep.exists() and not self.model.exists()

    def read_split(self) -> dict[str, Any] | None:
        """split.json, or None where there is none."""
        return json.loads(self.split.read_text(encoding="utf-8")) if self.split.exists() else None

    def write_json(self, path: Path, content: Any) -> None:
        """Writes JSON, whole or not at all; in ASCII, as a file's name may be no text."""
        with whole_file(path) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds one line to metrics.jsonl."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror}", where=self.metrics) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a line that a kill cut short is left out."""
        if not self.metrics.exists():
            return []
        lines = []
        for text in self.metrics.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
        return lines

    def rewind_metrics(self, step: int) -> None:
        """Drops what a killed run wrote after its last state: a resumed run writes it again."""
        kept = [line for line in self.read_metrics() if line["step"] <= step]
        with whole_file(self.metrics) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())


def config_to_json(config: TrainConfig) -> dict[str, Any]:
    """A run's whole configuration as JSON values."""
    return dataclasses.asdict(config)


def read_train_config(path: str | Path, kind: type[TrainConfig] = TrainConfig) -> TrainConfig:
    """The run's configuration from a config.json that a run wrote, or from its folder; of a sweep
    that is not finished, or a sweep.json, the sweep's.

    Raises:
        RunError: there is none, or it does not hold one.
    """
    path = Path(path)
    if path.is_dir():
        folder = RunDirectory(path)
        path = folder.sweep if folder._holds_a_sweep() else folder.config
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        config: TrainConfig = from_json(kind, data["vit"]["train"])
        return config
    except OSError as error:
        raise RunError(
            f"cannot be read: {error.strerror}",
            where=path,
            hint="give the folder that a run wrote to, or its config.json",
        ) from error
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise RunError(f"holds no configuration of a run ({error})", where=path) from error
