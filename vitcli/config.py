"""What a model, its pre-processing, a data set and a training run are: dataclasses and tables.

Standard library only, so that every command can read a configuration before (or without) torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitcli.errors import ConfigError

Size = tuple[int, int]
"""(height, width)."""

Pool = Literal["token", "gap", "map"]
Posemb = Literal["learn", "learn2d", "sincos2d", "none"]
PosembMethod = Literal["bilinear", "bicubic", "bicubic-hf"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]
Score = Literal["softmax", "sigmoid"]


# ---------------------------------------------------------------------------------------------
# The model


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a Vision Transformer: what its checkpoint stores and nothing else.

    Names of sizes are the paper's (arXiv 2010.11929, section 3.1 and Table 1).
    """

    width: int
    """D, the size of a token."""
    depth: int
    """Number of Transformer blocks."""
    num_heads: int
    """Attention heads; each has width / num_heads channels."""
    mlp_dim: int
    """Hidden size of a block's MLP (with SwiGLU: gate and value together)."""
    patch_size: Size = (16, 16)
    """Height and width of a patch in pixels."""
    image_size: Size = (224, 224)
    """Height and width of the pictures that the position embeddings are made for."""
    num_classes: int = 0
    """Outputs of the head; 0 means no head, and `model(images)` gives features."""
    class_token: bool = True
    """A learned token in front of the patches."""
    distill_token: bool = False
    """DeiT's second token with a head of its own; the logits are the mean of both heads."""
    num_registers: int = 0
    """Learned tokens between the class token and the patches that nothing reads."""
    posemb: Posemb = "learn"
    """learn: one vector per token; learn2d: D/2 for the row and D/2 for the column (paper D.4);
    sincos2d: fixed, big_vision's; none."""
    posemb_tokens: Literal["all", "class", "patches"] = "all"
    """Which tokens the position embeddings are added to: prefix tokens and patches, class token
    and patches (registers without), or patches alone."""
    pool: Pool = "token"
    """What the head reads: the class token, the mean of the patches, or one attention query."""
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    final_norm: bool = True
    """A LayerNorm over the tokens after the last block."""
    fc_norm: bool = False
    """A LayerNorm after pooling."""
    pre_logits: int = 0
    """Size of the tanh layer before the head (the paper's pre-training head); 0 means none."""
    layer_scale: bool = False
    """A learned factor per channel on each branch of a block."""
    qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    patch_bias: bool = True
    """Bias of the patch embedding."""
    activation: Activation = "gelu"
    """gelu: exact (timm, transformers); gelu_tanh: the authors' flax code; quick_gelu: CLIP."""
    swiglu: bool = False
    """SiLU-gated MLP, gate first, in one matrix (DINOv2 giant)."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "num_heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % self.num_heads:
            raise ConfigError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        for axis, size, patch in zip(
            ("height", "width"), self.image_size, self.patch_size, strict=True
        ):
            if patch < 1 or size < patch:  # not `size % patch`: SigLIP has patches of 14 at 384
                raise ConfigError(f"{axis} {size} does not hold a patch of {patch}")
        if self.num_classes < 0 or self.num_registers < 0 or self.pre_logits < 0:
            raise ConfigError("num_classes, num_registers and pre_logits cannot be negative")
        if self.pool == "token" and not self.class_token:
            raise ConfigError("pool 'token' needs a class token; use pool 'gap' or 'map'")
        if self.posemb in ("learn2d", "sincos2d"):
            if self.posemb_tokens != "patches" and self.num_prefix_tokens:
                raise ConfigError(f"posemb '{self.posemb}' needs posemb_tokens='patches'")
            divisor = 2 if self.posemb == "learn2d" else 4
            if self.width % divisor:
                raise ConfigError(
                    f"posemb '{self.posemb}' needs a width divisible by {divisor}, not {self.width}"
                )
        if self.swiglu and self.mlp_dim % 2:
            raise ConfigError(f"SwiGLU needs an even mlp_dim, not {self.mlp_dim}")

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        return (
            self.image_size[0] // self.patch_size[0],
            self.image_size[1] // self.patch_size[1],
        )

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class, distillation, registers, in this order."""
        return int(self.class_token) + int(self.distill_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def posemb_prefix(self) -> int:
        """Prefix tokens that have a position embedding of their own."""
        if self.posemb == "none" or self.posemb_tokens == "patches":
            return 0
        return int(self.class_token) if self.posemb_tokens == "class" else self.num_prefix_tokens

    @property
    def feature_dim(self) -> int:
        """Size of what `features` returns: the input of the head."""
        return self.pre_logits or self.width

    def at(self, image_size: Size) -> ModelConfig:
        """The same model for pictures of another size.

        Raises:
            ConfigError: the new size is not a multiple of the patch size.
        """
        _check_whole_patches(image_size, self.patch_size)
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> ModelConfig:
        """The same model with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def macs(self) -> int:
        """Multiply-accumulates of one picture's forward pass: convolutions and matrix products,
        the head excluded (FLOPs = 2 x MACs; one training step = 3 x forward)."""
        n, d = self.num_tokens, self.width
        patches = self.grid[0] * self.grid[1]
        embed = patches * 3 * self.patch_size[0] * self.patch_size[1] * d
        attention = 4 * n * d * d + 2 * n * n * d
        mlp = n * d * self.mlp_dim + n * (self.mlp_dim // 2 if self.swiglu else self.mlp_dim) * d
        pool = 0
        if self.pool == "map":
            pool = 2 * n * d * d + 2 * d * d + 2 * n * d + 2 * d * self.mlp_dim
        return embed + self.depth * (attention + mlp) + pool + d * self.pre_logits

    def num_params(self) -> int:
        """Number of learned values, the head included."""
        d, m = self.width, self.mlp_dim
        norm = 2 * d
        embed = 3 * self.patch_size[0] * self.patch_size[1] * d + d * self.patch_bias
        embed += self.num_prefix_tokens * d
        if self.posemb == "learn":
            embed += (self.posemb_prefix + self.grid[0] * self.grid[1]) * d
        elif self.posemb == "learn2d":
            embed += sum(self.grid) * d // 2
        mlp = d * m + m + (m // 2 if self.swiglu else m) * d + d
        block = 2 * norm + 3 * d * d + 3 * d * self.qkv_bias + d * d + d + mlp
        block += 2 * d * self.layer_scale
        pool = 0
        if self.pool == "map":
            pool = d + 4 * (d * d + d) + norm + d * m + m + m * d + d
        norms = norm * (self.pre_norm + self.final_norm + self.fc_norm)
        head = (d + 1) * self.pre_logits
        head += (self.feature_dim + 1) * self.num_classes * (2 if self.distill_token else 1)
        return embed + self.depth * block + norms + pool + head


def _check_whole_patches(image_size: Size, patch_size: Size) -> None:
    """For sizes that someone asks for: what hangs over the last whole patch is never looked at."""
    for axis, size, patch in zip(("height", "width"), image_size, patch_size, strict=True):
        if patch > 0 and size % patch:
            sizes = {size // patch * patch, -(-size // patch) * patch} - {0}
            raise ConfigError(
                f"{axis} {size} is not a multiple of the patch size {patch}",
                hint=f"take a resolution of {' or '.join(map(str, sorted(sizes)))}",
            )


class Variant(NamedTuple):
    """A row of Table 1 of the paper; Ti and S are of the later papers (DeiT, AugReg)."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int


VARIANTS = {
    "Ti": Variant(12, 192, 768, 3),
    "S": Variant(12, 384, 1536, 6),
    "B": Variant(12, 768, 3072, 12),
    "L": Variant(24, 1024, 4096, 16),
    "H": Variant(32, 1280, 5120, 16),
}


def model_config(variant: str, **overrides: Any) -> ModelConfig:
    """The configuration of a variant such as "B/16", with any field overridden.

    Raises:
        ConfigError: the variant is not of the form NAME/PATCH or not in the table.
    """
    match = re.fullmatch(r"([A-Za-z]+)/(\d+)", variant)
    name = {known.lower(): known for known in VARIANTS}.get(match[1].lower()) if match else None
    if match is None or name is None:
        raise ConfigError(
            f"there is no variant '{variant}'",
            hint=f"write one of {', '.join(VARIANTS)}, a slash and the patch size, as in B/16",
        )
    patch = int(match[2])
    fields: dict[str, Any] = {**VARIANTS[name]._asdict(), "patch_size": (patch, patch), **overrides}
    config = ModelConfig(**fields)
    _check_whole_patches(config.image_size, config.patch_size)
    return config


def variant_name(config: ModelConfig) -> str:
    """The short name of an architecture, "B/16"; sizes that no variant has are spelt out."""
    sizes = Variant(config.depth, config.width, config.mlp_dim, config.num_heads)
    rows, columns = config.patch_size
    patch = str(rows) if rows == columns else f"{rows}x{columns}"
    for name, variant in VARIANTS.items():
        if sizes == variant:
            return f"{name}/{patch}"
        if sizes == variant._replace(depth=config.depth):
            return f"{name}/{patch} with {config.depth} blocks"
    return f"width {config.width}, depth {config.depth}, patch {patch}"


# ---------------------------------------------------------------------------------------------
# What goes in and what comes out


@dataclass(frozen=True)
class Preprocess:
    """How a picture becomes a model's input. Comes from the checkpoint, never from a default."""

    size: Size = (224, 224)
    """Height and width of the model's input."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from RGB in [0, 1]."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Divides what is left."""
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "lanczos"] = "bicubic"
    """Pillow's filter (all but nearest are antialiased)."""
    crop_pct: float = 1.0
    """The part of the resized picture that the crop keeps: it is resized to size / crop_pct."""
    crop_mode: Literal["center", "squash", "border"] = "center"
    """center: shorter side resized, centre cropped; squash: both sides resized; border: longer
    side resized, the rest filled with the mean (letterbox). timm's names."""

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ConfigError(f"a picture cannot have the size {self.size}")
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
    """Where pictures and labels come from, and how they are split."""

    path: str
    """A folder of class folders, a CSV, a parquet file or folder, or tar shards."""
    classes: str | None = None
    """A file with one class a line (id, or id TAB name), for data without class names."""
    val_fraction: float = 0.1
    """The part held out for validation, by class, where the data has no validation part."""
    split_seed: int = 0
    """Seed of that split, apart from the run's seed: runs with other seeds compare on one split."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ConfigError(f"val_fraction must be in [0, 1), not {self.val_fraction}")


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training picture. Every draw depends on (seed, epoch, sample) alone."""

    crop_area: tuple[float, float] = (0.05, 1.0)
    """Inception crop: the part of the picture's area that is kept; (1, 1) resizes only."""
    crop_ratio: tuple[float, float] = (0.75, 4 / 3)
    """Inception crop: aspect ratio, width over height."""
    flip: bool = True
    """Mirror half of the pictures."""
    randaugment: tuple[int, int] | None = None
    """RandAugment (layers, magnitude), as in (2, 10)."""
    erasing: float = 0.0
    """Probability of random erasing."""
    mixup: float = 0.0
    """Alpha of mixup's Beta distribution, one draw a batch; 0 means none."""
    cutmix: float = 0.0
    """Alpha of cutmix's; with both, a fair coin chooses for each batch."""


@dataclass(frozen=True)
class TrainConfig:
    """One run of `vit pretrain` or `vit finetune`; None means that the auto rule decides."""

    data: DataConfig
    """What to learn."""
    output: str
    """The run's folder."""
    command: str = ""
    """How the user called it, for the model card."""
    task: Literal["pretrain", "finetune"] = "finetune"
    """Where the weights start and which defaults hold; the loop is one."""
    model: str | None = None
    """finetune: the checkpoint to start from. pretrain: a checkpoint to go on from, or None."""
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
    """What happens to a training picture."""
    loss: Score = "softmax"
    """softmax cross-entropy, or sigmoid (binary) cross-entropy."""
    label_smoothing: float = 0.0
    """The part of a label that is spread over all classes."""
    head_bias: float = 0.0
    """Initial bias of the head (big_vision's sigmoid recipes: -10 for i21k, -6.9 for i1k)."""
    dropout: float = 0.0
    """Dropout after every dense layer but q, k, v, and after the position embeddings."""
    drop_path: float = 0.0
    """Stochastic depth of the last block; rises linearly from 0."""
    steps: int | None = None
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the training part; sets the steps."""
    batch_size: int | None = None
    """Pictures in one optimizer step."""
    accumulate: int | None = None
    """Micro-batches that one batch is split into; None: as many as memory asks for."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """sgd with momentum; adam with L2 decay; adamw with decoupled decay."""
    lr: float | None = None
    """Peak learning rate."""
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
    seed: int = 0
    """Decides the initial weights, the order, the augmentation and dropout."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of activations; weights and optimizer state stay float32."""
    workers: int | None = None
    """Processes that decode pictures."""
    eval_every: int | None = None
    """Steps between evaluations."""
    save_every: int | None = None
    """Steps between resumable states."""
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the weights in model.safetensors."""

    def __post_init__(self) -> None:
        positive = ("steps", "epochs", "batch_size", "accumulate", "lr", "eval_every", "save_every")
        for name in positive:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}")
        for name in ("label_smoothing", "dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.batch_size and self.batch_size % (self.accumulate or 1):
            raise ConfigError(
                f"a batch of {self.batch_size} does not split into {self.accumulate} equal parts"
            )


TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "finetune": {},
    "pretrain": {"optimizer": "adamw", "weight_decay": 0.1},
}
"""Where `vit pretrain` departs from the defaults of TrainConfig, which are fine-tuning's."""


def nearest(name: str, known: list[str], n: int = 3) -> list[str]:
    """The names most like a mistyped one, best first."""
    return difflib.get_close_matches(name.lower(), known, n=n, cutoff=0.5)
