"""The objectives of `vit pretrain`, their options and their defaults.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vitcli.errors import ConfigError
from vitcli.fields import check_fields, option

if TYPE_CHECKING:
    from vitcli.train_config import TrainConfig

Objective = Literal["classify", "masked-patch", "mae"]

OBJECTIVE = "Objective"
"""A heading of `--help`."""


@dataclass(frozen=True)
class MaskingConfig:
    """What is hidden of an image and predicted (`train/masked_patch.py`, `train/mae.py`)."""

    ratio: float | None = option(
        None,
        "--mask-ratio X",
        "Fraction of the patches to corrupt (masked-patch) or hide (mae).  [default: 0.5 for "
        "masked-patch, 0.75 for mae]",
        OBJECTIVE,
        task="pretrain",
        above=0,
        below=1,
    )
    target: Literal["mean-3bit", "4x4-3bit", "pixels"] = option(
        "mean-3bit",
        "--target",
        "What masked-patch predicts: the mean colour of a patch (512 classes), 4 x 4 such colours, "
        "or all pixels.",
        task="pretrain",
    )
    decoder_width: int | None = option(
        None,
        "--decoder-width N",
        "Width of the mae decoder, a multiple of 32.  [default: 2/3 of the model's, at most 512]",
        task="pretrain",
        min=32,
    )
    decoder_depth: int | None = option(
        None,
        "--decoder-depth N",
        "Number of blocks of the mae decoder.  [default: 2/3 of the model's, at most 8]",
        task="pretrain",
        min=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)


OBJECTIVE_DEFAULTS: dict[Objective, dict[str, Any]] = {
    "classify": {},
    # Section B.1.2 of the paper, which names no weight decay.
    "masked-patch": {"optimizer": "adam", "weight_decay": 0.0},
    # Table 8 of arXiv 2111.06377.
    "mae": {
        "optimizer": "adamw",
        "betas": (0.9, 0.95),
        "weight_decay": 0.05,
        "augment": {"crop_area": (0.2, 1.0)},
    },
}
"""Defaults of `vit pretrain` that an objective changes."""

CLASSIFY_ONLY = (
    *("loss", "class_weights", "balanced_sampling", "label_smoothing", "head_bias", "sweep"),
    *("keep_head", "freeze", "layer_decay"),
)
"""Fields that require classes."""


def check_objective(run: TrainConfig) -> None:
    """Raises ConfigError for options of a run that do not go with its objective."""
    if run.objective == "classify":
        if run.masking != MaskingConfig():
            raise ConfigError(
                "--mask-ratio, --target and --decoder-* require --objective masked-patch or mae"
            )
        return
    defaults = {field.name: field.default for field in dataclasses.fields(run)}
    wrong = [name for name in CLASSIFY_ONLY if getattr(run, name) != defaults[name]]
    wrong += [name for name in ("mixup", "cutmix") if getattr(run.augment, name)]
    if wrong:
        name = "lr with several values" if wrong[0] == "sweep" else wrong[0].replace("_", "-")
        raise ConfigError(
            f"--{name} cannot be used with --objective {run.objective}",
            hint=f"leave out --{name.split()[0]}, or use --objective classify",
        )
    if run.objective == "mae" and run.masking.target != "mean-3bit":
        raise ConfigError(f"--target {run.masking.target} requires --objective masked-patch")
    if run.objective != "mae" and (run.masking.decoder_width or run.masking.decoder_depth):
        raise ConfigError("--decoder-width and --decoder-depth require --objective mae")
