"""A run: all that the loop works with, and the description that its files carry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.adapt import adapt
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint, write_config
from vitcli.config import Architecture, BiTConfig, Preprocess
from vitcli.data.dataset import Splits
from vitcli.distributed import Ranks
from vitcli.errors import ConfigError, DataError, ImageError, RunError
from vitcli.inference import Inference
from vitcli.models.lora import merged
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.directory import RunDirectory
from vitcli.train.events import Caution, OnEvent
from vitcli.train.objectives import Objective
from vitcli.train.optim import MovingAverage
from vitcli.train.parallel import whole
from vitcli.train_config import TrainConfig
from vitcli.words import counted

LEAST_BAD = 100
"""Unreadable images that a run of any size tolerates by default. A broken copy of a dataset has
more than a tenth; a few in a million must not end a long run."""
NAMED_SKIPS = 20
"""Unreadable images that are named; the others are only counted."""


@dataclass
class Progress:
    """How far a run is; saved with its state."""

    step: int = 0
    seconds: float = 0.0
    """Training time so far, evaluations included, over all processes of an interrupted run."""
    best_step: int = 0
    """The step of the stored weights."""
    best_averaged: bool = False
    """Whether these are the average, not the model itself."""
    stored_score: float | None = None
    """Theirs on validation (`Objective.score`)."""
    best_score: float | None = None
    """The best on validation."""
    stale: int = 0
    """Evaluations since."""
    stopped_by: int | None = None
    """The signal that a state was saved for."""

    def lost_patience(self, config: TrainConfig) -> bool:
        """Whether too many evaluations have passed without a better one."""
        return config.patience is not None and self.stale >= config.patience


@dataclass
class Run:
    """Everything that the loop works with. What changes from step to step is in `objective`,
    `averaged`, `optimizer`, `scaler` and `progress`: the state that `state.py` saves."""

    config: TrainConfig
    """Without gaps: `plan.py` has filled them."""
    directory: RunDirectory
    objective: Objective
    averaged: MovingAverage | None
    """The Polyak average of the objective over the steps (`TrainConfig.ema`)."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    info: CheckpointInfo
    """Of the model as it is trained; `stored_info` is what its file says."""
    splits: Splits
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    on_event: OnEvent
    """Called with every event of this rank; does nothing on all but the first."""
    progress: Progress = field(default_factory=Progress)
    skipped: set[str | None] = field(default_factory=set)
    """Images that this process could not read."""

    @property
    def model(self) -> ViT | BiT:
        """What the run stores."""
        model: ViT | BiT = self.objective.model
        return model

    @property
    def steps(self) -> int:
        return self.config.steps or 0

    @property
    def batch_size(self) -> int:
        return self.config.batch_size or 1

    @property
    def part(self) -> range:
        """The places of this rank's images in a global batch."""
        return self.ranks.share(self.batch_size)

    @property
    def micro_batches(self) -> int:
        return self.config.accumulate or 1

    @property
    def workers(self) -> int:
        return self.config.workers or 0

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

    def stored_info(self, metrics: dict[str, float]) -> CheckpointInfo:
        """The description that goes into the model's file."""
        model, preprocess = self.info.model, self.info.preprocess
        if self.config.save_patch_size:
            model = at_patch_size(model, self.config.save_patch_size)
            preprocess = dataclasses.replace(preprocess, size=model.image_size)
        provenance: dict[str, Any] = self.info.provenance | {
            "command": self.config.command,
            "seed": self.config.seed,
            "steps": self.progress.best_step,
            "seconds": round(self.progress.seconds),
            "metrics": metrics,
        }
        if self.config.store == "last":
            provenance["store"] = "last"
        if self.progress.best_averaged:
            provenance["ema"] = self.config.ema
        return dataclasses.replace(
            self.info, model=model, preprocess=preprocess, provenance=provenance
        )

    def inference(self, model: nn.Module) -> Inference:
        """The model, or its average, as `vit predict` would compute with it."""
        return Inference(self.info, _whole_state(model), self.device, self.dtype)

    def write_config(self) -> None:
        """config.json as it is before there are metrics: what --resume and --config read."""
        train = dataclasses.asdict(self.config)
        write_config(self.directory.config, self.stored_info({}), train)

    def write_model(self) -> None:
        """Stores the model, or its average, as it is now."""
        average = self.averaged if self.progress.best_averaged else None
        objective: Any = self.objective if average is None else average.module
        info, state = self.stored_info({}), _whole_state(objective.model)
        beside = {name: whole(value).cpu().numpy() for name, value in objective.beside().items()}
        if self.ranks.is_first:
            if beside:
                tensor_file.write(self.directory.decoder, beside, {})
            state = {name: value.detach().cpu() for name, value in state.items()}
            state = adapt(state, self.info.model, info.model, self.config.posemb_method)
            train = dataclasses.asdict(self.config)
            save_checkpoint(self.directory.path, state, info, self.config.save_dtype, train=train)
        self.ranks.wait()

    def skip(self, error: ImageError) -> None:
        """Counts an unreadable image once, writes it to skipped.jsonl, and names the first ones.

        Raises:
            DataError: there are more than `TrainConfig.max_bad`.
        """
        most = self.config.max_bad
        if most is None:
            most = max(LEAST_BAD, len(self.splits.train) // 10)
        if error.where in self.skipped:
            return
        self.skipped.add(error.where)
        if self.directory.append_skipped(error.where, error.what) > most:
            raise DataError(
                f"more than {counted(most, 'image')} cannot be read",
                where=self.directory.skipped,
                hint="repair or remove them, or allow more with --max-bad",
            ) from error
        if len(self.skipped) <= NAMED_SKIPS:
            self.on_event(Caution(f"skipped {error.where}: {error.what}"))

    def split_further(self) -> None:
        """Sends each batch through the model in more micro-batches, for less memory.

        Raises:
            RunError: a micro-batch is one image already.
        """
        if self.micro_batches >= self.batch_size:
            raise out_of_memory()
        more = min(2 * self.micro_batches, self.batch_size)
        self.config = dataclasses.replace(self.config, accumulate=more)


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors, also where each rank holds a part of them."""
    return merged({name: whole(tensor) for name, tensor in model.state_dict().items()})


def out_of_memory() -> RunError:
    """The error when a single image does not fit into memory."""
    return RunError(
        "out of memory with one image at a time",
        hint="use a lower --resolution or a smaller --model",
    )


def at_patch_size(model: Architecture, patch: int) -> Architecture:
    """The same grid of patches of another size, so another resolution.

    Raises:
        ConfigError: it has no patches.
    """
    if isinstance(model, BiTConfig):
        hint = "leave out --patch-size and --save-patch-size"
        raise ConfigError("a ResNet has no patches", hint=hint)
    rows, columns = model.grid
    size = (rows * patch, columns * patch)
    return dataclasses.replace(model, patch_size=(patch, patch), image_size=size)
