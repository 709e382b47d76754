"""What `vit pretrain` and `vit finetune` share: from options to a run, a run on the screen."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import typer

from vitcli.cli import options, output
from vitcli.cli.training_display import (
    event_text,
    preset_event,
    preset_text,
    show_sweep,
    stored_text,
)
from vitcli.config import (
    TASK_DEFAULTS,
    AugmentConfig,
    DataConfig,
    ModelConfig,
    Preprocess,
    TrainConfig,
)
from vitcli.presets import find_preset

_MAY_CHANGE = ("device", "workers")
"""Options that a resumed run may be given: they do not change what it computes."""
_NOT_CONFIG = ("config", "resume", "force", "offline", "json", "quiet", "debug", "allow_pickle")
_NOT_FIELDS = ("data", "preset")
"""Options that are no field of TrainConfig by that name."""


def build_config(task: Literal["pretrain", "finetune"], given: Mapping[str, Any]) -> TrainConfig:
    """A run from options that were given, over --config, over the task's defaults."""
    from vitcli.train.class_weights import read_class_weights
    from vitcli.train.folder import read_train_config

    base = read_train_config(given["config"]) if given["config"] else None
    given = {k: v for k, v in given.items() if v is not None and k not in _NOT_CONFIG}
    for name in ("data", "classes"):  # a resumed run may be called from elsewhere
        if name in given:
            given[name] = str(Path(given[name]).expanduser().absolute())
    _check_together(task, given, base)
    names = {f.name for f in dataclasses.fields(AugmentConfig)}
    data_names = {"classes", "val_fraction"}
    augment = {k: _augment_value(k, v) for k, v in given.items() if k in names}
    data = {k: v for k, v in given.items() if k in data_names}
    run = {k: v for k, v in given.items() if k not in {*names, *data_names, *_NOT_FIELDS}}
    if "resolution" in run:
        run["resolution"] = options.parse_resolution(run["resolution"])
    if "lr" in run:
        rates = _parse_rates(run["lr"])
        run["lr"], run["sweep"] = (None, rates) if len(rates) > 1 else (rates[0], ())
    if "overrides" in run:
        run["overrides"] = dict(_override(text) for text in run["overrides"])
    if "preprocess" in run:
        run["preprocess"] = dict(_preprocess_value(text) for text in run["preprocess"])
    if "freeze" in run:
        run["freeze"] = _parse_freeze(run["freeze"])
    if "class_weights" in run and run["class_weights"] != "balanced":
        run["class_weights"] = read_class_weights(run["class_weights"])
    if base is None:
        if "data" not in given:
            raise typer.BadParameter("say what to learn from", param_hint="--data")
        run.setdefault("output", f"runs/{_name_of(given['data'])}")
        if "preset" in given:
            recipe, parts = find_preset(given["preset"]).fields()
            if "steps" in given or "epochs" in given:  # another length, another warm-up
                del recipe["steps"], recipe["warmup"]
            run, data = {**recipe, **run}, {**parts, **data}
        return TrainConfig(
            data=DataConfig(given["data"], **data),
            task=task,
            augment=AugmentConfig(**augment),
            **{**TASK_DEFAULTS[task], **run},
        )
    path = {"path": given["data"]} if "data" in given else {}
    if "epochs" in run:
        run["steps"] = None  # the written one was reckoned from other epochs
    if "batch_size" in run:
        run.setdefault("accumulate", None)  # the written one may not divide it
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **path, **data),
        augment=dataclasses.replace(base.augment, **augment),
        **run,
    )


def _check_together(task: str, given: Mapping[str, Any], base: TrainConfig | None) -> None:
    """Raises BadParameter for options that contradict each other or the --config."""
    if "steps" in given and "epochs" in given:
        raise typer.BadParameter("give --steps or --epochs, not both")
    if "model" in given and ("variant" in given or "overrides" in given):
        raise typer.BadParameter("--model brings its architecture: leave --variant and --set out")
    if base is not None and "preset" in given:
        raise typer.BadParameter("--config and --preset both say how to train: give one")
    if base is not None and base.task != task:
        raise typer.BadParameter(f"this is the configuration of a {base.task}: vit {base.task}")
    if base is not None and "output" not in given:
        raise typer.BadParameter("say where the new run goes", param_hint="--output")


def _augment_value(name: str, value: Any) -> Any:
    if name == "crop_area":
        return _parse_pair(value, float)
    return _parse_pair(value, int) if name == "randaugment" else value


def _override(text: str) -> tuple[str, Any]:
    """ "depth=6" as ("depth", 6); the type is that of the field of ModelConfig."""
    key, separator, value = text.partition("=")
    kinds = {f.name: str(f.type) for f in dataclasses.fields(ModelConfig)}
    del kinds["stem"]  # the variant says it
    if not separator or key not in kinds:
        raise typer.BadParameter(f"'{text}' is not KEY=VALUE with a KEY of {', '.join(kinds)}")
    try:
        if kinds[key] == "Size":
            return key, options.parse_resolution(value)
        if kinds[key] == "bool":
            return key, {"true": True, "false": False}[value.lower()]
        return key, {"int": int, "float": float}.get(kinds[key], str)(value)
    except (ValueError, KeyError) as error:
        raise typer.BadParameter(f"'{value}' is not a value of {key}") from error


def _preprocess_value(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    known = {f.name for f in dataclasses.fields(Preprocess)} - {"size"}
    if not separator or key not in known:
        raise typer.BadParameter(
            f"'{text}' is not KEY=VALUE with a KEY of {', '.join(sorted(known))}"
        )
    try:
        if key in ("mean", "std"):
            red, green, blue = (float(part) for part in value.split(","))
            return key, (red, green, blue)
        return key, float(value) if key == "crop_pct" else value
    except ValueError as error:
        raise typer.BadParameter(f"'{value}' is not a value of {key}") from error


def _parse_rates(text: str) -> tuple[float, ...]:
    """ "0.01" or "0.003,0.01,0.03" as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(
            f"'{text}' is not a learning rate, or several such as 0.003,0.01,0.03",
            param_hint="--lr",
        ) from error


def _name_of(path: str) -> str:
    """A run's name from its data's: flowers from /data/flowers, train from train-{0..9}.tar."""
    return Path(path).name.split("{")[0].split(".")[0].strip("-_") or "run"


def run_training(task: Literal["pretrain", "finetune"], given: Mapping[str, Any]) -> None:
    """Runs a training command: the plan, the progress, the result, and what to type next."""
    config = _config_to_run(task, given)
    resume, quiet, json = given["resume"], given["quiet"], given["json"]
    if given.get("preset"):
        event = preset_event(given, config)
        output.json_line(event) if json else output.note(preset_text(event), quiet)
    from vitcli.train.loop import train
    from vitcli.train.sweep import run_sweep

    with output.TrainingDisplay(quiet) as display, _resume_told(task, config.output):

        def show(event: dict[str, Any]) -> None:
            if event["event"] == "progress":
                display.count(event["what"], event["done"], event["total"])
                return
            if json:
                output.json_line(event)
            if event["event"] == "train":
                display(event)
            elif event["event"] == "warning":
                output.warning(event["text"])
            elif event["event"] == "trial":
                display.close()  # the bar of the run before is full
                display.note(str(event_text(event)))
            elif event["event"] == "choice" and not json:
                display.close()
                show_sweep(event, quiet)
            elif text := event_text(event):
                display.note(text)

        outcome = (run_sweep if config.sweep else train)(
            config,
            resume=bool(resume),
            force=given["force"],
            offline=given["offline"],
            allow_pickle=given["allow_pickle"],
            on_event=show,
        )
    where = shlex.quote(str(outcome.folder.path))
    if outcome.stopped_by is not None:
        output.note(f"stopped at step {outcome.step}; go on with: vit {task} --resume {where}")
        raise typer.Exit(128 + outcome.stopped_by)
    if json:
        stored = {"stored_step": outcome.stored_step, "stored_average": outcome.stored_averaged}
        result = {"event": "result", "folder": str(outcome.folder.path), "steps": outcome.step}
        output.json_line({**result, **stored, **outcome.figures})
        return
    for part in ("val", "test"):
        if told := output.figures(outcome.figures, f"{part}_"):
            output.line(f"{part}: {', '.join(told)}")
    output.line(f"model: {outcome.folder.path}")
    output.note(stored_text(outcome))
    output.note(f"next: vit predict IMAGE --model {where}")


@contextlib.contextmanager
def _resume_told(task: str, folder: str) -> Iterator[None]:
    """Says how to go on where Ctrl-C or SIGTERM came while no step could be ended first, after a
    image that cannot be read, and once the disk is full."""
    from vitcli.errors import ImageError, OutputError, RunError, VitError
    from vitcli.train.folder import RunFolder

    try:
        yield
    except (KeyboardInterrupt, SystemExit, ImageError, OutputError) as end:
        with contextlib.suppress(RunError):
            RunFolder(folder).check_resumable()
            told = f"stopped; go on with: vit {task} --resume {shlex.quote(folder)}"
            # Of an error, the boundary says first what it is.
            end.add_note(told) if isinstance(end, VitError) else output.note(told)
        raise


def _config_to_run(task: Literal["pretrain", "finetune"], given: Mapping[str, Any]) -> TrainConfig:
    """The run that the options ask for, or the one that is to be resumed."""
    from vitcli.train.folder import read_train_config

    resume = given["resume"]
    if not resume:
        config = build_config(task, given)
        if given["retrain"] is not None and not config.sweep:
            raise typer.BadParameter(
                "--retrain and --no-retrain say what follows a sweep: give --lr several rates"
            )
        return dataclasses.replace(config, command=shlex.join(["vit", *sys.argv[1:]]))
    others = {k for k, v in given.items() if v is not None and k not in _NOT_CONFIG}
    if others - set(_MAY_CHANGE):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
        raise typer.BadParameter(f"a run is resumed as it was; leave out {names}")
    changes = {name: given[name] for name in others}
    return dataclasses.replace(read_train_config(resume), output=resume, **changes)


def _parse_freeze(text: str) -> int | str:
    if text == "backbone" or text.isdecimal():
        return int(text) if text.isdecimal() else text
    raise typer.BadParameter(f"'{text}' is not backbone or a number of blocks")


def _parse_pair(text: str, kind: type) -> tuple[Any, Any]:
    try:
        first, second = (kind(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"'{text}' is not two numbers such as 2,10") from error
    return first, second
