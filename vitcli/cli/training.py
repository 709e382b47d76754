"""Shared by `vit pretrain` and `vit finetune`: build a run from options, and execute it."""

import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from vitcli.cli import output
from vitcli.cli.launch import launch_ranks
from vitcli.cli.options import DEVICES, DownloadOptions
from vitcli.cli.parameters import UsageError, apply_changes, check_effects, command, given_options
from vitcli.cli.training_display import TrainingDisplay, preset_event, preset_lines, stored_text
from vitcli.config import MACHINE, TASK_DEFAULTS, DataConfig
from vitcli.fields import Requirement, option
from vitcli.train.config import RECIPE, RUN, Task, TrainConfig
from vitcli.train.objective_config import OBJECTIVE_DEFAULTS
from vitcli.train.presets import LENGTH, PresetName, PretrainName, recipe
from vitcli.words import pluralize, public_url, quote


@dataclass(frozen=True, kw_only=True)
class StartOptions(DownloadOptions):
    """Options that start a run, besides its configuration."""

    config: str | None = option(
        None,
        "--config FILE",
        "Repeat the run described by a config.json; requires --output. Options on the command line "
        "override its values.",
        RUN,
    )
    resume: str | None = option(
        None,
        "--resume DIR",
        "Resume the interrupted run in this directory with its original options. Only --data (if "
        "the dataset has moved), --max-bad and the options listed under Machine (except "
        "--precision) and under Other options may be given with it.",
    )
    force: bool = option(False, "--force", "Replace the run in the output directory.")
    preset: PresetName | None = option(
        None,
        "--preset",
        "Use the ViT paper's fine-tuning recipe for the named dataset; other options override it.",
        RECIPE,
        task="finetune",
    )
    pretraining: PretrainName | None = option(
        None,
        "--preset",
        "Use the ViT paper's pre-training recipe for the named dataset and --variant, or "
        "big_vision's for S/16 on ImageNet-1k (s16-i1k); other options override it.",
        RECIPE,
        task="pretrain",
    )
    devices: int | None = option(None, "--devices N", DEVICES, MACHINE, min=1, max=1024)
    max_restarts: int = option(
        0,
        "--max-restarts N",
        "With --devices: if a rank fails, restart all ranks from the last saved state, up to N "
        "times.",
        requires=Requirement("requires --devices", lambda args: args.devices is not None),
        min=0,
    )


def training_command(task: Task, help_text: str) -> Any:
    """Create a training command with this help and an option for each field of `TrainConfig`."""

    def run(args: StartOptions, given: dict[str, Any]) -> None:
        preset = args.preset or args.pretraining
        if args.resume:
            start_options = {"--config": args.config, "--preset": preset, "--force": args.force}
            invalid = [name for name, value in start_options.items() if value]
            config = _resumed(task, args.resume, given, invalid)
        else:
            config = build_config(task, given, preset, args.config)
            config = dataclasses.replace(
                config, command=shlex.join(["vit", *map(public_url, sys.argv[1:])])
            )
        check_effects(TrainConfig, task, given, {**vars(config), "devices": args.devices})
        with _resume_hint(config, args.devices):
            launch_ranks(args.devices, config.device, args.max_restarts)
            if preset is not None:
                event = preset_event(preset, recipe(task, preset, given.get("variant")), given)
                output.json_line(event) if args.json else output.note(*preset_lines(event))
            _run(config, args)

    run.__doc__ = help_text
    return command(StartOptions, TrainConfig, task)(run)


def build_config(
    task: Task,
    given: Mapping[str, Any],
    preset: PresetName | PretrainName | None = None,
    config: str | None = None,
) -> TrainConfig:
    """Build a run's configuration from the given options (as passed by `parameters.command`), which
    override --config or --preset, which override the defaults of the task."""
    from vitcli.train.class_weights import read_class_weights

    if "steps" in given and "epochs" in given:
        raise UsageError("--steps and --epochs cannot be combined")
    fields = dict(given)
    if "lr" in given:
        rates = given["lr"]
        fields["lr"], fields["sweep"] = (None, rates) if len(rates) > 1 else (rates[0], ())
    if fields.get("class_weights", "balanced") != "balanced":
        fields["class_weights"] = read_class_weights(fields["class_weights"])
    base: Any = TrainConfig
    if config is not None:
        from vitcli.train.plan import auto_values

        if preset is not None:
            raise UsageError("--config and --preset cannot be combined")
        base = _read_config(task, config)
        if "output" not in given:
            raise UsageError("--config requires --output DIR for the new run")
        changed = {name.partition(".")[0] for name in given}
        # Stored values may have been computed from values that are now overridden.
        if "epochs" in given or (base.epochs and {"batch_size", "data"} & changed):
            fields.setdefault("steps", None)
        if "steps" in given:
            fields["epochs"] = None
        if {"batch_size", "resolution", "model", "variant", "patch_size", "device"} & changed:
            fields.setdefault("accumulate", None)
        if {"lr", "data", "patience"} & changed:  # the sweep's choice no longer applies
            fields["note"] = ""
            fields["data.merge_val"] = False
        auto = auto_values(base) if base.steps else {}
        fields = {k: None for k, v in auto.items() if getattr(base, k) == v} | fields
    else:
        if "data.path" not in given:
            raise UsageError("--data is required, except with --resume or --config")
        fields = {
            "task": task,
            "output": f"runs/{_run_name(given['data.path'])}",
            **TASK_DEFAULTS[task],
            **({"optimizer": "adamw"} if given.get("lora") and preset is None else {}),
            **OBJECTIVE_DEFAULTS[given.get("objective", "classify")],
            **(_preset_fields(task, preset, given) if preset else {}),
            **fields,
        }
    result: TrainConfig = apply_changes(base, fields)
    return result


def _preset_fields(
    task: Task, preset: PresetName | PretrainName, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a preset's values, without length and warm-up if another length is given."""
    if task == "pretrain" and "model" in given:
        raise UsageError("--preset chooses the architecture: leave out --model")
    fields = recipe(task, preset, given.get("variant"))
    if "steps" in given or "epochs" in given:
        fields = {k: v for k, v in fields.items() if k not in LENGTH}
    return fields


def _read_config(task: Task, path: str) -> TrainConfig:
    """Read the configuration of a run. Raises UsageError if it is of the other task."""
    from vitcli.train.directory import read_train_config

    config = read_train_config(path)
    if config.task != task:
        hint = f"use `vit {config.task}`"
        raise UsageError(f"'{path}' belongs to a run of another command\nhint: {hint}")
    return config


def _resumed(task: Task, resume: str, given: Mapping[str, Any], invalid: list[str]) -> TrainConfig:
    """Return the configuration of a resumed run. Raises UsageError for fixed options."""
    stored = _read_config(task, resume)
    options_given = given_options(TrainConfig, task, given)
    fixed = [bound.option.names[0] for bound, _ in options_given if not bound.option.on_resume]
    if fixed or invalid:
        names = ", ".join([*fixed, *invalid])
        raise UsageError(f"a run is resumed with its original options: leave out {names}")
    config: TrainConfig = apply_changes(stored, {**given, "output": resume})
    return config


def _run_name(path: str) -> str:
    """Name a run after its data: flowers from /data/flowers, train from train-{0..9}.tar."""
    return DataConfig(path).name.split("{")[0].split(".")[0].strip("-_ ") or "run"


def _run(config: TrainConfig, args: StartOptions) -> None:
    """Train, showing the plan and the progress; print the result and the next command."""
    from vitcli.train.loop import train
    from vitcli.train.sweep import run_sweep

    with TrainingDisplay(args.json) as display:
        outcome = (run_sweep if config.sweep else train)(
            config,
            resume=args.resume is not None,
            force=args.force,
            offline=args.offline,
            allow_pickle=args.allow_pickle,
            on_event=display,
        )
    path = quote(str(outcome.directory.path))
    if outcome.stopped_by is not None:
        resume = _resume_command(config, args.devices)
        output.note(f"stopped at step {outcome.step}; continue with: {resume}", always=True)
        raise typer.Exit(128 + outcome.stopped_by)
    if args.json:
        output.json_line(outcome.to_json())
        return
    for split in ("val", "test"):
        if metrics := output.format_metrics(outcome.metrics, f"{split}_"):
            output.line(f"{split}: {', '.join(metrics)}")
    output.line(f"model: {outcome.directory.path}")
    if outcome.skipped:
        output.warning(f"skipped {pluralize(outcome.skipped, 'image')} that could not be read")
    output.note(stored_text(outcome))
    next_command = "predict IMAGE" if config.objective == "classify" else "finetune --data DATA"
    output.note(f"next: vit {next_command} --model {path}")


def _resume_command(config: TrainConfig, devices: int | None) -> str:
    command = f"vit {config.task} --resume {quote(config.output)}"
    return f"{command} --devices {devices}" if devices else command


@contextlib.contextmanager
def _resume_hint(config: TrainConfig, devices: int | None) -> Iterator[None]:
    """Add a note on how to resume, if a state was saved, after a Ctrl-C or SIGTERM outside the
    steps, an unreadable image, a full disk, or the loss of a rank."""
    from vitcli.errors import ImageError, OutputError, RankError, RunError
    from vitcli.train.directory import RunDirectory, read_train_config

    try:
        yield
    except (KeyboardInterrupt, SystemExit, ImageError, OutputError, RankError) as error:
        with contextlib.suppress(RunError):
            RunDirectory(config.output).check_resumable(config.task)
            read_train_config(config.output)
            error.add_note(f"stopped; continue with: {_resume_command(config, devices)}")
        raise
