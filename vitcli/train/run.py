"""A run: all that the loop works with, what it stores, and what it says of itself."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from vitcli.checkpoints.adapt import adapt
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint, write_config
from vitcli.config import Architecture, BiTConfig, Preprocess
from vitcli.data.source import Source
from vitcli.data.transforms import TrainTransform
from vitcli.devices import ran_out_of_memory
from vitcli.errors import ConfigError, RunError
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.directory import RunDirectory, config_to_json
from vitcli.train.inputs import has_fixed_features
from vitcli.train.layers import set_training
from vitcli.train.objectives import classification_loss, soft_targets
from vitcli.train.plan import Plan
from vitcli.train.state import Progress
from vitcli.train_config import TrainConfig


@dataclass
class Run:
    """Everything that the loop works with."""

    config: TrainConfig
    plan: Plan
    model: ViT | BiT
    averaged: AveragedModel | None
    """Its Polyak average over the steps (`TrainConfig.ema`)."""
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

    class_weights: Tensor | None = None
    """(K,), on the device."""

    @property
    def part_size(self) -> int:
        """Images of a micro-batch."""
        return (self.config.batch_size or 1) // (self.config.accumulate or 1)

    @property
    def precision(self) -> str:
        """What the model computes in: "bfloat16", "float32" or "float16"."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> torch.autocast:
        """The context that the model computes in."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    @property
    def preprocess(self) -> Preprocess:
        return self.info.preprocess

    def stored_info(self, progress: Progress, figures: dict[str, float]) -> CheckpointInfo:
        """The description that goes into the model's file."""
        model, preprocess = self.info.model, self.info.preprocess
        if self.config.save_patch_size:
            model = at_patch_size(model, self.config.save_patch_size)
            preprocess = dataclasses.replace(preprocess, size=model.image_size)
        provenance = self.info.provenance | {
            "command": self.config.command,
            "seed": self.config.seed,
            "steps": progress.best_step,
            "seconds": round(progress.seconds),
            "metrics": figures,
        }
        if progress.best_averaged:
            provenance["ema"] = self.config.ema
        return dataclasses.replace(
            self.info, model=model, preprocess=preprocess, provenance=provenance
        )

    def write_config(self, folder: RunDirectory, progress: Progress) -> None:
        """config.json as it is before there are figures: what --resume and --config read."""
        info = self.stored_info(progress, {})
        write_config(folder.config, info, config_to_json(self.config))

    def write_model(self, folder: RunDirectory, progress: Progress) -> None:
        """The model, or its average, as it is now, in the run's folder."""
        average = self.averaged if progress.best_averaged else None
        model = self.model if average is None else average.module
        info = self.stored_info(progress, {})
        state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
        state = adapt(state, self.info.model, info.model, self.config.posemb_method)
        train = config_to_json(self.config)
        save_checkpoint(folder.path, state, info, self.config.save_dtype, train=train)

    def split_further(self) -> None:
        """Sends each batch through the model in more parts, for less memory.

        Raises:
            RunError: a part is one image already.
        """
        batch, now = self.config.batch_size or 1, self.config.accumulate or 1
        more = next((k for k in range(2 * now, batch + 1) if batch % k == 0), batch)
        if more == now:
            raise _too_large()
        self.config = dataclasses.replace(self.config, accumulate=more)

    def plan_event(self, step: int) -> dict[str, Any]:
        """What is printed before step 1: the plan and an estimate of the time it takes."""
        config, model = self.config, self.info.model
        images = ((config.steps or 0) - step) * (config.batch_size or 0)
        val = len(self.val) if self.val is not None else 0
        parts = config.accumulate
        if has_fixed_features(self):
            images, parts = len(self.train) + val, 1
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        return {
            "event": "plan",
            "model": self.info.provenance.get("parent") or config.variant,
            "parameters": self.plan.parameters,
            "trained_parameters": self.plan.parameters - frozen,
            "resolution": list(model.image_size),
            "patch_size": list(model.patch_size),
            "tokens": self.plan.tokens,
            "train_images": len(self.train),
            "val_images": val,
            "classes": model.num_classes,
            "steps": config.steps,
            "from_step": step,
            "epochs": self.plan.epochs,
            "batch_size": config.batch_size,
            "accumulate": parts,
            "optimizer": config.optimizer,
            "lr": config.lr,
            "warmup": config.warmup,
            "device": str(self.device),
            "precision": self.precision,
            "estimated_seconds": images * seconds_per_image(self),
        }


def seconds_per_image(run: Run) -> float:
    """Times micro-batches of noise, forward and backward; changes no weight, and leaves the random
    generators as they were.

    Raises:
        RunError: one image takes more memory than there is.
    """
    count = max(1, min(32, run.part_size))
    with torch.random.fork_rng(devices=[run.device] if run.device.type == "cuda" else []):
        set_training(run.model, run.config.freeze)
        while True:
            try:
                return min(_times(run, count)) / count
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
            if count == 1:
                raise _too_large()
            count //= 2


def _times(run: Run, count: int) -> list[float]:
    """Seconds of passes over `count` images: two at least, and more within two seconds."""
    model, config = run.model, run.info.model
    images = torch.zeros((count, 3, *config.image_size), device=run.device)
    labels = torch.zeros(count, dtype=torch.int64, device=run.device)
    targets = soft_targets(labels, config.num_classes, run.config)
    times: list[float] = []
    while len(times) < 2 or (len(times) < 8 and sum(times) < 2.0):  # the first one warms up
        begin = time.perf_counter()
        with run.autocast():
            logits = model(images)
        classification_loss(logits, targets, run.config).backward()
        logits.sum().item()  # waits for the device
        times.append(time.perf_counter() - begin)
        model.zero_grad(set_to_none=True)
    return times


def _too_large() -> RunError:
    return RunError(
        "memory runs out with one image at a time",
        hint="take a lower --resolution, or a smaller --model",
    )


def at_patch_size(model: Architecture, patch: int) -> Architecture:
    """The same grid of patches of another size, so another resolution.

    Raises:
        ConfigError: it has no patches.
    """
    if isinstance(model, BiTConfig):
        raise ConfigError("a ResNet has no patches: leave the patch size out")
    rows, columns = model.grid
    size = (rows * patch, columns * patch)
    return dataclasses.replace(model, patch_size=(patch, patch), image_size=size)
