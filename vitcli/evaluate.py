"""How good a model is on labelled images.

`evaluate` is the command's: any checkpoint on any data, decoded in threads as for `vit predict`.
`evaluate_model` is the training loop's: a model as it stands, decoded in worker processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitcli.config import ClassLabel, DataConfig, Preprocess, Score, Size
from vitcli.data.alignment import Alignment, MatchRules, align
from vitcli.data.classes import listed
from vitcli.data.dataset import Split, open_split
from vitcli.data.directory import open_unlabelled
from vitcli.data.inputs import ImageInput
from vitcli.data.source import Source
from vitcli.errors import NOT_FINITE, ConfigError, DataError
from vitcli.imagenet import Accepted, Reassessment, imagenet_classes
from vitcli.metrics import Evaluation, Tally
from vitcli.prediction import Predictor

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


# ---------------------------------------------------------------------------------------------
# A checkpoint


@dataclass(frozen=True)
class Report:
    """What `evaluate` found."""

    model: str
    data: str
    part: str
    """Which images of the data, in words."""
    resolution: Size
    """Of the model's input, height and width."""
    classes: tuple[ClassLabel, ...]
    """Those that labels and answers are indices of: the model's, or those it might answer."""
    indices: tuple[int, ...]
    """The model's index of each; of several that stand for one, the first."""
    images: int
    """That were read."""
    evaluation: Evaluation | None
    """None where the images have no labels of their own."""
    real: Reassessment | None
    """Under labels that accept several classes."""
    warnings: tuple[str, ...]
    errors: tuple[tuple[str, DataError], ...]
    """Images that could not be read, which no figure counts."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said of one labelled image, or what is wrong with it."""

    file: str
    label: ClassLabel | None
    """None where none came with the data."""
    best: tuple[tuple[ClassLabel, float], ...] = ()
    """At most five classes and their scores, the best first."""
    accepted: bool | None = None
    """Whether the best is among the classes that are right, where several may be."""
    error: DataError | None = None

    @property
    def correct(self) -> bool:
        """Whether the best is the label."""
        return bool(self.best) and self.best[0][0] == self.label


def evaluate(
    predictor: Predictor,
    data: DataConfig,
    part: Split = "auto",
    batch_size: int | None = None,
    rules: MatchRules | None = None,
    accepted: Accepted | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    report: Callable[[str], None] = lambda text: None,
) -> Report:
    """Evaluates a checkpoint on a data set; classes are matched by id, then by unique name.

    Args:
        part: "auto" takes the test part, else the validation part (on the data that the model was
            trained on: what its run held out), else all images.
        rules: how classes are matched, and among which the model answers; None: the defaults.
        accepted: ReaL labels, to be counted beside the data's own (`imagenet.read_accepted`); a
            folder of images without class folders has no other.
        on_answer: called with what is said of each image, in order.
        on_progress: called with the images that are done and those there are.
        report: told, in a line, of what takes time before the first image.

    Raises:
        DataError: the data cannot be used, or has classes that are not the model's.
        ConfigError: the model has no classes, or does not name them and has too few.
    """
    info = predictor.info
    if not info.model.num_classes:
        raise ConfigError("the model has no classes to be right about", where=predictor.name)
    opened = _open(predictor, data, part, rules or MatchRules(), accepted is not None, report)
    source, aligned, model, words, warnings, labelled = opened
    if len(aligned.classes) < len(model):
        report(
            f"answers are chosen among {len(aligned.classes):,} classes, of the {len(model):,} of "
            "the model (--among)"
        )
    real = Reassessment(accepted, source, model, aligned) if accepted is not None else None
    tally, errors, done = Tally(len(aligned.classes), info.score), list[tuple[str, DataError]](), 0
    for slots, logits in predictor.batches(_images(source), "logits", batch_size):
        read = np.array([slot.error is None for slot in slots])
        labels = source.labels[done : done + len(slots)]
        best = tally.add(_among(logits, aligned), labels[read]) if read.any() else []
        rows = iter(best)
        for i, (name, error) in enumerate(slots):
            label = aligned.classes[labels[i]] if labelled else None
            if error is not None:
                errors.append((name, error))
                on_answer(Answer(name, label, error=error))
                continue
            row = next(rows)
            found = real.add(done + i, row[0][0]) if real is not None else None
            named = tuple((aligned.classes[answer], score) for answer, score in row)
            on_answer(Answer(name, label, named, found))
        done += len(slots)
        on_progress(done, len(source))
    if not tally.count:
        name, error = errors[0]
        raise DataError(
            f"none of its {len(source):,} images can be read",
            where=data.path,
            hint=f"the first, {name}: {error.what}",
        )
    result = tally.result()
    if not math.isfinite(result.loss):
        warnings = [*warnings, f"not all answers are finite numbers: {NOT_FINITE}"]
    return Report(
        predictor.name,
        data.path,
        words,
        info.model.image_size,
        aligned.classes,
        tuple(aligned.first.tolist()),
        tally.count,
        result if labelled else None,
        real,
        tuple(warnings),
        tuple(errors),
    )


class _Opened(NamedTuple):
    """Images as they are evaluated: their labels are indices of `aligned.classes`."""

    source: Source
    aligned: Alignment
    model: tuple[ClassLabel, ...]
    """The model's classes."""
    part: str
    warnings: list[str]
    labelled: bool
    """Whether the labels mean anything: a folder without class folders has none."""


def _open(
    predictor: Predictor,
    data: DataConfig,
    part: Split,
    rules: MatchRules,
    imagenet: bool,
    report: Callable[[str], None],
) -> _Opened:
    """The images, and their classes beside the model's.

    Args:
        imagenet: whether these are ImageNet's validation images, with or without class folders.
    """
    source = None
    if imagenet:
        source = open_unlabelled(Path(data.path).expanduser(), imagenet_classes())
    labelled, words, warnings = source is None, "all images", tuple[str, ...]()
    if source is None:
        record = _split_record(predictor.file.parent, data.path)
        source, words, warnings = open_split(data, part, None, record, report)
        present = np.flatnonzero(source.counts()).tolist()
    else:
        present, rules = list(range(len(source.classes))), replace(rules, skip_unknown=True)
    model, assumed = _classes_of(predictor, source, imagenet)
    aligned = align(source.classes, present, model, rules, imagenet_classes(), data.path)
    left_out = list[str]()
    if labelled:
        source, left_out = _evaluated(source, aligned)
    said = [*warnings, *assumed, *left_out]
    return _Opened(source, aligned, model, words, said, labelled)


def _classes_of(
    predictor: Predictor, source: Source, imagenet: bool
) -> tuple[tuple[ClassLabel, ...], list[str]]:
    """The model's classes, and what had to be assumed where it does not name them."""
    count = predictor.info.model.num_classes
    if predictor.info.classes:
        return predictor.classes, []
    if len(source.classes) == count:
        return source.classes, ["the model does not name its classes: the data's order was taken"]
    if count == len(imagenet_classes()) and imagenet:
        return imagenet_classes(), ["the model does not name its classes: ImageNet's were taken"]
    raise ConfigError(
        f"the model does not name its {count:,} classes, and the data has {len(source.classes):,}",
        where=predictor.name,
        hint="vit convert --labels FILE writes names into a checkpoint",
    )


def _evaluated(source: Source, aligned: Alignment) -> tuple[Source, list[str]]:
    """The images whose class can be answered, labelled with it; and a line about the others."""
    labels, counts = aligned.of_data[source.labels], source.counts()
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise DataError("all its images are left out", where=source.root)
    lines = []
    if len(kept) < len(source):
        names = [
            label.name
            for label, count, place in zip(source.classes, counts, aligned.of_data, strict=True)
            if count and place < 0
        ]
        lines = [f"left out: {len(source) - len(kept):,} images of {listed(names)}"]
    return replace(source.select(kept), classes=aligned.classes, labels=labels[kept]), lines


def _among(logits: Tensor, aligned: Alignment) -> Tensor:
    """Logits (B, K) of a model's classes as those of the classes of an evaluation; the highest of
    several that stand for one, so that any of them is as right."""
    import torch

    if len(aligned.classes) == logits.shape[1]:
        return logits
    allowed = torch.from_numpy(np.flatnonzero(aligned.of_model >= 0))
    place = torch.from_numpy(aligned.of_model)[allowed].expand(len(logits), -1)
    lowest = logits.new_full((len(logits), len(aligned.classes)), float("-inf"))
    return lowest.scatter_reduce(1, place, logits[:, allowed], "amax")


def _images(source: Source) -> Iterator[ImageInput]:
    for i in range(len(source)):
        yield ImageInput(source.where(i), partial(source.read, i))


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
    score: Score = "softmax",
    on_progress: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """One pass over `source` in evaluation mode; leaves the model in it.

    Args:
        model: (B, 3, H, W) -> logits (B, K); its classes are the source's, in the same order.
        dtype: of the computation (autocast); weights stay as they are.
        score: what makes a confidence of a logit.
        on_progress: called with the number of images of each batch.

    Raises:
        ImageError: names an image that cannot be decoded.
    """
    import torch

    from vitcli.data.loader import eval_batches
    from vitcli.data.transforms import EvalTransform, to_float
    from vitcli.devices import to_device

    tally = Tally(len(source.classes), score)
    model.eval()
    with torch.inference_mode():
        for pixels, labels, _ in eval_batches(
            source, EvalTransform(preprocess), batch_size, workers
        ):
            images = to_float(to_device(pixels, device), preprocess)
            with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
                logits = model(images)
            tally.add(logits.float().cpu(), labels.numpy())
            on_progress(len(labels))
    return tally.result()
