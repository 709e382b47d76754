"""The objectives of `vit pretrain`, their options and their defaults.

Standard library only.
"""

from dataclasses import dataclass
from typing import Any, Literal

from vitcli.fields import Requirement, check_fields, option

Objective = Literal["classify", "masked-patch", "mae"]

OBJECTIVE = "Objective"
"""A heading of `--help`."""

MASKING = Requirement(
    "requires --objective masked-patch or mae", lambda run: run.objective != "classify"
)
MASKED_PATCH = Requirement(
    "requires --objective masked-patch", lambda run: run.objective == "masked-patch"
)
MAE = Requirement("requires --objective mae", lambda run: run.objective == "mae")


@dataclass(frozen=True)
class MaskingConfig:
    """Masking of patches and the prediction target (`train/masked_patch.py`, `train/mae.py`)."""

    ratio: float | None = option(
        None,
        "--mask-ratio X",
        "Fraction of the patches to corrupt (masked-patch) or hide (mae).  [default: 0.5 for "
        "masked-patch, 0.75 for mae]",
        OBJECTIVE,
        task="pretrain",
        requires=MASKING,
        above=0,
        below=1,
    )
    target: Literal["mean-3bit", "4x4-3bit", "pixels"] = option(
        "mean-3bit",
        "--target",
        "What masked-patch predicts: the mean color of a patch (512 classes), 4 x 4 such colors, "
        "or all pixels.",
        task="pretrain",
        requires=MASKED_PATCH,
    )
    decoder_width: int | None = option(
        None,
        "--decoder-width N",
        "Width of the mae decoder, a multiple of 32.  [default: 2/3 of the model's, at most 512]",
        task="pretrain",
        requires=MAE,
        min=32,
    )
    decoder_depth: int | None = option(
        None,
        "--decoder-depth N",
        "Number of blocks of the mae decoder.  [default: 2/3 of the model's, at most 8]",
        task="pretrain",
        requires=MAE,
        min=1,
    )

    def __post_init__(self) -> None:
        check_fields(self)


OBJECTIVE_DEFAULTS: dict[Objective, dict[str, Any]] = {
    "classify": {},
    # Section B.1.2 of the paper, which does not mention weight decay.
    "masked-patch": {"optimizer": "adam", "weight_decay": 0.0},
    # Table 8 of arXiv 2111.06377.
    "mae": {
        "optimizer": "adamw",
        "betas": (0.9, 0.95),
        "weight_decay": 0.05,
        "augment.crop_area": (0.2, 1.0),
    },
}
"""Overrides of the defaults of `vit pretrain`, by objective."""
