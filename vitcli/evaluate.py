"""How often a model is right: top-1, top-5, class by class, and what it takes for what.

`evaluate` is the command's: any checkpoint on any data, decoded in threads as for `vit predict`.
`evaluate_model` is the training loop's: a model as it stands, decoded in worker processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel, DataConfig, Preprocess
from vitcli.data.inputs import Picture
from vitcli.data.records import Source
from vitcli.data.sources import Part, open_part
from vitcli.errors import ConfigError, DataError
from vitcli.prediction import Predictor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """How a model does on one class."""

    index: int
    count: int
    """Pictures of the class."""
    recall: float
    """The part of them that is recognised: the class's own accuracy. NaN without pictures."""
    precision: float
    """The part of the pictures taken for this class that are of it. NaN where none was."""


@dataclass(frozen=True)
class Evaluation:
    """Figures of one pass over labelled pictures; accuracies in [0, 1]."""

    num_classes: int
    labels: Ints
    """(P,) with `predictions` and `counts`: how often pictures of a class are taken for another.
    Pairs that never occur are left out: 21,843 classes have 477 million."""
    predictions: Ints
    counts: Ints
    top5: float
    """The part of the pictures whose label is among the five best classes."""
    loss: float
    """Mean cross-entropy of the labels under a softmax."""

    @property
    def count(self) -> int:
        """Pictures seen."""
        return int(self.counts.sum())

    @property
    def top1(self) -> float:
        """The part of the pictures whose best class is their label."""
        right = self.counts[self.labels == self.predictions].sum()
        return float(right / max(self.count, 1))

    @cached_property
    def confusion(self) -> Ints:
        """(K, K): row is the label, column the prediction."""
        return self.confusion_of(range(self.num_classes))

    def confusion_of(self, classes: Sequence[int]) -> Ints:
        """(n, n): the confusion matrix of some classes, in the given order."""
        place = np.full(self.num_classes, -1)
        place[list(classes)] = np.arange(len(classes))
        rows, columns = place[self.labels], place[self.predictions]
        inside = (rows >= 0) & (columns >= 0)
        table = np.zeros((len(classes), len(classes)), np.int64)
        table[rows[inside], columns[inside]] = self.counts[inside]
        return table

    def by_class(self) -> list[ClassFigures]:
        """Figures of each class that has pictures, in index order."""

        def total(of: Ints, wanted: Any = True) -> Ints:
            return np.bincount(of, np.where(wanted, self.counts, 0), self.num_classes).astype(int)

        pictures, taken = total(self.labels), total(self.predictions)
        right = total(self.labels, self.labels == self.predictions)
        return [
            ClassFigures(
                int(i),
                int(pictures[i]),
                float(right[i] / pictures[i]),
                float(right[i] / taken[i]) if taken[i] else float("nan"),
            )
            for i in np.unique(self.labels)
        ]

    def mistakes(self, most: int) -> list[tuple[int, int, int]]:
        """(label, prediction, pictures) of the most frequent confusions, worst first."""
        wrong = np.flatnonzero(self.labels != self.predictions)
        order = wrong[np.argsort(-self.counts[wrong], kind="stable")][:most]
        return [(int(self.labels[i]), int(self.predictions[i]), int(self.counts[i])) for i in order]


class Tally:
    """Adds up logits batch by batch."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.pairs: dict[int, int] = {}
        self.count, self.among_five, self.loss = 0, 0, 0.0

    def add(self, logits: Tensor, labels: Ints) -> None:
        """logits: float32 (B, num_classes), on the CPU; labels: (B,)."""
        import torch
        import torch.nn.functional as F

        best = logits.topk(min(5, self.num_classes)).indices.numpy()
        pairs = np.unique(labels * self.num_classes + best[:, 0], return_counts=True)
        for pair, count in zip(*(part.tolist() for part in pairs), strict=True):
            self.pairs[pair] = self.pairs.get(pair, 0) + count
        self.count += len(labels)
        self.among_five += int((best == labels[:, None]).sum())
        self.loss += float(F.cross_entropy(logits, torch.from_numpy(labels), reduction="sum"))

    def result(self) -> Evaluation:
        """The figures of all that was added."""
        pairs = np.array(sorted(self.pairs), np.int64)
        labels, predictions = np.divmod(pairs, max(self.num_classes, 1))
        counts = np.array([self.pairs[int(pair)] for pair in pairs], np.int64)
        pictures = max(self.count, 1)
        return Evaluation(
            self.num_classes,
            labels,
            predictions,
            counts,
            self.among_five / pictures,
            self.loss / pictures,
        )


# ---------------------------------------------------------------------------------------------
# A checkpoint


@dataclass(frozen=True)
class Report:
    """What `evaluate` found."""

    model: str
    data: str
    part: str
    """Which pictures of the data, in words."""
    classes: tuple[ClassLabel, ...]
    """The model's, in index order."""
    evaluation: Evaluation
    warnings: tuple[str, ...]
    errors: tuple[tuple[str, DataError], ...]
    """Pictures that could not be read, which no figure counts."""


def evaluate(
    predictor: Predictor,
    data: DataConfig,
    part: Part = "auto",
    batch_size: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[str], None] = lambda text: None,
) -> Report:
    """Evaluates a checkpoint on a data set; classes are matched by id, then by unique name.

    Args:
        part: "auto" takes the test part, else the validation part (on the data that the model was
            trained on: what its run held out), else all pictures.
        on_progress: called with the pictures that are done and those there are.
        report: told, in a line, of what takes time before the first picture.

    Raises:
        DataError: the data cannot be used, or has classes that are not the model's.
        ConfigError: the model has no classes, or does not name them and has too few.
    """
    info = predictor.info
    if not info.model.num_classes:
        raise ConfigError("the model has no classes to be right about", where=predictor.name)
    record = _split_record(predictor.file.parent, data.path)
    source, words, warnings = open_part(data, part, info.classes or None, record, report)
    classes = predictor.classes
    if not info.classes:
        if len(source.classes) != info.model.num_classes:
            raise ConfigError(
                f"the model does not name its {info.model.num_classes:,} classes, and the data "
                f"has {len(source.classes):,}",
                where=predictor.name,
            )
        classes = source.classes
        warnings += ("the model does not name its classes: the data's order was taken",)
    tally, errors, done = Tally(info.model.num_classes), list[tuple[str, DataError]](), 0
    for slots, logits in predictor.batches(_pictures(source), "logits", batch_size):
        read = np.array([slot.error is None for slot in slots])
        errors += [(slot.name, slot.error) for slot in slots if slot.error is not None]
        labels = source.labels[done : done + len(slots)][read]
        if len(labels):
            tally.add(logits, labels)
        done += len(slots)
        on_progress(done, len(source))
    return Report(
        predictor.name, data.path, words, classes, tally.result(), warnings, tuple(errors)
    )


def _pictures(source: Source) -> Iterator[Picture]:
    for i in range(len(source)):
        yield Picture(source.where(i), partial(source.read, i))


def _split_record(folder: Path, data: str) -> dict[str, Any] | None:
    """What a run held out (its split.json), where it was trained on this data."""
    try:
        record: dict[str, Any] = json.loads((folder / "split.json").read_text("utf-8"))
        same = Path(record["data"]).resolve() == Path(data).expanduser().resolve()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if same else None


# ---------------------------------------------------------------------------------------------
# A model in training


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
    import torch

    from vitcli.data.loader import eval_batches
    from vitcli.data.transforms import EvalTransform, to_float

    tally = Tally(len(source.classes))
    model.eval()
    with torch.inference_mode():
        for pixels, labels, _ in eval_batches(
            source, EvalTransform(preprocess), batch_size, workers
        ):
            images = to_float(pixels.to(device, non_blocking=True), preprocess)
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                logits = model(images)
            tally.add(logits.float().cpu(), labels.numpy())
            on_progress(len(labels))
    return tally.result()
