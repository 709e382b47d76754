"""ImageNet's validation images under other labels: "Are we done with ImageNet?" (Beyer et al.
2020, arXiv 2006.07159) gave each of the 50,000 all the classes that are right, which may be none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

from vitcli.config import ClassLabel
from vitcli.data.alignment import Alignment
from vitcli.data.classes import ClassIndex
from vitcli.data.source import Source
from vitcli.errors import DataError
from vitcli.hub import registry

IMAGES, CLASSES = 50_000, 1_000
"""Of ImageNet's validation part."""
_NAME = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")

Accepted = Sequence[Sequence[int]]
"""For validation image i, the indices of the classes of ImageNet-1k that are right."""


def imagenet_classes() -> tuple[ClassLabel, ...]:
    """The 1,000 classes, in index order."""
    return registry.labels("imagenet-1k")


def read_accepted(path: str | Path | None = None) -> Accepted:
    """The ReaL labels that ship, or those of a JSON file: a list of 50,000 lists of class indices.

    Raises:
        DataError: the file is no such list.
    """
    if path is None:
        return registry.real_labels()
    try:
        accepted = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise DataError(f"the labels cannot be read: {error.strerror}", where=path) from error
    except ValueError as error:
        raise DataError("the labels are not JSON", where=path) from error
    expected = f"ImageNet's validation part has {IMAGES:,}"
    if not isinstance(accepted, list) or len(accepted) != IMAGES:
        found = f"{len(accepted):,} entries" if isinstance(accepted, list) else "no list"
        raise DataError(f"holds {found}, and {expected} images", where=path)
    for i, classes in enumerate(accepted):
        if not isinstance(classes, list) or not all(
            type(index) is int and 0 <= index < CLASSES for index in classes
        ):
            raise DataError(f"entry {i} is not a list of classes from 0 to 999", where=path)
    return accepted


class Reassessment:
    """Counts how often an answer is among the classes that are right for an image.

    Images without any such class are left out, as in the paper (section 3.4).

    Args:
        model: the classes of a model, whose answers are indices of `alignment.classes`.

    Raises:
        DataError: images do not carry the names of ImageNet's, or the model knows none of its
            classes.
    """

    def __init__(
        self,
        accepted: Accepted,
        source: Source,
        model: Sequence[ClassLabel],
        alignment: Alignment,
    ) -> None:
        index = ClassIndex(model)
        found = [index.find(label) for label in imagenet_classes()]
        place = [int(alignment.of_model[one[0]]) if len(one) == 1 else -1 for one in found]
        if max(place) < 0:
            raise DataError("these labels are ImageNet's, of which the model knows no class")
        self.accepted = [
            {place[index] for index in accepted[number]} for number in _numbers(source)
        ]
        """For each image; -1 stands for what the model may not answer."""
        self.right = self.count = self.left_out = 0

    @property
    def accuracy(self) -> float:
        """The part of the answers that is right, in [0, 1]; NaN of no answers."""
        return self.right / self.count if self.count else math.nan

    def add(self, image: int, answer: int) -> bool | None:
        """Whether an answer is right; None where nothing is, or nothing that can be answered."""
        accepted = self.accepted[image]
        if not accepted - {-1}:
            self.left_out += 1
            return None
        self.count += 1
        self.right += answer in accepted
        return answer in accepted


def _numbers(source: Source) -> list[int]:
    """Which of ImageNet's validation images these are, from 0, by their names."""
    numbers = []
    for i, name in enumerate(source.names):
        match = _NAME.search(name)
        if match is None or not 1 <= int(match[1]) <= IMAGES:
            raise DataError(
                "is not named as one of ImageNet's validation images, and these labels go by "
                "their names",
                where=source.where(i),
                hint="keep the names: ILSVRC2012_val_00000001.JPEG to ILSVRC2012_val_00050000.JPEG",
            )
        numbers.append(int(match[1]) - 1)
    return numbers
