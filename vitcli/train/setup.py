"""What stands before step 1: data, initial weights, the plan, and what they cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitcli
from vitcli.checkpoints import hub, registry
from vitcli.checkpoints.adapt import adapt
from vitcli.checkpoints.ancestry import ancestry
from vitcli.checkpoints.load import load_weights
from vitcli.checkpoints.native import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint, write_config
from vitcli.config import (
    Architecture,
    BiTConfig,
    ModelConfig,
    Preprocess,
    Size,
    TrainConfig,
    architecture,
)
from vitcli.data.records import Source
from vitcli.data.sources import open_data
from vitcli.data.transforms import TrainTransform
from vitcli.devices import choose_device, choose_precision
from vitcli.errors import ConfigError, RunError
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.folder import RunFolder, config_to_json
from vitcli.train.objectives import classification_loss, soft_targets
from vitcli.train.plan import LONG_SEQUENCE, Plan, make_plan
from vitcli.train.state import Progress, read_state_info
from vitcli.train.tensorboard import require_tensorboard

Report = Callable[[dict[str, Any]], None]

BEST_MODEL = "vit-b16-i21k"
"""What `vit finetune` starts from where it can."""
SHIPPED_MODEL = "default-pretrained"
"""What it starts from where it cannot: a registry alias of the model inside the package."""


@dataclass
class Run:
    """Everything that the loop works with."""

    config: TrainConfig
    plan: Plan
    model: ViT | BiT
    info: CheckpointInfo
    """Of the model as it is trained; `stored_info` is what its file says."""
    train: Source
    val: Source | None
    test: Source | None
    split: dict[str, Any]
    train_transform: TrainTransform
    device: torch.device
    dtype: torch.dtype
    scaler: torch.amp.GradScaler

    @property
    def preprocess(self) -> Preprocess:
        return self.info.preprocess

    def stored_info(self, progress: Progress, figures: dict[str, float]) -> CheckpointInfo:
        """The description that goes into the model's file."""
        model, preprocess = self.info.model, self.info.preprocess
        if self.config.save_patch_size:
            model = _at_patch_size(model, self.config.save_patch_size)
            preprocess = dataclasses.replace(preprocess, size=model.image_size)
        provenance = self.info.provenance | {
            "command": self.config.command,
            "seed": self.config.seed,
            "steps": progress.best_step,
            "seconds": round(progress.seconds),
            "figures": figures,
        }
        return dataclasses.replace(
            self.info, model=model, preprocess=preprocess, provenance=provenance
        )

    def write_config(self, folder: RunFolder) -> None:
        """config.json before there is a model: what --resume and --config read."""
        info = self.stored_info(Progress(), {})
        write_config(folder.config, info, config_to_json(self.config))

    def write_model(self, folder: RunFolder, progress: Progress) -> None:
        """The model as it is now, in the run's folder."""
        info = self.stored_info(progress, {})
        state = {name: value.detach().cpu() for name, value in self.model.state_dict().items()}
        state = adapt(state, self.info.model, info.model, self.config.posemb_method)
        train = config_to_json(self.config)
        save_checkpoint(folder.path, state, info, self.config.save_dtype, train=train)

    def plan_event(self, step: int) -> dict[str, Any]:
        """What is printed before step 1: the plan and an estimate of the time it takes."""
        config, model = self.config, self.info.model
        per_picture = seconds_per_picture(self)
        left = ((config.steps or 0) - step) * (config.batch_size or 0)
        return {
            "event": "plan",
            "model": self.info.provenance.get("parent") or config.variant,
            "parameters": self.plan.parameters,
            "resolution": list(model.image_size),
            "patch_size": list(model.patch_size),
            "tokens": self.plan.tokens,
            "train_pictures": len(self.train),
            "val_pictures": len(self.val) if self.val is not None else 0,
            "classes": model.num_classes,
            "steps": config.steps,
            "from_step": step,
            "epochs": self.plan.epochs,
            "batch_size": config.batch_size,
            "accumulate": config.accumulate,
            "optimizer": config.optimizer,
            "lr": config.lr,
            "warmup": config.warmup,
            "device": str(self.device),
            "precision": str(self.dtype).removeprefix("torch."),
            "estimated_seconds": left * per_picture,
        }


def prepare(
    config: TrainConfig, folder: RunFolder, resume: bool, offline: bool, report: Report
) -> Run:
    """Opens the data, reads the initial weights, plans the run and builds its model."""
    if config.tensorboard:
        require_tensorboard()
    device = choose_device(config.device)
    dtype = choose_precision(config.precision, device)
    start: CheckpointInfo | None = None
    if not resume:
        if config.task == "finetune" and config.model is None:
            config = dataclasses.replace(config, model=_initial_model(offline, report))
        start, tensors = _initial_weights(config, offline)
        _trained_shape(start.model, config)  # impossible sizes fail before data is read
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
        info = _describe(config, start, splits.train)
        model = _untrained(info.model, config)
        model.init_weights(config.seed, config.head_bias)
        if tensors:
            keep_head = config.task == "pretrain" and start.classes == info.classes
            _fill(model, tensors, start.model, config, keep_head)
    else:
        info = read_state_info(folder.state)
        if info.classes != splits.classes:
            raise RunError("the data has other classes than the run", where=config.data.path)
        model = _untrained(info.model, config)
    target, preprocess = info.model, info.preprocess
    plan = make_plan(config, target, len(splits.train), device)
    config = plan.config
    if isinstance(target, ModelConfig) and target.num_tokens > LONG_SEQUENCE:
        report({"event": "warning", "text": _long_sequence(target)})
    # Crops are enlarged as well as shrunk, and a box filter would show their pixels as squares.
    interpolation = "bicubic" if preprocess.interpolation == "box" else preprocess.interpolation
    return Run(
        config=config,
        plan=plan,
        model=model.to(device),
        info=info,
        train=splits.train,
        val=splits.val,
        test=splits.test,
        split=splits.record,
        train_transform=TrainTransform(target.image_size, interpolation, config.augment),
        device=device,
        dtype=dtype,
        scaler=torch.amp.GradScaler(device.type, enabled=dtype is torch.float16),
    )


def _initial_model(offline: bool, report: Report) -> str:
    """The best released model where it is cached or the Hub has it within 3 s, else ours."""
    entry = registry.entries()[BEST_MODEL]
    if hub.cached(entry.repo, entry.revision):
        return BEST_MODEL
    if not offline and hub.reachable(timeout=3.0, repo=entry.repo):
        return BEST_MODEL
    ours = registry.aliases()[SHIPPED_MODEL]
    text = (
        f"the Hub cannot be reached: starting from {ours}, the small model inside the package; "
        f"where the Hub can be reached, the same command starts from the much better {BEST_MODEL}"
    )
    report({"event": "warning", "text": text})
    return SHIPPED_MODEL


def _initial_weights(
    config: TrainConfig, offline: bool
) -> tuple[CheckpointInfo, dict[str, Tensor]]:
    """The checkpoint to start from; without one, a description and no tensors."""
    if config.model is not None:
        weights = load_weights(config.model, offline=offline)
        return weights.info, weights.tensors
    size = config.resolution or (224, 224)
    patch = {"patch_size": (config.patch_size,) * 2} if config.patch_size else {}
    model = architecture(config.variant, **{"image_size": size, **patch, **config.overrides})
    return CheckpointInfo(model, Preprocess(size=size)), {}


def _describe(config: TrainConfig, start: CheckpointInfo, train: Source) -> CheckpointInfo:
    """The model that the run trains: its checkpoint's, at the run's size and for its classes."""
    target = _trained_shape(start.model, config).with_classes(len(train.classes))
    if config.task == "finetune" and isinstance(target, ModelConfig):
        target = dataclasses.replace(target, pre_logits=0)
    preprocess = _preprocess(start, config, target.image_size)
    provenance = _provenance(config, start, train)
    return CheckpointInfo(target, preprocess, train.classes, config.loss, provenance)


def _untrained(model: Architecture, config: TrainConfig) -> ViT | BiT:
    if isinstance(model, ModelConfig):
        return ViT(model, config.dropout, config.drop_path)
    return BiT(model, config.dropout, config.drop_path)


def _trained_shape(model: Architecture, config: TrainConfig) -> Architecture:
    """The checkpoint's architecture at the patch size and the resolution of the run."""
    if config.patch_size:
        model = _at_patch_size(model, config.patch_size)
    return model.at(config.resolution) if config.resolution else model


def _at_patch_size(model: Architecture, patch: int) -> Architecture:
    """The same grid of patches of another size, so another resolution."""
    if isinstance(model, BiTConfig):
        raise ConfigError("a ResNet has no patches: leave the patch size out")
    rows, columns = model.grid
    size = (rows * patch, columns * patch)
    return dataclasses.replace(model, patch_size=(patch, patch), image_size=size)


def _preprocess(start: CheckpointInfo, config: TrainConfig, size: Size) -> Preprocess:
    """The checkpoint's at the run's size; fine-tuning squashes and does not crop, as the paper's
    authors do (vit_jax/input_pipeline.py)."""
    whole: dict[str, Any] = (
        {"crop_mode": "squash", "crop_pct": 1.0} if config.task == "finetune" else {}
    )
    fields = whole | config.preprocess
    unknown = set(fields) - {field.name for field in dataclasses.fields(Preprocess)}
    if unknown:
        raise ConfigError(f"pre-processing has no field {', '.join(sorted(unknown))}")
    return dataclasses.replace(start.preprocess, size=size, **fields)


def _fill(
    model: ViT | BiT,
    tensors: dict[str, Tensor],
    old: Architecture,
    config: TrainConfig,
    keep_head: bool,
) -> None:
    """Copies a checkpoint's weights in, resampled; the head stays zero unless it is kept."""
    dropped: tuple[str, ...] = () if keep_head else ("head.", "head_dist.")
    if isinstance(model.config, ModelConfig) and not model.config.pre_logits:
        dropped += ("pre_logits.",)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    kept = adapt(kept, old, model.config, config.posemb_method)
    missing, unexpected = model.load_state_dict(kept, strict=False)
    lost = [name for name in missing if not name.startswith(dropped or ("?",))]
    if lost or unexpected:
        raise RunError(f"the initial weights do not fit: {[*lost, *unexpected]}")


def _provenance(config: TrainConfig, start: CheckpointInfo, train: Source) -> dict[str, Any]:
    """Where the model comes from; data by its name alone, never by its path."""
    provenance: dict[str, Any] = {
        "made_by": f"vit {config.task} (vitcli {vitcli.__version__}, torch {torch.__version__})",
        "data": Path(config.data.path).name,
        "train_pictures": len(train),
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
        f"{model.num_tokens:,} tokens a picture: attention's time and memory grow with the square; "
        f"a lower --resolution or a larger patch makes this much faster"
    )


def seconds_per_picture(run: Run) -> float:
    """Times micro-batches of noise, forward and backward; changes no weight, and leaves the random
    generators as they were."""
    model, size = run.model, run.info.model
    count = max(1, min(32, (run.config.batch_size or 1) // (run.config.accumulate or 1)))
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        images = torch.zeros((count, 3, *size.image_size), device=run.device)
        labels = torch.zeros(count, dtype=torch.int64, device=run.device)
        targets = soft_targets(labels, size.num_classes, run.config)
        model.train()
        times: list[float] = []
        while len(times) < 2 or (len(times) < 8 and sum(times) < 2.0):  # the first one warms up
            begin = time.perf_counter()
            with torch.autocast(run.device.type, run.dtype, enabled=run.dtype is not torch.float32):
                logits = model(images)
            classification_loss(logits, targets, run.config).backward()
            logits.sum().item()  # waits for the device
            times.append(time.perf_counter() - begin)
            model.zero_grad(set_to_none=True)
    return min(times) / count
