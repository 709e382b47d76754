"""What a model, its pre-processing, a data set and a training run are: dataclasses and tables.

Standard library only, so that every command can read a configuration before (or without) torch.
The models' part is in `architectures.py` and `resnets.py`; this is the door to all of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitcli.architectures import (
    VARIANTS,
    Activation,
    Architecture,
    ModelConfig,
    Pool,
    Posemb,
    architecture,
    bit_config,
    model_config,
    variant_name,
)
from vitcli.choices import check_choices, check_range
from vitcli.errors import ConfigError
from vitcli.resnets import BiTConfig, ResNetConfig, Size

__all__ = [
    "FIGURES",
    "TASK_DEFAULTS",
    "VARIANTS",
    "Activation",
    "Architecture",
    "AugmentConfig",
    "BiTConfig",
    "ClassLabel",
    "DataConfig",
    "FewshotConfig",
    "ModelConfig",
    "Pool",
    "Posemb",
    "PosembMethod",
    "Preprocess",
    "ResNetConfig",
    "Score",
    "Size",
    "TrainConfig",
    "architecture",
    "bit_config",
    "model_config",
    "nearest",
    "variant_name",
]

PosembMethod = Literal["bilinear", "bicubic", "bicubic-hf"]
Score = Literal["softmax", "sigmoid", "none"]
"""What makes scores of logits; none: a regression, whose outputs are the values themselves."""


# ---------------------------------------------------------------------------------------------
# What goes in and what comes out


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes a model's input. Comes from the checkpoint, never from a default."""

    size: Size = (224, 224)
    """Height and width of the model's input."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from RGB in [0, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Divides what is left."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "lanczos"] = "bicubic"
    """Pillow's filter."""
    crop_pct: float = 1.0
    """The part of the resized image that the crop keeps: it is resized to size / crop_pct."""
    crop_mode: Literal["center", "squash", "border"] = "center"
    """center: shorter side resized, centre cropped; squash: both sides resized; border: longer
    side resized, the rest filled with the mean (letterbox). timm's names."""
    antialias: bool = True
    """False, with bilinear: each pixel is interpolated from its four nearest alone, however much
    the image shrinks, as the authors' code does (tf.image.resize)."""

    def __post_init__(self) -> None:
        check_choices(self)
        if min(self.size) < 1:
            raise ConfigError(f"an image cannot have the size {self.size}")
        if not self.antialias and self.interpolation != "bilinear":
            raise ConfigError(f"antialias=False is for bilinear, not {self.interpolation}")
        if not 0 < self.crop_pct <= 1:
            raise ConfigError(f"crop_pct must be above 0 and at most 1, not {self.crop_pct}")
        if min(self.std) <= 0:
            raise ConfigError(f"std must be positive, not {self.std}")


class ClassLabel(NamedTuple):
    """A class: its identity (WordNet synset where known, else the folder's name) and its name.

    Names are not identities: ImageNet-1k has two classes called "crane".
    """

    id: str
    name: str


# ---------------------------------------------------------------------------------------------
# Data and training


@dataclass(frozen=True)
class DataConfig:
    """Where images and labels come from, and how they are split."""

    path: str
    """A folder of class folders, a CSV, a parquet file or folder, or tar shards."""
    classes: str | None = None
    """A file with one class a line (id, or id TAB name), for data without class names."""
    val_fraction: float = 0.1
    """The part held out for validation, by class, where the data has no validation part."""
    split_seed: int = 0
    """Seed of that split, apart from the run's seed: runs with other seeds compare on one split."""
    merge_val: bool = False
    """Train on the validation part as well, and validate on nothing: for the last run, once
    everything is chosen. A test part is never trained on."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction must be in [0, 1), not {self.val_fraction}")


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training image. Every draw depends on (seed, epoch, sample) alone."""

    crop_area: tuple[float, float] = (0.05, 1.0)
    """Inception crop: the part of the image's area that is kept; (1, 1) resizes only."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Inception crop: aspect ratio, width over height."""
    flip: bool = True
    """Mirror half of the images."""
    randaugment: tuple[int, int] | None = None
    """RandAugment (layers, magnitude), as in (2, 10)."""
    erasing: float = 0.0
    """Probability of random erasing."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution, one draw a batch; 0 means none."""
    cutmix: float = 0.0
    """Alpha of cutmix's; with both, a fair coin chooses for each batch."""

    def __post_init__(self) -> None:
        check_range(self, 0.0, math.inf, "mixup", "cutmix")
        check_range(self, 0.0, 1.0, "erasing")
        if not 0 < self.crop_area[0] <= self.crop_area[1] <= 1:
            raise ConfigError(f"crop_area must rise within (0, 1], not {self.crop_area}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf:
            raise ConfigError(f"crop_ratio must rise above 0, not {self.crop_ratio}")
        if self.randaugment and not (self.randaugment[0] >= 1 and 0 <= self.randaugment[1] <= 30):
            raise ConfigError(
                f"randaugment must be layers from 1 and a magnitude to 30, not {self.randaugment}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """One run of `vit pretrain` or `vit finetune`; None means that the auto rule decides."""

    data: DataConfig
    """What to learn."""
    output: str
    """The run's folder."""
    command: str = ""
    """How the user called it, for the model card."""
    note: str = ""
    """A line for the model card."""
    task: Literal["pretrain", "finetune"] = "finetune"
    """Where the weights start and which defaults hold; the loop is one."""
    model: str | None = None
    """finetune: the checkpoint to start from. pretrain: a checkpoint to go on from, or None."""
    keep_head: bool = False
    """finetune: keep the head's rows of the classes that the checkpoint knows, and with them its
    pre_logits and its way to crop."""
    variant: str = "Ti/16"
    """pretrain: the architecture, as in B/16."""
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    """pretrain: fields of ModelConfig that depart from the variant."""
    resolution: Size | None = None
    """Height and width; None: the checkpoint's."""
    posemb_method: PosembMethod = "bilinear"
    """How position embeddings are resized; the paper's by default."""
    patch_size: int | None = None
    """Patch size to train at; the patch embedding is resampled (`patches.py`)."""
    save_patch_size: int | None = None
    """Patch size of the stored model; its resolution grows with it, the grid stays."""
    preprocess: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Preprocess that depart from the checkpoint's, as in {"crop_mode": "center"}."""
    augment: AugmentConfig = AugmentConfig()
    """What happens to a training image."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax cross-entropy, or sigmoid (binary) cross-entropy."""
    class_weights: Literal["balanced"] | dict[str, float] | None = None
    """How much images of a class count: {class: weight}, or inversely to how many there are."""
    balanced_sampling: bool = False
    """Whether an epoch shows as many images of every class."""
    label_smoothing: float = 0.0
    """The part of a label that is spread over all classes."""
    head_bias: float = 0.0
    """Initial bias of the head (big_vision's sigmoid recipes: -10 for i21k, -6.9 for i1k)."""
    freeze: Literal["backbone"] | int | None = None
    """What is not trained: all but the head, or the stem and the first N blocks."""
    layer_decay: float | None = None
    """Factor on the learning rate from each layer to the one below it, as 0.75 (BEiT)."""
    dropout: float = 0.0
    """Dropout after every dense layer but q, k, v, and after the position embeddings."""
    drop_path: float = 0.0
    """Stochastic depth of the last block; rises linearly from 0."""
    steps: int | None = None
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the training part; sets the steps."""
    batch_size: int | None = None
    """Images in one optimizer step."""
    accumulate: int | None = None
    """Micro-batches that one batch is split into; None: as many as memory asks for."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """sgd with momentum; adam with L2 decay; adamw with decoupled decay."""
    lr: float | None = None
    """Peak learning rate."""
    sweep: tuple[float, ...] = ()
    """Peak learning rates to try; the one with the best validation accuracy becomes `lr`."""
    retrain: bool = True
    """After a sweep, train once more with that rate, on training and validation part together;
    else the best run of the sweep is kept."""
    momentum: float = 0.9
    """Momentum of sgd."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Betas of adam and adamw."""
    weight_decay: float = 0.0
    """w -= lr * weight_decay * w with adamw; added to the gradient with sgd and adam. Acts on
    matrices alone."""
    warmup: int | None = None
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate to 0 after the warm-up."""
    clip_norm: float | None = 1.0
    """Global norm that gradients are clipped at."""
    ema: float | None = None
    """Decay of the weights' running average (Polyak's), which is evaluated beside them."""
    patience: int | None = None
    """Evaluations without a better accuracy after which the run ends."""
    seed: int = 0
    """Decides the initial weights, the order, the augmentation and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of activations; weights and optimizer state stay float32."""
    workers: int | None = None
    """Processes that decode images."""
    eval_every: int | None = None
    """Steps between evaluations."""
    save_every: int | None = None
    """Steps between resumable states."""
    tensorboard: bool = False
    """Write the figures for TensorBoard too."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the weights in model.safetensors."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_range(self, 1, math.inf, "steps", "batch_size", "accumulate", "eval_every")
        check_range(self, 1, math.inf, "save_every", "patch_size", "save_patch_size")
        check_range(self, 0.0, math.inf, "warmup", "weight_decay", "momentum", "seed")
        for name in ("epochs", "lr", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0, not {value}")
        for rate in self.sweep:
            if not 0 < rate < math.inf:
                raise ConfigError(f"a learning rate must be above 0, not {rate:g}")
            if self.sweep.count(rate) > 1:
                raise ConfigError(f"the sweep has the learning rate {rate:g} more than once")
        check_range(self, 1, math.inf, "patience")
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ConfigError(f"layer_decay must be in (0, 1], not {self.layer_decay}")
        if isinstance(self.freeze, int) and self.freeze < 0:
            raise ConfigError(f"freeze must be backbone or a number from 0, not {self.freeze}")
        if self.class_weights == "balanced" and self.balanced_sampling:
            raise ConfigError(
                "balanced sampling has no classes left to weigh against each other",
                hint="leave --class-weights or --balanced-sampling out",
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ConfigError(f"ema must be between 0 and 1, as 0.9999, not {self.ema}")
        for name in ("label_smoothing", "dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.batch_size and self.batch_size % (self.accumulate or 1):
            raise ConfigError(
                f"a batch of {self.batch_size} does not split into {self.accumulate} equal parts"
            )


@dataclass(frozen=True)
class FewshotConfig:
    """Few-shot classification on frozen features; the defaults are the protocol of big_vision
    (evaluators/fewshot_lsr.py), which is the paper's (section 4.1)."""

    data: DataConfig
    """Where the images are. Tested on the test part, else on the validation part."""
    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Training images of each class."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each draws other training images."""
    l2: tuple[float, ...] = (2.0**10,)
    """Strengths of regularisation; empty: one chosen for each draw by its left-out errors."""
    pool: Literal["head", Pool] = "head"
    """What is read of the tokens: as the model's head does, the class token, the mean of the
    patches, both, or the model's attention query."""
    layer: int | None = None
    """Blocks, from the first on, that the model is cut after; None: all. Its final norm stays."""
    preprocess: Literal["big_vision", "checkpoint"] = "big_vision"
    """big_vision: squash to 256 without antialiasing, centre crop of 224 (in proportion for
    another size); checkpoint: its own. Size, mean and std are the checkpoint's in both."""

    def __post_init__(self) -> None:
        check_choices(self)
        for name, values, least in (("shots", self.shots, 1), ("seeds", self.seeds, 0)):
            if not values or min(values) < least or len(set(values)) < len(values):
                raise ConfigError(f"{name} must be different whole numbers from {least} on")
        if not all(0 <= value < math.inf for value in self.l2):
            raise ConfigError("l2 must be a number from 0 on")
        check_range(self, 1, math.inf, "layer")


TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "pretrain": {"optimizer": "adamw", "weight_decay": 0.1},
}
"""Where `vit pretrain` departs from the defaults of TrainConfig, which are fine-tuning's."""


FIGURES = {
    "top1": ("accuracy", "top-1"),
    "top5": ("accuracy", "top-5"),
    "macro_f1": ("f1", "macro F1"),
    "ece": ("ece", "ECE"),
}
"""What is said of an evaluation in one line: the kind of each figure, and its name."""


def nearest(name: str, known: list[str], n: int = 3) -> list[str]:
    """The names most like a mistyped one, best first."""
    return difflib.get_close_matches(name.lower(), known, n=n, cutoff=0.5)
