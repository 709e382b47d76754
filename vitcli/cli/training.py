"""What `vit pretrain` and `vit finetune` share: from options to a run, a run on the screen."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitcli.cli import options, output
from vitcli.cli.training_display import Screen, preset_event, preset_text, stored_text
from vitcli.config import TASK_DEFAULTS
from vitcli.presets import PRESETS, PresetName
from vitcli.train_config import RECIPE, RUN, TrainConfig

Task = Literal["pretrain", "finetune"]


def training_command(task: Task, text: str, kind: type[TrainConfig] = TrainConfig) -> Any:
    """A training command, with an option for each field of its configuration.

    Args:
        text: what `--help` says.
        kind: the configuration.
    """

    @options.from_fields(kind, task, without=() if task == "finetune" else ("preset",))
    def command(
        given: dict[str, Any],
        preset: Annotated[
            PresetName | None,
            typer.Option(
                help="Use the paper's fine-tuning recipe for this dataset; other options "
                "override it.",
                rich_help_panel=RECIPE,
            ),
        ] = None,
        config: Annotated[
            str | None,
            typer.Option(
                metavar="FILE",
                help="Repeat the run described by a config.json; other options override it.",
                rich_help_panel=RUN,
            ),
        ] = None,
        resume: Annotated[
            str | None,
            typer.Option(
                metavar="DIR",
                help="Continue the interrupted run in this directory.",
                rich_help_panel=RUN,
            ),
        ] = None,
        force: Annotated[
            bool,
            typer.Option(
                "--force", help="Replace the run in the output directory.", rich_help_panel=RUN
            ),
        ] = False,
        json: options.Json = False,
        offline: options.Offline = False,
        allow_pickle: options.AllowPickle = False,
        quiet: options.Quiet = False,
        debug: options.Debug = False,
    ) -> None:
        if resume:
            others = [k for k, v in (("--config", config), ("--preset", preset)) if v]
            built = _resumed(resume, given, others, kind)
        else:
            built = build_config(task, given, preset, config, kind)
            built = dataclasses.replace(built, command=shlex.join(["vit", *sys.argv[1:]]))
        if preset is not None:
            event = preset_event(preset, given, built)
            output.json_line(event) if json else output.note(preset_text(event), quiet)
        _run(built, resume is not None, force, offline, allow_pickle, json, quiet)

    command.__doc__ = text
    return command


def build_config(
    task: Task,
    given: Mapping[str, Any],
    preset: PresetName | None = None,
    config: str | None = None,
    kind: type[TrainConfig] = TrainConfig,
) -> TrainConfig:
    """A run from the options that were given (as `options.from_fields` gives them), over --config
    or --preset, over the task's defaults."""
    from vitcli.train.class_weights import read_class_weights
    from vitcli.train.directory import read_train_config

    if "steps" in given and "epochs" in given:
        raise typer.BadParameter("--steps and --epochs cannot be combined")
    if "model" in given and ("variant" in given or "overrides" in given):
        raise typer.BadParameter(
            "--model already determines the architecture: leave out --variant and --set"
        )
    fields = dict(given)
    if "lr" in given:
        rates = given["lr"]
        fields["lr"], fields["sweep"] = (None, rates) if len(rates) > 1 else (rates[0], ())
    if fields.get("class_weights", "balanced") != "balanced":
        fields["class_weights"] = read_class_weights(fields["class_weights"])
    start: Any = kind
    if config is not None:
        start = read_train_config(config, kind)
        if preset is not None:
            raise typer.BadParameter("--config and --preset cannot be combined")
        if start.task != task:
            raise typer.BadParameter(
                f"'{config}' describes a {start.task} run: use `vit {start.task}`"
            )
        if "output" not in given:
            raise typer.BadParameter(
                "missing; pass a directory for the new run", param_hint="--output"
            )
        if "epochs" in given:
            fields["steps"] = None  # the written one was computed from other epochs
        if "batch_size" in given:
            fields.setdefault("accumulate", None)  # the written one may not divide it
    else:
        data = given.get("data", {})
        if "path" not in data:
            raise typer.BadParameter("missing; pass a dataset to train on", param_hint="--data")
        recipe: dict[str, Any] = PRESETS[preset].fields() if preset else {}
        if "steps" in given or "epochs" in given:  # another length, another warm-up
            recipe = {k: v for k, v in recipe.items() if k not in ("steps", "warmup")}
        output = f"runs/{_name_of(data['path'])}"
        defaults = {"task": task, "output": output, **TASK_DEFAULTS[task], **recipe}
        fields = {**defaults, **fields, "data": {**recipe.get("data", {}), **data}}
    built: TrainConfig = options.replaced(start, fields)
    if "retrain" in given and not built.sweep:
        raise typer.BadParameter(
            "--retrain and --no-retrain require several learning rates", param_hint="--lr"
        )
    return built


def _resumed(
    resume: str, given: Mapping[str, Any], others: list[str], kind: type[TrainConfig]
) -> TrainConfig:
    """The run in a directory, as it was started."""
    from vitcli.train.directory import read_train_config

    written = read_train_config(resume, kind)
    options_given = options.given_options(kind, written.task, given)
    fixed = [option.names[0] for option in options_given if not option.on_resume]
    if fixed or others:
        names = ", ".join([*fixed, *others])
        raise typer.BadParameter(f"a run is resumed with its original options: leave out {names}")
    built: TrainConfig = options.replaced(written, {**given, "output": resume})
    return built


def _name_of(path: str) -> str:
    """A run's name from its data's: flowers from /data/flowers, train from train-{0..9}.tar."""
    return Path(path).name.split("{")[0].split(".")[0].strip("-_") or "run"


def _run(
    config: TrainConfig,
    resume: bool,
    force: bool,
    offline: bool,
    allow_pickle: bool,
    json: bool,
    quiet: bool,
) -> None:
    """Trains: the plan, the progress, the result, and what to type next."""
    from vitcli.train.loop import train
    from vitcli.train.sweep import run_sweep

    with output.TrainingDisplay(quiet) as display, _resume_hint(config):
        outcome = (run_sweep if config.sweep else train)(
            config,
            resume=resume,
            force=force,
            offline=offline,
            allow_pickle=allow_pickle,
            on_event=Screen(display, json, quiet),
        )
    where = shlex.quote(str(outcome.directory.path))
    if outcome.stopped_by is not None:
        output.note(f"stopped at step {outcome.step}; continue with: {_resume_command(config)}")
        raise typer.Exit(128 + outcome.stopped_by)
    if json:
        output.json_line(outcome.to_json())
        return
    for split in ("val", "test"):
        if metrics := output.metrics(outcome.metrics, f"{split}_"):
            output.line(f"{split}: {', '.join(metrics)}")
    output.line(f"model: {outcome.directory.path}")
    if outcome.skipped:
        output.warning(f"skipped {outcome.skipped:,} images that cannot be read")
    output.note(stored_text(outcome))
    output.note(f"next: vit predict IMAGE --model {where}")


def _resume_command(config: TrainConfig) -> str:
    return f"vit {config.task} --resume {shlex.quote(config.output)}"


@contextlib.contextmanager
def _resume_hint(config: TrainConfig) -> Iterator[None]:
    """Adds how to continue if there is a state: after a Ctrl-C or SIGTERM outside the steps, an
    unreadable image, or a full disk."""
    from vitcli.errors import ImageError, OutputError, RunError, VitError
    from vitcli.train.directory import RunDirectory

    try:
        yield
    except (KeyboardInterrupt, SystemExit, ImageError, OutputError) as end:
        with contextlib.suppress(RunError):
            RunDirectory(config.output).check_resumable()
            text = f"stopped; continue with: {_resume_command(config)}"
            # After an error the boundary prints the error first.
            end.add_note(text) if isinstance(end, VitError) else output.note(text)
        raise
