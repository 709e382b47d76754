"""The paper's fine-tuning recipes (`--preset`): where they depart from the defaults of TrainConfig,
which are the paper's too (SGD with momentum 0.9, no weight decay, gradients clipped at norm 1,
cosine decay, softmax cross-entropy, inception crops and flips, evaluation on squashed images).

Standard library only.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

PresetName = Literal["imagenet", "cifar10", "cifar100", "pets", "flowers", "vtab"]


class Preset(NamedTuple):
    """A row of the paper's Table 4, and what holds for all of its rows."""

    steps: int
    """Optimizer steps."""
    rates: tuple[float, ...]
    """Peak learning rates tried on the held-out images; the best one trains on all images."""
    val_fraction: float
    """Held out to choose by, if the data has no validation split."""
    warmup: int = 500
    """Steps of linear warm-up (vit_jax/configs/common.py)."""
    batch_size: int = 512
    resolution: int = 384

    def fields(self) -> dict[str, Any]:
        """Fields of TrainConfig, those of DataConfig under "data"."""
        return {
            "steps": self.steps,
            "warmup": self.warmup,
            "batch_size": self.batch_size,
            "resolution": (self.resolution, self.resolution),
            "lr": self.rates[0] if len(self.rates) == 1 else None,
            "sweep": self.rates if len(self.rates) > 1 else (),
            "data": {"val_fraction": self.val_fraction},
        }


PRESETS: dict[PresetName, Preset] = {
    # The ImageNet results of Table 2 are at 512 px (L/16) and 518 px (H/14), with Polyak
    # averaging (0.9999).
    "imagenet": Preset(20_000, (0.003, 0.01, 0.03, 0.06), val_fraction=0.01),
    "cifar10": Preset(10_000, (0.001, 0.003, 0.01, 0.03), val_fraction=0.02),
    "cifar100": Preset(10_000, (0.001, 0.003, 0.01, 0.03), val_fraction=0.02),
    "pets": Preset(500, (0.001, 0.003, 0.01, 0.03), val_fraction=0.1, warmup=100),
    "flowers": Preset(500, (0.001, 0.003, 0.01, 0.03), val_fraction=0.1, warmup=100),
    # Each of the 19 tasks has 1,000 images: 800 to train on and 200 to choose by. The paper's
    # results are of models trained on all 1,000 (`--val-fraction 0`).
    "vtab": Preset(2_500, (0.01,), val_fraction=0.2),
}
"""By dataset [paper, Table 4 and section B.1.1]."""
