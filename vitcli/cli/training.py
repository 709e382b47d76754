"""What `vit pretrain` and `vit finetune` share: their options, and the run on the screen.

Every option defaults to None, "not given": what is not given comes from --config, else from the
defaults of the task in config.py, which is where the help texts take them from too.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitcli.cli import output
from vitcli.config import (
    TASK_DEFAULTS,
    AugmentConfig,
    DataConfig,
    ModelConfig,
    Preprocess,
    Size,
    TrainConfig,
)


def parse_resolution(text: str) -> Size:
    """ "384" or "192x320" as (height, width)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"'{text}' is not a size such as 384 or 192x320 (height x width)")
    return int(parts[0]), int(parts[-1])


def _parse_pair(text: str, kind: type) -> tuple[Any, Any]:
    try:
        first, second = (kind(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"'{text}' is not two numbers such as 2,10") from error
    return first, second


def _option(*names: str, help: str, default: object = None, **settings: Any) -> Any:
    shown = f"  [default: {default}]" if default is not None else ""
    return typer.Option(*names, help=help + shown, **settings)


_RUN = TrainConfig(data=DataConfig(""), output="")
_PICTURE = AugmentConfig()

InitialModel = Annotated[
    str | None,
    _option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="What to start from.",
        default="vit-b16-i21k; offline, the model inside the package",
    ),
]
ContinueModel = Annotated[
    str | None,
    _option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="Go on from this model's weights instead of random ones.",
    ),
]
Variant = Annotated[
    str | None,
    _option(
        "--variant",
        metavar="NAME/PATCH",
        help="Ti, S, B, L or H, and the patch size.",
        default=_RUN.variant,
    ),
]
Overrides = Annotated[
    list[str] | None,
    _option(
        "--set",
        metavar="KEY=VALUE",
        help="A size or choice of the architecture that departs from the variant (depth, width, "
        "pool, posemb, layer_scale, ...).",
    ),
]
Data = Annotated[
    str | None,
    _option(
        "--data",
        metavar="PATH",
        help="A folder of class folders, a CSV (path,label), a parquet file or folder, or tar "
        "shards ({00000..00009} counts).",
    ),
]
Classes = Annotated[
    str | None,
    _option("--classes", metavar="FILE", help="Class names, one a line, in index order."),
]
ValFraction = Annotated[
    float | None,
    _option(
        "--val-fraction",
        help="The part held out where the data has no validation part.",
        default=DataConfig.val_fraction,
    ),
]
RunOutput = Annotated[
    str | None, _option("--output", "-o", metavar="FOLDER", help="The run's folder.")
]
Config = Annotated[
    str | None,
    _option("--config", metavar="FILE", help="Run what a config.json describes; options override."),
]
Resume = Annotated[
    str | None,
    _option("--resume", metavar="FOLDER", help="Go on with the interrupted run in this folder."),
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]
Resolution = Annotated[
    str | None,
    _option("--resolution", metavar="N|HxW", help="Pixels.", default="the checkpoint's"),
]
PatchSize = Annotated[
    int | None,
    _option("--patch-size", min=1, help="Train at this patch size; the embedding is resampled."),
]
SavePatchSize = Annotated[
    int | None,
    _option(
        "--save-patch-size",
        min=1,
        help="Store the model for larger pictures of the same grid, with patches of this size.",
    ),
]
PosembMethod = Annotated[
    Literal["bilinear", "bicubic", "bicubic-hf"] | None,
    _option(
        "--posemb-method",
        help="How position embeddings are resized.",
        default=_RUN.posemb_method,
    ),
]
PreprocessOption = Annotated[
    list[str] | None,
    _option(
        "--preprocess",
        metavar="KEY=VALUE",
        help="A field of the pre-processing (crop_mode, crop_pct, interpolation, mean, std).",
    ),
]
Steps = Annotated[
    int | None, _option("--steps", min=1, help="Optimizer steps.", default="auto rule")
]
Epochs = Annotated[
    float | None, _option("--epochs", help="Instead of --steps: passes over the data.")
]
BatchSize = Annotated[
    int | None,
    _option("--batch-size", "-b", min=1, help="Pictures in a step.", default="auto rule"),
]
Accumulate = Annotated[
    int | None,
    _option("--accumulate", min=1, help="Parts that a batch is split into.", default="by memory"),
]
Optimizer = Annotated[
    Literal["sgd", "adam", "adamw"] | None,
    _option(
        "--optimizer",
        help="sgd (momentum 0.9), adam, or adamw.  [default: sgd to finetune, adamw to pretrain]",
    ),
]
Lr = Annotated[float | None, _option("--lr", help="Peak learning rate.", default="auto rule")]
WeightDecay = Annotated[
    float | None,
    _option("--weight-decay", help="Of matrices alone.  [default: 0 to finetune, 0.1 to pretrain]"),
]
Warmup = Annotated[
    int | None,
    _option("--warmup", min=0, help="Steps of linear warm-up.", default="auto rule"),
]
Schedule = Annotated[
    Literal["cosine", "linear", "constant"] | None,
    _option("--schedule", help="Decay after the warm-up.", default=_RUN.schedule),
]
ClipNorm = Annotated[
    float | None,
    _option("--clip-norm", help="Global gradient norm.", default=_RUN.clip_norm),
]
Loss = Annotated[
    Literal["softmax", "sigmoid"] | None,
    _option("--loss", help="Cross-entropy.", default=_RUN.loss),
]
LabelSmoothing = Annotated[
    float | None,
    _option("--label-smoothing", help="Spread over all classes.", default=_RUN.label_smoothing),
]
HeadBias = Annotated[
    float | None,
    _option("--head-bias", help="Initial bias of the head, as in -10.", default=_RUN.head_bias),
]
Dropout = Annotated[
    float | None,
    _option("--dropout", help="After each dense layer but q, k, v.", default=_RUN.dropout),
]
DropPath = Annotated[
    float | None,
    _option("--drop-path", help="Stochastic depth of the last block.", default=_RUN.drop_path),
]
CropArea = Annotated[
    str | None,
    _option(
        "--crop-area",
        metavar="MIN,MAX",
        help="Inception crop: part of the area kept.",
        default="{},{:g}".format(*_PICTURE.crop_area),
    ),
]
Flip = Annotated[
    bool | None,
    typer.Option("--flip/--no-flip", help="Mirror half of the pictures.  [default: flip]"),
]
RandAugment = Annotated[
    str | None, _option("--randaugment", metavar="N,M", help="Layers and magnitude, as in 2,10.")
]
Erasing = Annotated[
    float | None,
    _option("--erasing", help="Probability of random erasing.", default=_PICTURE.erasing),
]
Mixup = Annotated[float | None, _option("--mixup", help="Alpha of mixup.", default=_PICTURE.mixup)]
Cutmix = Annotated[
    float | None, _option("--cutmix", help="Alpha of cutmix.", default=_PICTURE.cutmix)
]
Seed = Annotated[int | None, _option("--seed", help="Decides all randomness.", default=_RUN.seed)]
TrainDevice = Annotated[
    str | None,
    _option(
        "--device", metavar="auto|cpu|cuda[:N]|mps", help="What computes.", default=_RUN.device
    ),
]
TrainPrecision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"] | None,
    _option("--precision", help="Of activations.", default=_RUN.precision),
]
Workers = Annotated[
    int | None, _option("--workers", min=0, help="Processes that decode.", default="by device")
]
EvalEvery = Annotated[
    int | None,
    _option("--eval-every", min=1, help="Steps between evaluations.", default="auto rule"),
]
SaveEvery = Annotated[
    int | None,
    _option("--save-every", min=1, help="Steps between states.", default="one a minute"),
]
SaveDtype = Annotated[
    Literal["float32", "float16", "bfloat16"] | None,
    _option("--save-dtype", help="Of the stored weights.", default=_RUN.save_dtype),
]

_MAY_CHANGE = ("device", "workers")
"""Options that a resumed run may be given: they do not change what it computes."""
_NOT_CONFIG = ("config", "resume", "force", "offline", "json", "quiet", "debug")


def build_config(task: Literal["pretrain", "finetune"], given: Mapping[str, Any]) -> TrainConfig:
    """A run from options that were given, over --config, over the task's defaults."""
    from vitcli.train.folder import read_train_config

    base = read_train_config(given["config"]) if given["config"] else None
    given = {k: v for k, v in given.items() if v is not None and k not in _NOT_CONFIG}
    if "data" in given:  # a resumed run may be called from elsewhere
        given["data"] = str(Path(given["data"]).expanduser().absolute())
    names = {f.name for f in dataclasses.fields(AugmentConfig)}
    data_names = {"classes", "val_fraction"}
    augment = {k: _augment_value(k, v) for k, v in given.items() if k in names}
    data = {k: v for k, v in given.items() if k in data_names}
    run = {k: v for k, v in given.items() if k not in names | data_names | {"data"}}
    if "resolution" in run:
        run["resolution"] = parse_resolution(run["resolution"])
    if "overrides" in run:
        run["overrides"] = dict(_override(text) for text in run["overrides"])
    if "preprocess" in run:
        run["preprocess"] = dict(_preprocess_value(text) for text in run["preprocess"])
    if base is None:
        if "data" not in given:
            raise typer.BadParameter("say what to learn from", param_hint="--data")
        run.setdefault("output", f"runs/{_name_of(given['data'])}")
        return TrainConfig(
            data=DataConfig(given["data"], **data),
            task=task,
            augment=AugmentConfig(**augment),
            **{**TASK_DEFAULTS[task], **run},
        )
    path = {"path": given["data"]} if "data" in given else {}
    return dataclasses.replace(
        base,
        data=dataclasses.replace(base.data, **path, **data),
        augment=dataclasses.replace(base.augment, **augment),
        **run,
    )


def _augment_value(name: str, value: Any) -> Any:
    if name == "crop_area":
        return _parse_pair(value, float)
    return _parse_pair(value, int) if name == "randaugment" else value


def _override(text: str) -> tuple[str, Any]:
    """ "depth=6" as ("depth", 6); the type is that of the field of ModelConfig."""
    key, separator, value = text.partition("=")
    kinds = {f.name: str(f.type) for f in dataclasses.fields(ModelConfig)}
    if not separator or key not in kinds:
        raise typer.BadParameter(f"'{text}' is not KEY=VALUE with a KEY of {', '.join(kinds)}")
    try:
        if kinds[key] == "Size":
            return key, parse_resolution(value)
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


def _name_of(path: str) -> str:
    stem = path.rstrip("/").rsplit("/", 1)[-1].split("{")[0].split(".")[0].strip("-_")
    return stem or "run"


def run_training(task: Literal["pretrain", "finetune"], given: Mapping[str, Any]) -> None:
    """Runs a training command: the plan, the progress, the result, and what to type next."""
    from vitcli.train.folder import read_train_config

    resume, quiet = given["resume"], given["quiet"]
    if resume:
        others = {k for k, v in given.items() if v is not None and k not in _NOT_CONFIG}
        if others - set(_MAY_CHANGE):
            names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(others))
            raise typer.BadParameter(f"a run is resumed as it was; leave out {names}")
        changes = {name: given[name] for name in others}
        config = dataclasses.replace(read_train_config(resume), output=resume, **changes)
    else:
        command = shlex.join(["vit", *sys.argv[1:]])
        config = dataclasses.replace(build_config(task, given), command=command)
    from vitcli.train.loop import train

    accuracy: float | None = None  # of the last evaluation
    with output.TrainingDisplay(quiet) as display:

        def show(event: dict[str, Any]) -> None:
            nonlocal accuracy
            if given["json"]:
                output.json_line(event)
            if event["event"] == "train":
                display({**event, "accuracy": accuracy or event["accuracy"]})
            elif event["event"] == "evaluation":
                accuracy = event["val_top1"]
                display.note(f"step {event['step']:,}: validation accuracy {accuracy:.2%}")
            elif event["event"] == "warning":
                output.warning(event["text"])
            else:
                display.note(plan_text(event) if event["event"] == "plan" else event["text"])

        outcome = train(
            config,
            resume=bool(resume),
            force=given["force"],
            offline=given["offline"],
            on_event=show,
        )
    where = shlex.quote(str(outcome.folder.path))
    if outcome.stopped_by is not None:
        output.note(f"stopped at step {outcome.step}; go on with: vit {task} --resume {where}")
        raise typer.Exit(128 + outcome.stopped_by)
    if given["json"]:
        result = {"event": "result", "folder": str(outcome.folder.path), **outcome.figures}
        output.json_line(result)
        return
    for name, value in outcome.figures.items():
        output.line(f"{name.replace('_', ' ')}: {value:.2%}")
    output.line(f"model: {outcome.folder.path}")
    output.note(f"next: vit predict PICTURE --model {where}")


def plan_text(event: Mapping[str, Any]) -> str:
    """The plan in a few lines."""
    size, patch = event["resolution"], event["patch_size"]
    parts = f" in {event['accumulate']} parts" if event["accumulate"] > 1 else ""
    return "\n".join(
        [
            f"model      {event['model']}, {event['parameters']:,} parameters, "
            f"{size[0]} x {size[1]} px in patches of {patch[0]}: {event['tokens']:,} tokens a picture",
            f"data       {event['train_pictures']:,} pictures to train on, "
            f"{event['val_pictures']:,} to validate, {event['classes']:,} classes",
            f"plan       {event['steps']:,} steps of {event['batch_size']}{parts} "
            f"({event['epochs']:.3g} epochs), {event['optimizer']}, learning rate {event['lr']:g}, "
            f"warm-up {event['warmup']} steps",
            f"machine    {event['device']}, {event['precision']}; about "
            f"{output.duration(event['estimated_seconds'])}",
        ]
    )
