"""ReaL labels from "Are we done with ImageNet?" (Beyer et al. 2020, arXiv 2006.07159): all correct
classes, possibly none, for each of ImageNet's 50,000 validation images.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vitcli.config import ClassLabel
from vitcli.data.alignment import Alignment
from vitcli.data.classes import ClassIndex
from vitcli.data.source import Source
from vitcli.errors import DataError
from vitcli.hub import registry

IMAGES = 50_000
"""Images in ImageNet's validation split."""

ReaLLabels = Sequence[Sequence[int]]
"""ImageNet-1k indices of the correct classes of each validation image."""


def imagenet_classes() -> tuple[ClassLabel, ...]:
    """The 1,000 classes of ImageNet-1k, in index order."""
    return registry.labels("imagenet-1k")


def correct_classes(
    labels: ReaLLabels, source: Source, model: Sequence[ClassLabel], alignment: Alignment
) -> list[set[int]]:
    """The correct classes of each image, as indices into `alignment.classes`; -1 for those that the
    model, whose classes are `model`, cannot predict.

    Raises:
        DataError: images do not have ImageNet's file names, or the model has none of its classes.
    """
    model_index = ClassIndex(model)
    matches = [model_index.find(label) for label in imagenet_classes()]
    targets = [int(alignment.model_to_class[m[0]]) if len(m) == 1 else -1 for m in matches]
    if max(targets) < 0:
        raise DataError("ReaL labels are for ImageNet, and the model has none of its classes")
    indices = (_image_index(source, i) for i in range(len(source)))
    return [{targets[label] for label in labels[index]} for index in indices]


@dataclass
class ReaLAccuracy:
    """ReaL accuracy: how often the prediction is among an image's correct classes. Images without
    any are left out, as in the paper (section 3.4)."""

    accepted: list[set[int]]
    """The correct classes of each image; see `correct_classes`."""
    correct: int = 0
    count: int = 0
    left_out: int = 0

    @property
    def accuracy(self) -> float:
        """Fraction of correct predictions, in [0, 1]; NaN if nothing was counted."""
        return self.correct / self.count if self.count else math.nan

    def add(self, image: int, prediction: int) -> bool | None:
        """Count a prediction and return whether it is correct; None if no class could be."""
        accepted = self.accepted[image]
        if not accepted - {-1}:
            self.left_out += 1
            return None
        self.count += 1
        self.correct += prediction in accepted
        return prediction in accepted


def _image_index(source: Source, i: int) -> int:
    """Parse the zero-based index of a validation image from its file name."""
    match = re.search(r"ILSVRC2012_val_(\d{8})(?!\d)", source.names[i])
    if match is None or not 1 <= int(match[1]) <= IMAGES:
        raise DataError(
            "not the file name of an ImageNet validation image, which ReaL labels require",
            where=source.where(i),
            hint="keep the original names, ILSVRC2012_val_00000001.JPEG to "
            "ILSVRC2012_val_00050000.JPEG",
        )
    return int(match[1]) - 1
