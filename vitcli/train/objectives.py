"""Training objectives: a model, anything that is trained with it, and a loss.

A batch goes through an objective in two steps. `prepare` turns images and labels into (x, y): it
does everything that is random or involves several images. `forward` returns the loss of each image;
DDP, FSDP2 and torch.compile wrap it.
"""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.data.order import batch_rng
from vitcli.data.transforms import mix
from vitcli.train.config import TrainConfig


class Objective(nn.Module):
    """A model in training. The optimizer, the moving average and the state cover its parameters:
    the model's are named `model.*`; all others are trained with the model but not part of it.

    Args:
        model: the ViT or BiT that the run stores.
    """

    classifies = True
    """Whether the model predicts classes, so that accuracy is defined."""
    lead = 0
    """Number of preceding images that `prepare` needs in addition to a part of a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    @abstractmethod
    def prepare(
        self, x: Tensor, labels: Tensor, step: int, first: int = 0, lead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return (x, y) of images, or of features if the model's are fixed; y: (B, ...). Both can
        then be split along B.

        Args:
            x: float32 (B, 3, H, W), or features (B, F).
            labels: int64 (B,).
            step: determines all randomness, together with the seed.
            first: position of the first image after the lead in the step's global batch.
            lead: number of images before the part of the batch; they are not in the result.
        """

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each image's loss, float32 (B,), and whether its class is correct, bool (B,)."""

    def aux_state(self) -> dict[str, Tensor]:
        """Return the state dict of everything trained with the model that is not part of it."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("model.")}

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one image's forward pass, counted as in `ModelConfig.macs`."""
        return int(self.model.config.macs())

    target_macs = 0
    """Multiply-accumulates of `prepare` for one image."""

    @property
    def note(self) -> str:
        """A message shown before the run; may be empty."""
        return ""


class Classification(Objective):
    """Classification of labeled images (section 3.2 of the paper).

    Args:
        class_weights: (K,), weights of the classes in the loss.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, class_weights: Tensor | None = None
    ) -> None:
        super().__init__(model)
        self.config = config
        self.lead = int(config.augment.mixup > 0 or config.augment.cutmix > 0)
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", class_weights, persistent=False)

    def prepare(
        self, x: Tensor, labels: Tensor, step: int, first: int = 0, lead: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return mixed images and their soft labels (B, K)."""
        y = soft_targets(labels, self.model.config.num_classes, self.config)
        return mix(x, y, self.config.augment, batch_rng(self.config.seed, step), lead)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(x) if x.ndim == 4 else self.model.head(x)
        with torch.autocast(x.device.type, enabled=False):
            losses = classification_losses(logits, y, self.config, self.class_weights)
        return losses, logits.detach().argmax(dim=1) == y.argmax(dim=1)


def soft_targets(labels: Tensor, num_classes: int, config: TrainConfig) -> Tensor:
    """Return the soft targets (B, K) of labels (B,).

    With smoothing s, the label gets 1 - s + s / K and every other class s / K, for both losses.
    """
    targets = F.one_hot(labels, num_classes).float()
    smoothing = config.label_smoothing
    return targets * (1 - smoothing) + smoothing / num_classes if smoothing else targets


def classification_losses(
    logits: Tensor, targets: Tensor, config: TrainConfig, class_weights: Tensor | None = None
) -> Tensor:
    """Return the losses (B,), float32, of logits (B, K) against targets (B, K). With weights (K,)
    an image has the mean weight of its targets, smoothed and mixed; the loss of a batch is the mean
    over its images, not over their weights, so that it does not depend on how the batch is split.
    """
    logits = logits.float()
    if config.loss == "sigmoid":  # summed over classes, as `sigmoid_xent` of big_vision/utils.py
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)
    else:  # the paper's, section 3.2
        losses = F.cross_entropy(logits, targets, reduction="none")
    return losses if class_weights is None else losses * (targets @ class_weights)
