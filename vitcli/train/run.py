"""A run: everything that the training loop works with, and the metadata of its files."""

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
from vitcli.models.lora import merge_lora
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.config import TrainConfig
from vitcli.train.directory import RunDirectory
from vitcli.train.events import Caution, OnEvent
from vitcli.train.objectives import Objective
from vitcli.train.optim import MovingAverage
from vitcli.train.parallel import unshard
from vitcli.words import pluralize

DEFAULT_MAX_BAD = 100
"""Unreadable images that a run of any size tolerates by default. A broken copy of a dataset has
more than a tenth; a few in a million must not end a long run."""
MAX_SKIP_WARNINGS = 20
"""Unreadable images that are named in warnings; the others are only counted."""


@dataclass
class Progress:
    """Progress of a run; saved in its state."""

    step: int = 0
    seconds: float = 0.0
    """Training time so far, including evaluations, over all processes of an interrupted run."""
    best_step: int = 0
    """The step of the stored weights."""
    best_averaged: bool = False
    """Whether the stored weights are the moving average."""
    stored_score: float | None = None
    """Validation score of the stored weights: the accuracy, or without classes minus the loss."""
    best_score: float | None = None
    """Best validation score."""
    best_loss: float = 0.0
    """Its validation loss."""
    stale: int = 0
    """Evaluations since the best score."""

    def should_stop_early(self, config: TrainConfig) -> bool:
        """Whether `patience` evaluations have passed without an improvement."""
        return 0 < (config.patience or 0) <= self.stale


@dataclass
class Run:
    """Everything that the training loop works with. `objective`, `averaged`, `optimizer`, `scaler`
    and `progress` change from step to step: they are the state that `state.py` saves."""

    config: TrainConfig
    """Complete: `plan.py` has filled in unset options."""
    directory: RunDirectory
    objective: Objective
    averaged: MovingAverage | None
    """The exponential moving average of the objective's weights (`TrainConfig.ema`)."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    info: CheckpointInfo
    """Metadata of the model in training; `stored_info` is that of its file."""
    splits: Splits
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks
    on_event: OnEvent
    """Called with every event of this rank; a no-op on all ranks but the first."""
    progress: Progress = field(default_factory=Progress)
    skipped: set[str | None] = field(default_factory=set)
    """Unreadable images that this process has found."""

    @property
    def model(self) -> ViT | BiT:
        """The model that the run stores."""
        model: ViT | BiT = self.objective.model
        return model

    @property
    def is_backbone_frozen(self) -> bool:
        """Whether only the head is trained."""
        parameters = self.model.named_parameters()
        return all(name.startswith("head.") for name, p in parameters if p.requires_grad)

    @property
    def steps(self) -> int:
        return self.config.steps or 0

    @property
    def batch_size(self) -> int:
        return self.config.batch_size or 1

    @property
    def part(self) -> range:
        """Positions of this rank's images in a global batch."""
        return self.ranks.share(self.batch_size)

    @property
    def micro_batches(self) -> int:
        return self.config.accumulate or 1

    @property
    def workers(self) -> int:
        return self.config.workers or 0

    @property
    def precision(self) -> str:
        """The data type of the computation: "bfloat16", "float32" or "float16"."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> torch.autocast:
        """Return the autocast context of the forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32)

    @property
    def preprocess(self) -> Preprocess:
        return self.info.preprocess

    def stored_info(self, metrics: dict[str, float]) -> CheckpointInfo:
        """Return the metadata for the model's file."""
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
        """Return the model, or its average, set up for inference as in `vit predict`."""
        return Inference(self.info, _full_state_dict(model), self.device, self.dtype)

    def write_config(self) -> None:
        """Write config.json without metrics, for --resume and --config."""
        train = dataclasses.asdict(self.config)
        write_config(self.directory.config, self.stored_info({}), train)

    def write_model(self) -> None:
        """Store the current weights of the model or its average."""
        average = self.averaged if self.progress.best_averaged else None
        objective: Any = self.objective if average is None else average.module
        info, state = self.stored_info({}), _full_state_dict(objective.model)
        aux = {name: unshard(value).cpu().numpy() for name, value in objective.aux_state().items()}
        if self.ranks.is_first:
            if aux:
                tensor_file.write(self.directory.decoder, aux, {})
            state = {name: value.detach().cpu() for name, value in state.items()}
            state = adapt(state, self.info.model, info.model, self.config.posemb_method)
            train = dataclasses.asdict(self.config)
            save_checkpoint(self.directory.path, state, info, self.config.save_dtype, train=train)
        self.ranks.barrier()

    def skip(self, error: ImageError) -> None:
        """Count an unreadable image once, log it to skipped.jsonl, and warn of the first few.

        Raises:
            DataError: there are more than `TrainConfig.max_bad`.
        """
        max_bad = self.config.max_bad
        if max_bad is None:
            max_bad = max(DEFAULT_MAX_BAD, len(self.splits.train) // 10)
        if error.where in self.skipped:
            return
        self.skipped.add(error.where)
        if self.directory.append_skipped(error.where, error.what) > max_bad:
            raise DataError(
                f"more than {pluralize(max_bad, 'image')} cannot be read",
                where=self.directory.skipped,
                hint="repair or remove them, or allow more with --max-bad; then use --resume",
            ) from error
        if len(self.skipped) <= MAX_SKIP_WARNINGS:
            self.on_event(Caution(f"skipped {error.where}: {error.what}"))

    def split_further(self) -> None:
        """Split each batch into more micro-batches, to use less memory.

        Raises:
            RunError: a micro-batch is already a single image.
        """
        if self.micro_batches >= self.batch_size:
            raise out_of_memory()
        micro_batches = min(2 * self.micro_batches, self.batch_size)
        self.config = dataclasses.replace(self.config, accumulate=micro_batches)


def _full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's full state dict: gathered if sharded, with LoRA updates merged."""
    return merge_lora({name: unshard(tensor) for name, tensor in model.state_dict().items()})


def out_of_memory() -> RunError:
    """The RunError for a single image that does not fit into memory."""
    return RunError(
        "out of memory with one image at a time",
        hint="use a lower --resolution or a smaller --model",
    )


def at_patch_size(model: Architecture, patch: int) -> Architecture:
    """Change the patch size of an architecture; the grid stays the same, so the resolution changes.

    Raises:
        ConfigError: the model has no patches.
    """
    if isinstance(model, BiTConfig):
        hint = "leave out --patch-size and --save-patch-size"
        raise ConfigError("a ResNet has no patches", hint=hint)
    rows, columns = model.grid
    size = (rows * patch, columns * patch)
    return dataclasses.replace(model, patch_size=(patch, patch), image_size=size)
