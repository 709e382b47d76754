"""Published recipes (`--preset`) for fine-tuning and pre-training: their differences from the
defaults of TrainConfig, which are the paper's for fine-tuning (SGD with momentum 0.9, no weight
decay, gradients clipped at norm 1, cosine decay, softmax cross-entropy, Inception-style crops,
flips, evaluation on squashed images).

Standard library only.
"""

from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from vitcli.architectures.variants import architecture, variant_name
from vitcli.architectures.vit import ModelConfig
from vitcli.errors import ConfigError

PresetName = Literal["imagenet", "cifar10", "cifar100", "pets", "flowers", "vtab"]


class Preset(NamedTuple):
    """A row of the paper's Table 4."""

    steps: int
    rates: tuple[float, ...]
    """Peak learning rates to try on held-out images; the final run on all images uses the best."""
    val_fraction: float
    """Fraction to hold out for validation if the dataset has no validation split."""
    warmup: int = 500
    """Number of warm-up steps (vit_jax/configs/common.py)."""


PRESETS: dict[PresetName, Preset] = {
    # The ImageNet results of Table 2 are at 512 px (L/16) and 518 px (H/14), with Polyak
    # averaging (0.9999).
    "imagenet": Preset(20_000, (0.003, 0.01, 0.03, 0.06), val_fraction=0.01),
    "cifar10": Preset(10_000, (0.001, 0.003, 0.01, 0.03), val_fraction=0.02),
    "cifar100": Preset(10_000, (0.001, 0.003, 0.01, 0.03), val_fraction=0.02),
    "pets": Preset(500, (0.001, 0.003, 0.01, 0.03), val_fraction=0.1, warmup=100),
    "flowers": Preset(500, (0.001, 0.003, 0.01, 0.03), val_fraction=0.1, warmup=100),
    # Each of the 19 tasks has 1,000 images: 800 for training and 200 for validation. The paper's
    # results are from models trained on all 1,000 (`--val-fraction 0`).
    "vtab": Preset(2_500, (0.01,), val_fraction=0.2),
}
"""Fine-tuning recipes by dataset (paper, Table 4 and section B.1.1)."""


PretrainName = Literal["imagenet", "imagenet21k", "jft", "s16-i1k"]


class Pretraining(NamedTuple):
    """The rows of the paper's Table 3 for one dataset."""

    rates: dict[str, tuple[int, float]]
    """(epochs, peak learning rate), by names of variants: patterns separated by spaces."""
    fields: dict[str, Any]
    """Fields of TrainConfig that extend or override `PRETRAINED`."""


PRETRAINED: dict[str, Any] = {
    "variant": "B/16",
    "batch_size": 4096,
    "resolution": (224, 224),
    "warmup": 10_000,
    "schedule": "linear",
    "optimizer": "adamw",  # Adam with decoupled decay, betas 0.9 and 0.999
    "clip_norm": None,
    "dropout": 0.0,
}
"""Settings shared by all rows of Table 3."""

PRETRAINING: dict[PretrainName, Pretraining] = {
    "imagenet": Pretraining(
        {"*/*": (300, 3e-3)},
        {"weight_decay": 0.3, "dropout": 0.1, "schedule": "cosine", "clip_norm": 1.0},
    ),
    # L was also trained for 30 epochs.
    "imagenet21k": Pretraining({"B/* L/*": (90, 1e-3)}, {"weight_decay": 0.03, "dropout": 0.1}),
    # L/16 and R50+L/16 were also trained for 14 epochs.
    "jft": Pretraining(
        {
            "B/16 B/32 R50+B/16 R50+B/32 R101x1": (7, 8e-4),
            "L/32 R152x1 R152x2": (7, 6e-4),
            "L/16 R50+L/16": (7, 4e-4),
            "R50+L/32": (7, 2e-4),
            "R50x1 R50x2": (7, 1e-3),
            "H/14": (14, 3e-4),
        },
        {"weight_decay": 0.1},
    ),
    # big_vision/configs/vit_s16_i1k.py (arXiv 2205.01580). Its weight decay is multiplied by the
    # schedule, not the learning rate, which would make 1e-4 a thousand times weaker.
    "s16-i1k": Pretraining(
        {"*/*": (90, 1e-3)},
        {
            "variant": "S/16",
            "batch_size": 1024,
            "schedule": "cosine",
            "clip_norm": 1.0,
            "weight_decay": 1e-4,
            "decay_by": "schedule",
            "overrides.pool": "gap",
            "overrides.class_token": False,
            "overrides.posemb": "sincos2d",
            "overrides.posemb_tokens": "patches",
            "augment.randaugment": (2, 10),
            "augment.mixup": 0.2,
            "preprocess.crop_pct": 0.875,
            "preprocess.interpolation": "bilinear",
            "data.val_fraction": 0.01,
        },
    ),
}
"""Pre-training recipes by dataset (paper, Table 3 and section 4.1)."""


LENGTH = ("steps", "epochs", "warmup")
"""Fields of a preset that do not apply if --steps or --epochs sets another length."""


def recipe(task: str, name: str, variant: str | None) -> dict[str, Any]:
    """Return the fields of TrainConfig that a preset sets, such as "augment.mixup".

    Raises:
        ConfigError: a pre-training preset has no rates for the variant, or there is no such
            variant.
    """
    if task == "finetune":
        preset = PRESETS[name]  # type: ignore[index]
        is_single = len(preset.rates) == 1
        return {
            "steps": preset.steps,
            "warmup": preset.warmup,
            "batch_size": 512,
            "resolution": (384, 384),
            "lr": preset.rates[0] if is_single else None,
            "sweep": () if is_single else preset.rates,
            "data.val_fraction": preset.val_fraction,
        }
    rates, fields = PRETRAINING[name]  # type: ignore[index]
    fields = PRETRAINED | fields
    fields["variant"] = variant or fields["variant"]
    config = architecture(fields["variant"])
    full_name = variant_name(config)
    by_pattern = {pattern: rate for names, rate in rates.items() for pattern in names.split()}
    schedule = next((r for key, r in by_pattern.items() if fnmatchcase(full_name, key)), None)
    if schedule is None:
        raise ConfigError(
            f"the preset '{name}' has no learning rate for {full_name}",
            hint=f"leave out --preset, or choose one of its variants: {', '.join(by_pattern)}",
        )
    fields["epochs"], fields["lr"] = schedule
    if name == "s16-i1k" and isinstance(config, ModelConfig):  # rep_size=True
        fields["overrides.pre_logits"] = config.width
    return fields
