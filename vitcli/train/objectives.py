"""Objectives: functions of a model and a batch that give a loss to minimise."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.train_config import TrainConfig

Objective = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(model, inputs (B, ...), targets (B, K)) -> (mean loss, number of correct answers)."""


def classification(config: TrainConfig, class_weights: Tensor | None = None) -> Objective:
    """The objective of labelled images."""

    def classify(model: nn.Module, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        with torch.autocast(x.device.type, enabled=False):
            loss = classification_loss(logits, targets, config, class_weights)
        return loss, count_correct(logits.detach(), targets)

    return classify


def soft_targets(labels: Tensor, num_classes: int, config: TrainConfig) -> Tensor:
    """Labels (B,) as rows (B, K) with the weight of each class, smoothed.

    With softmax a row sums to 1; with sigmoid the label is 1 and smoothing lowers it to 1 - s
    and raises the others to s / K.
    """
    targets = F.one_hot(labels, num_classes).float()
    smoothing = config.label_smoothing
    return targets * (1 - smoothing) + smoothing / num_classes if smoothing else targets


def _softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy (paper, section 3.2)."""
    return F.cross_entropy(logits, targets, reduction="none")


def _sigmoid(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy summed over the classes (`sigmoid_xent` of big_vision/utils.py; "Are we
    done with ImageNet?", 2006.07159)."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)


LOSSES = {"softmax": _softmax, "sigmoid": _sigmoid}
"""Losses (B,) of logits (B, K) and targets (B, K), by `TrainConfig.loss`."""


def classification_loss(
    logits: Tensor, targets: Tensor, config: TrainConfig, class_weights: Tensor | None = None
) -> Tensor:
    """Mean loss of logits (B, K) against rows of targets (B, K), in float32. With weights (K,) an
    image counts as its label does; the mean is over images, not over their weights, so that it
    does not depend on how a batch is split.
    """
    losses = LOSSES[config.loss](logits.float(), targets)
    if class_weights is not None:
        losses = losses * (targets @ class_weights)
    return losses.mean()


def count_correct(logits: Tensor, targets: Tensor) -> Tensor:
    """How many rows have their highest logit at the heaviest target, an int64 scalar."""
    return (logits.argmax(dim=1) == targets.argmax(dim=1)).sum().to(torch.int64)
