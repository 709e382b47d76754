"""Everything before step 1: data, initial weights, the complete configuration, the model."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn
from torch.distributed import is_nccl_available

import vitcli
from vitcli.checkpoints.adapt import resize_record
from vitcli.checkpoints.info import CheckpointInfo, ancestry, stored_name, warn_of_assumptions
from vitcli.checkpoints.read import Fetching
from vitcli.config import Architecture, ClassLabel, ModelConfig, Preprocess, Size
from vitcli.data.classes import quote_list
from vitcli.data.dataset import Splits, open_splits, require_source, unreadable_images
from vitcli.data.source import Ints, Source, concat_sources
from vitcli.data.stream import Stream, StreamOptions
from vitcli.devices import choose_device, choose_precision
from vitcli.distributed import Ranks
from vitcli.errors import ConfigError, DataError, ImageError, RunError, require
from vitcli.hub import registry
from vitcli.inference import LONG_SEQUENCE, LONG_SEQUENCE_WARNING, check_memory
from vitcli.models.lora import add_lora
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor
from vitcli.train import initial, parallel
from vitcli.train.class_weights import class_weights
from vitcli.train.config import TrainConfig
from vitcli.train.directory import RunDirectory
from vitcli.train.distillation import Distillation, Teacher
from vitcli.train.events import Caution, Download, Note, OnEvent
from vitcli.train.inputs import track_progress
from vitcli.train.mae import MaskedAutoencoder
from vitcli.train.masked_patch import MaskedPatches
from vitcli.train.objectives import Classification, Objective
from vitcli.train.optim import MovingAverage, build_optimizer, build_scaler, freeze, learning_rate
from vitcli.train.plan import MAE_RATE, fill_defaults
from vitcli.train.probe import shots_of
from vitcli.train.run import Run, at_patch_size
from vitcli.train.state import read_state_info

CHECK_BATCH_SIZE = 1024
"""Images per rank that are checked at a time with --strict."""


def prepare(
    config: TrainConfig,
    directory: RunDirectory,
    ranks: Ranks,
    on_event: OnEvent,
    resume: bool = False,
    **fetching: Unpack[Fetching],
) -> Run:
    """Open the data, load the initial weights (with `resume`, only the metadata of the state), and
    build the run. The data comes first, as weights may have to be downloaded. Rank 0 goes first, so
    that the other ranks find what it has downloaded or indexed."""
    if config.tensorboard:
        require("tensorboard", "--tensorboard")
    offline = fetching.get("offline", False)
    config.data.reachable(offline)
    fetching["on_progress"] = lambda transfer: on_event(Download(transfer))
    device = choose_device(config.device)
    dtype = choose_precision(config.precision, device)
    if dtype is torch.float16 and config.shard:
        raise ConfigError("--shard does not work with --precision fp16", hint="use bf16 or fp32")
    can_shard = device.type == "cpu" or (device.type == "cuda" and is_nccl_available())
    if config.shard and not can_shard:
        raise ConfigError(f"--shard does not work on {device.type} without NCCL")
    ranks.check_same(repr(config), "configuration")
    with ranks.rank_zero_first():
        split_record = directory.read_split() if resume else directory.sweep_split()
        splits = _open_data(config, split_record, on_event)
    held_out = splits.val.fingerprint() if splits.val else None
    ranks.check_same((splits.train.fingerprint(), held_out), "dataset")
    if config.strict and not resume:
        checked = [require_source(s) for s in (splits.train, splits.val, splits.test) if s]
        source = functools.reduce(concat_sources, checked)
        _require_readable(source, config.data.path, ranks, on_event)
    if config.task == "finetune" and config.model is None and not resume:
        model_name = initial.choose_model(offline) if ranks.is_first else None
        config = dataclasses.replace(config, model=ranks.broadcast(model_name))
    with ranks.rank_zero_first():
        info, model = _build(config, directory, splits, on_event, resume, fetching)
    if ranks.rank:  # dropout must differ between ranks; a CPU generator takes 32 bits
        torch.manual_seed(int(np.random.default_rng((config.seed, ranks.rank)).integers(1 << 32)))
    if isinstance(splits.train, Stream):
        config = dataclasses.replace(config, streams=splits.train.lanes)
    if config.objective == "mae" and config.lr is None:
        on_event(Note(f"learning rate: {MAE_RATE:g} x batch size / 256"))
    config = fill_defaults(config, info.model, len(splits.train), device, ranks.world_size, dtype)
    # FSDP2 communicates in every micro-batch, and one rank may have less memory than others.
    config = dataclasses.replace(config, accumulate=ranks.all_max(config.accumulate or 1)[0])
    for warning in _warnings(config, info.model, ranks.world_size):
        on_event(Caution(warning))
    freeze(model, config.freeze)
    if config.lora:
        add_lora(model, config.lora, config.seed)
    with ranks.rank_zero_first():
        teacher = _load_teacher(config, info, on_event, fetching)
    objective = _build_objective(config, model, info.preprocess, splits.train, teacher).to(device)
    aux_message = None if resume else initial.load_aux_state(objective, config)
    for message in (objective.note, aux_message):
        if message:
            on_event(Note(message))
    averaged = MovingAverage(objective, config.ema) if config.ema else None
    if config.shard and ranks.control is not None:  # a stored --shard may be resumed in one process
        for module in (objective, averaged.module) if averaged else (objective,):
            parallel.shard(module, device, ranks)
    parallel.prepare_blocks(objective, config.grad_checkpointing, config.compile)
    optimizer = build_optimizer(objective, config)
    return Run(
        config=config,
        directory=directory,
        objective=objective,
        averaged=averaged,
        optimizer=optimizer,
        scaler=build_scaler(optimizer, device, dtype),
        info=info,
        splits=splits,
        device=device,
        dtype=dtype,
        ranks=ranks,
        on_event=on_event,
    )


def _build(
    config: TrainConfig,
    directory: RunDirectory,
    splits: Splits,
    on_event: OnEvent,
    resume: bool,
    fetching: Fetching,
) -> tuple[CheckpointInfo, ViT | BiT]:
    """Build the model on the CPU; with `resume`, its weights are left uninitialized."""
    torch.manual_seed(config.seed)
    if resume:
        info = read_state_info(directory)
        old, new = info.classes, _head_classes(config, splits.train)
        if old != new:
            what = "the classes of the dataset have changed since the run was started"
            if added := {*new} - {*old}:
                what += f"; added: {quote_list(sorted(label.name for label in added))}"
            if removed := {*old} - {*new}:
                what += f"; removed: {quote_list(sorted(label.name for label in removed))}"
            hint = "restore them, or start a new run"
            raise RunError(what, where=config.data.path, hint=hint)
        return info, initial.build_empty(info.model, config).to_empty(device="cpu")
    start = initial.read_weights(config, **fetching)
    warn_of_assumptions(start.info, config.model)
    info = _describe(config, start.info, splits.train)
    check_memory(info.model, config.device)
    rows = initial.kept_rows(start.info, info.classes, config)
    if config.keep_head:
        on_event(Note(_kept_rows_message(rows, info.classes)))
    return info, initial.build_model(start, info, rows, config)


def _load_teacher(
    config: TrainConfig, info: CheckpointInfo, on_event: OnEvent, fetching: Fetching
) -> Teacher | None:
    if config.teacher is None:
        return None
    predictor = Predictor(config.teacher, config.device, config.precision, **fetching)
    height, width = predictor.info.preprocess.size
    on_event(Note(f"teacher: {predictor.name}, at {height} x {width} px"))
    return Teacher(predictor, info.classes, info.preprocess, config)


def _build_objective(
    config: TrainConfig,
    model: nn.Module,
    preprocess: Preprocess,
    train: Source | Stream,
    teacher: Teacher | None,
) -> Objective:
    if config.objective == "mae":
        return MaskedAutoencoder(model, config, preprocess)
    if config.objective == "masked-patch":
        return MaskedPatches(model, config, preprocess)
    weights = None
    if config.class_weights:
        weights = torch.from_numpy(class_weights(config.class_weights, train))
    if teacher is not None:
        return Distillation(model, config, weights, teacher)
    return Classification(model, config, weights)


def _open_data(config: TrainConfig, record: dict[str, Any] | None, on_event: OnEvent) -> Splits:
    labeled = config.objective == "classify"
    splits = open_splits(
        config.data,
        record=record,
        report=lambda text: on_event(Note(text)),
        labeled=labeled,
        streaming=StreamOptions(config.train_images, config.streams),
    )
    if config.balanced_sampling:
        require_source(splits.train)
    on_event(Note(splits.split_note))
    if labeled and len(splits.classes) < 2:
        raise RunError(
            f"the dataset has {len(splits.classes)} class; a classifier needs at least two",
            where=config.data.path,
        )
    if config.patience and splits.val is None:
        raise RunError(
            "--patience requires a validation split",
            where=config.data.path,
            hint="leave out --patience, or hold out images with --val-fraction",
        )
    if config.probe_every:
        shots_of(splits.images, splits.val)
    return splits


def _require_readable(source: Source, where: str, ranks: Ranks, on_event: OnEvent) -> None:
    """Raise DataError, on all ranks, if any image is unreadable, after a warning for each. The
    ranks divide the images in rounds, so that none waits long for the others."""
    advance, errors = track_progress("checking images", len(source), on_event), list[ImageError]()
    for start in range(0, len(source), CHECK_BATCH_SIZE * ranks.world_size):
        indices = np.arange(start, min(start + CHECK_BATCH_SIZE * ranks.world_size, len(source)))
        share = ranks.share(len(indices))
        rank_errors = unreadable_images(source.select(indices[share.start : share.stop]))
        errors += itertools.chain.from_iterable(ranks.gather(rank_errors))
        advance(len(indices))
    for error in errors:
        on_event(Caution(f"{error.where}: {error.what}"))
    if errors:
        raise DataError(
            f"{len(errors):,} of {len(source):,} images cannot be read",
            where=where,
            hint="repair or remove them; without --strict they are skipped",
        )


def _describe(config: TrainConfig, start: CheckpointInfo, train: Source | Stream) -> CheckpointInfo:
    """Describe the model to train: the checkpoint's, at the run's size and for its classes."""
    classes = _head_classes(config, train)
    target = _resize_architecture(start.model, config).with_classes(len(classes))
    new_head = config.task == "finetune" and not config.keep_head
    if isinstance(target, ModelConfig) and (new_head or not classes):
        target = dataclasses.replace(target, pre_logits=0)
    preprocess = _build_preprocess(start, config, target.image_size)
    provenance = _build_provenance(config, start, train)
    return CheckpointInfo(target, preprocess, classes, config.loss, provenance)


def _head_classes(config: TrainConfig, train: Source | Stream) -> tuple[ClassLabel, ...]:
    """Return the classes of the model's head; none unless the objective is classification."""
    return train.classes if config.objective == "classify" else ()


def _resize_architecture(model: Architecture, config: TrainConfig) -> Architecture:
    """Return the checkpoint's architecture at the patch size and resolution of the run."""
    if config.patch_size:
        model = at_patch_size(model, config.patch_size)
    return model.with_image_size(config.resolution) if config.resolution else model


def _build_preprocess(start: CheckpointInfo, config: TrainConfig, size: Size) -> Preprocess:
    """Return the checkpoint's preprocessing at the run's size. Fine-tuning squashes and does not
    crop, as the paper's authors do (vit_jax/input_pipeline.py), unless it keeps the head."""
    new_head = config.task == "finetune" and not config.keep_head
    changes: dict[str, Any] = {"crop_mode": "squash", "crop_pct": 1.0} if new_head else {}
    changes |= {"size": size, **config.preprocess}
    return dataclasses.replace(start.preprocess, **changes)


def _build_provenance(
    config: TrainConfig, start: CheckpointInfo, train: Source | Stream
) -> dict[str, Any]:
    """Return the provenance of the model; data is recorded by name, never by path."""
    provenance: dict[str, Any] = {
        "made_by": f"vit {config.task} (vitcli {vitcli.__version__}, torch {torch.__version__})",
        "data": config.data.name,
        "train_images": len(train),
    }
    if config.data.repo:
        provenance["dataset"] = config.data.repo
    if config.note:
        provenance["note"] = config.note
    if config.teacher is not None:
        teacher = registry.aliases().get(config.teacher, config.teacher)
        provenance["teacher"] = stored_name(teacher)
    if config.model is not None:
        provenance |= ancestry(start, registry.aliases().get(config.model, config.model))
        old, new = start.model, _resize_architecture(start.model, config)
        if old.grid != new.grid and old.posemb_tables:
            provenance["posemb_resize"] = resize_record(old, new, config.posemb_method)
    return provenance


def _warnings(config: TrainConfig, model: Architecture, ranks: int) -> Iterator[str]:
    """Yield warnings of settings that make a run slow, or that have no effect in it."""
    num_readers = ranks * (config.workers or 1)
    if config.streams and config.streams < min(num_readers, config.batch_size or num_readers):
        yield (
            f"{config.streams} streams for {num_readers} workers: some workers read the same "
            f"shards; --streams {num_readers} avoids this"
        )
    if isinstance(model, ModelConfig) and model.num_tokens > LONG_SEQUENCE:
        yield LONG_SEQUENCE_WARNING.format(model.num_tokens)
    if config.optimizer == "muon" and not isinstance(model, ModelConfig):
        yield "Muon trains matrices, and a ResNet has none in its blocks: AdamW is used"
    elif config.optimizer == "muon" and config.freeze == "backbone":
        yield "Muon trains the matrices of the blocks, which are frozen: AdamW is used"
    if config.teacher and config.teacher_weight == 1:
        unused = ("label_smoothing", "class_weights")
        for name in (field for field in unused if getattr(config, field)):
            option = f"--{name.replace('_', '-')}"
            yield f"{option} has no effect: with --teacher-weight 1, labels are not used"
    steps, warmup = config.steps or 0, config.warmup or 0
    if warmup >= steps > 0:
        yield (
            f"the warm-up takes {warmup:,} steps, and the run has {steps:,}: the learning rate "
            f"only rises, to {learning_rate(steps, config):.3g}"
        )
    averaged, suggested = round(1 / (1 - (config.ema or 0))), max(2, steps // 10)
    if config.ema and steps < averaged:
        yield (
            f"--ema {config.ema:g} averages over about {averaged:,} steps, "
            f"but the run has {steps:,}: the average stays close to the initial weights. "
            f"--ema {1 - 1 / suggested:.4g} would average over {suggested:,} steps"
        )


def _kept_rows_message(rows: Ints, classes: tuple[ClassLabel, ...]) -> str:
    new = [label.name for label, row in zip(classes, rows, strict=True) if row < 0]
    message = f"head: weights kept for {len(rows) - len(new):,} of {len(rows):,} classes"
    return f"{message}; new: {quote_list(new)}" if new else message
