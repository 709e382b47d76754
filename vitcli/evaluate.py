"""Accuracy of a model on labelled pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from vitcli.config import Preprocess
from vitcli.data.loader import eval_batches
from vitcli.data.sources import Source
from vitcli.data.transforms import EvalTransform, to_float


@dataclass(frozen=True)
class Evaluation:
    """Figures of one pass over a data set; accuracies in [0, 1]."""

    confusion: npt.NDArray[np.int64]
    """(K, K): row is the label, column the prediction."""
    top5: float
    """The part of the pictures whose label is among the five best classes."""
    loss: float
    """Mean cross-entropy of the labels under a softmax."""

    @property
    def count(self) -> int:
        """Pictures seen."""
        return int(self.confusion.sum())

    @property
    def top1(self) -> float:
        """The part of the pictures whose best class is their label."""
        return float(np.trace(self.confusion) / max(self.count, 1))


def evaluate_model(
    model: nn.Module,
    source: Source,
    preprocess: Preprocess,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    workers: int = 0,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """One pass over `source` in evaluation mode; leaves the model in it.

    Args:
        model: (B, 3, H, W) -> logits (B, K); its classes are the source's, in the same order.
        dtype: of the computation (autocast); weights stay as they are.
        on_progress: called with the number of pictures of each batch.

    Raises:
        PictureError: names a picture that cannot be decoded.
    """
    classes = len(source.classes)
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    loss, among_five, count = 0.0, 0, 0
    model.eval()
    with torch.inference_mode():
        for pixels, labels, _ in eval_batches(
            source, EvalTransform(preprocess), batch_size, workers
        ):
            images = to_float(pixels.to(device, non_blocking=True), preprocess)
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                logits = model(images)
            logits = logits.float().cpu()
            best = logits.topk(min(5, classes)).indices
            confusion += torch.bincount(
                labels * classes + best[:, 0], minlength=classes * classes
            )
            among_five += int((best == labels[:, None]).any(dim=1).sum())
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
            on_progress(len(labels))
    table = confusion.view(classes, classes).numpy()
    return Evaluation(table, among_five / max(count, 1), loss / max(count, 1))
