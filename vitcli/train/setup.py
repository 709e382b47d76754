"""What stands before step 1: data, initial weights, the plan, and what they cost."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vitcli
from vitcli.checkpoints.info import CheckpointInfo, ancestry
from vitcli.checkpoints.load import Weights
from vitcli.config import Architecture, ClassLabel, ModelConfig, Preprocess, Size
from vitcli.data.classes import listed
from vitcli.data.dataset import open_data
from vitcli.data.source import Ints, Source
from vitcli.data.transforms import TrainTransform
from vitcli.devices import choose_device, choose_precision
from vitcli.errors import ConfigError, RunError
from vitcli.inference import LONG_SEQUENCE, check_memory
from vitcli.train import initial
from vitcli.train.class_weights import class_weights
from vitcli.train.directory import RunDirectory
from vitcli.train.inputs import Report
from vitcli.train.layers import freeze
from vitcli.train.plan import make_plan
from vitcli.train.run import Run, at_patch_size
from vitcli.train.state import read_state_info
from vitcli.train.tensorboard import require_tensorboard
from vitcli.train_config import TrainConfig


def prepare(
    config: TrainConfig,
    folder: RunDirectory,
    resume: bool,
    offline: bool,
    report: Report,
    allow_pickle: bool = False,
) -> Run:
    """Opens the data, reads the initial weights, plans the run and builds its model."""
    if config.tensorboard:
        require_tensorboard()
    device = choose_device(config.device)
    dtype = choose_precision(config.precision, device)
    start: Weights | None = None
    if not resume:
        if config.task == "finetune" and config.model is None:
            config = dataclasses.replace(config, model=initial.choose_model(offline, report))
        start = initial.read_weights(config, offline, allow_pickle)
        # Impossible sizes fail before data is read.
        check_memory(_trained_shape(start.info.model, config), config.device)
    splits = open_data(
        config.data,
        record=folder.read_split() if resume else None,
        report=lambda text: report({"event": "note", "text": text}),
    )
    for warning in splits.warnings:
        report({"event": "warning", "text": warning})
    report({"event": "note", "text": splits.split_note})
    if len(splits.classes) < 2:
        raise RunError(
            f"has {len(splits.classes)} class; a classifier needs at least two",
            where=config.data.path,
        )
    torch.manual_seed(config.seed)
    if start is not None:
        info = _describe(config, start.info, splits.train)
        rows = initial.kept_rows(start.info, info.classes, config)
        if config.keep_head:
            report({"event": "note", "text": _kept_words(rows, info.classes)})
        model = initial.build_model(start, info, rows, config)
    else:
        info = read_state_info(folder.state)
        if info.classes != splits.classes:
            raise RunError("the data has other classes than the run", where=config.data.path)
        model = initial.build_empty(info.model, config).to_empty(device="cpu")
    model = model.to(device)
    freeze(model, config.freeze)
    target, preprocess = info.model, info.preprocess
    plan = make_plan(config, target, len(splits.train), device)
    config = plan.config
    if isinstance(target, ModelConfig) and target.num_tokens > LONG_SEQUENCE:
        report({"event": "warning", "text": _long_sequence(target)})
    weights = class_weights(config.class_weights, splits.train) if config.class_weights else None
    if config.patience and splits.val is None:
        raise RunError(
            "there is no validation part, so nothing to lose patience with",
            where=config.data.path,
            hint="leave --patience out, or hold images out with --val-fraction",
        )
    if config.ema and (config.steps or 0) * (1 - config.ema) < 1:
        report({"event": "warning", "text": _slow_average(config)})
    # Crops are enlarged as well as shrunk, and a box filter would show their pixels as squares.
    interpolation = "bicubic" if preprocess.interpolation == "box" else preprocess.interpolation
    return Run(
        config=config,
        plan=plan,
        model=model,
        averaged=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema))
        if config.ema
        else None,
        info=info,
        train=splits.train,
        val=splits.val,
        test=splits.test,
        split=splits.record,
        train_transform=TrainTransform(target.image_size, interpolation, config.augment),
        device=device,
        dtype=dtype,
        class_weights=None if weights is None else torch.from_numpy(weights).to(device),
        scaler=torch.amp.GradScaler(device.type, enabled=dtype is torch.float16),
    )


def _describe(config: TrainConfig, start: CheckpointInfo, train: Source) -> CheckpointInfo:
    """The model that the run trains: its checkpoint's, at the run's size and for its classes."""
    target = _trained_shape(start.model, config).with_classes(len(train.classes))
    if config.task == "finetune" and isinstance(target, ModelConfig) and not config.keep_head:
        target = dataclasses.replace(target, pre_logits=0)
    preprocess = _preprocess(start, config, target.image_size)
    provenance = _provenance(config, start, train)
    return CheckpointInfo(target, preprocess, train.classes, config.loss, provenance)


def _trained_shape(model: Architecture, config: TrainConfig) -> Architecture:
    """The checkpoint's architecture at the patch size and the resolution of the run."""
    if config.patch_size:
        model = at_patch_size(model, config.patch_size)
    return model.at(config.resolution) if config.resolution else model


def _preprocess(start: CheckpointInfo, config: TrainConfig, size: Size) -> Preprocess:
    """The checkpoint's at the run's size; fine-tuning squashes and does not crop, as the paper's
    authors do (vit_jax/input_pipeline.py), unless it goes on from a head that is kept."""
    anew = config.task == "finetune" and not config.keep_head
    whole: dict[str, Any] = {"crop_mode": "squash", "crop_pct": 1.0} if anew else {}
    fields = whole | config.preprocess
    unknown = set(fields) - {field.name for field in dataclasses.fields(Preprocess)}
    if unknown:
        raise ConfigError(f"pre-processing has no field {', '.join(sorted(unknown))}")
    return dataclasses.replace(start.preprocess, size=size, **fields)


def _provenance(config: TrainConfig, start: CheckpointInfo, train: Source) -> dict[str, Any]:
    """Where the model comes from; data by its name alone, never by its path."""
    provenance: dict[str, Any] = {
        "made_by": f"vit {config.task} (vitcli {vitcli.__version__}, torch {torch.__version__})",
        "data": Path(config.data.path).name,
        "train_images": len(train),
    }
    if config.note:
        provenance["note"] = config.note
    if config.model is not None:
        provenance |= ancestry(start, config.model)
        grid, new = start.model.grid, _trained_shape(start.model, config).grid
        if grid != new and start.model.posemb != "none":
            resized = {"method": config.posemb_method, "from": list(grid), "to": list(new)}
            provenance["posemb_resize"] = resized
    return provenance


def _long_sequence(model: ModelConfig) -> str:
    return (
        f"{model.num_tokens:,} tokens an image: attention's time and memory grow with the square; "
        f"a lower --resolution or a larger patch makes this much faster"
    )


def _kept_words(rows: Ints, classes: tuple[ClassLabel, ...]) -> str:
    new = [label.name for label, row in zip(classes, rows, strict=True) if row < 0]
    kept = f"head: the rows of {len(rows) - len(new):,} of {len(rows):,} classes are kept"
    return f"{kept}; new: {listed(new)}" if new else kept


def _slow_average(config: TrainConfig) -> str:
    """For the average's horizon is about 1 / (1 - ema) steps."""
    steps, horizon = config.steps or 0, round(1 / (1 - (config.ema or 0)))
    return (
        f"an average over {horizon:,} steps stays near its start in a run of {steps:,}: "
        f"--ema {1 - 1 / max(2, steps // 10):.4g} would average over a tenth of it"
    )
