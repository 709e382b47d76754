"""Evaluation of a model on labelled images.

`evaluate` is for a checkpoint on any data, whose classes `open_labelled` matches to the model's;
`evaluate_source` for images that have the model's classes, as a training run's have.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitcli.config import ClassLabel, DataConfig, Size
from vitcli.data.alignment import Alignment, MatchRules, align
from vitcli.data.classes import listed
from vitcli.data.dataset import Split, open_split
from vitcli.data.directory import open_unlabelled
from vitcli.data.source import Source
from vitcli.errors import NOT_FINITE, ConfigError, DataError, ImageError
from vitcli.imagenet import Accepted, Reassessment, imagenet_classes
from vitcli.inference import Batches, Inference, Slot, none_readable, report_unreadable, run_source
from vitcli.metrics import Evaluation, Tally
from vitcli.prediction import Predictor
from vitcli.words import counted

if TYPE_CHECKING:
    from torch import Tensor


def evaluate_source(
    inference: Inference,
    source: Source,
    workers: int | None,
    on_progress: Callable[[int], None],
    on_unreadable: Callable[[ImageError], None],
) -> Evaluation:
    """The metrics of a model on images whose classes are its own, in the same order.

    Args:
        on_progress: called with the number of images of each batch.
        on_unreadable: called with each image that cannot be read, which is not counted.

    Raises:
        DataError: none can be read.
    """
    tally = Tally(len(source.classes), inference.info.score)
    preprocess = inference.info.preprocess
    batches = run_source(source, preprocess, lambda: inference, "logits", workers=workers)
    for slots, _ in _count(batches, source, tally):
        report_unreadable(slots, on_unreadable)
        on_progress(len(slots))
    if not tally.count:
        raise none_readable(source)
    return tally.result()


def _count(
    batches: Batches,
    source: Source,
    tally: Tally,
    aligned: Alignment | None = None,
) -> Iterator[tuple[list[Slot], list[list[tuple[int, float]]]]]:
    """Adds the logits of all images to a tally; gives each batch, and for each of its images at
    most five classes of the tally with their scores, the best first: none where it has an error."""
    done = 0
    for slots, logits in batches:
        read = np.array([slot.error is None for slot in slots])
        labels = source.labels[done : done + len(slots)][read]
        best = iter(tally.add(_among(logits, aligned), labels) if read.any() else [])
        yield slots, [next(best) if readable else [] for readable in read]
        done += len(slots)


def _among(logits: Tensor, aligned: Alignment | None) -> Tensor:
    """Logits (B, K) of a model's classes as those of the classes of an evaluation; where several
    stand for one class, the highest of them."""
    import torch

    if aligned is None or len(aligned.classes) == logits.shape[1]:
        return logits
    allowed = torch.from_numpy(np.flatnonzero(aligned.of_model >= 0))
    place = torch.from_numpy(aligned.of_model)[allowed].expand(len(logits), -1)
    lowest = logits.new_full((len(logits), len(aligned.classes)), float("-inf"))
    return lowest.scatter_reduce(1, place, logits[:, allowed], "amax")


# ---------------------------------------------------------------------------------------------
# A checkpoint on any data


@dataclass(frozen=True)
class Labelled:
    """Images to evaluate on, and their classes beside a model's."""

    data: str
    split: str
    """Which images of the data, in words."""
    source: Source
    """Labelled with indices of the aligned classes."""
    aligned: Alignment
    model: tuple[ClassLabel, ...]
    """The model's classes."""
    accepted: Accepted | None
    """ReaL labels, counted beside the data's own."""
    has_labels: bool
    """Whether the data's own mean anything: without class directories they do not."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `evaluate` found."""

    model: str
    data: str
    split: str
    """Which images of the data, in words."""
    resolution: Size
    """Of the model's input, height and width."""
    device: str
    precision: str
    """What the encoder computed in: "float32", "bfloat16" or "float16"."""
    classes: tuple[ClassLabel, ...]
    """What labels and answers are indices of: the model's classes, or those it may answer."""
    indices: tuple[int, ...]
    """The model's index of each; of several that stand for one, the first."""
    images: int
    """How many were read."""
    evaluation: Evaluation | None
    """None where the images have no labels of their own."""
    real: Reassessment | None
    """Under labels that accept several classes."""
    warnings: tuple[str, ...]
    errors: tuple[tuple[str, DataError], ...]
    """Images that could not be read; no metric counts them."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer for one labelled image, or why it could not be read."""

    file: str
    label: ClassLabel | None
    """None where none came with the data."""
    best: tuple[tuple[ClassLabel, float], ...] = ()
    """At most five classes and their scores, the best first."""
    correct: bool = False
    """Whether the best is the label."""
    accepted: bool | None = None
    """Whether the best is among the classes that are right, where several may be."""
    error: DataError | None = None


def evaluate(
    predictor: Predictor,
    images: Labelled,
    batch_size: int | None = None,
    workers: int | None = None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Evaluates a checkpoint on images.

    Args:
        images: opened with this predictor, or one of the same model at another resolution.
        workers: threads that decode images; None: one for each core.
        on_answer: called with the answer for each image, in order.
        on_progress: called with the number of images done and the total.

    Raises:
        DataError: none can be read.
    """
    info, source, aligned = predictor.info, images.source, images.aligned
    real = None
    if images.accepted is not None:
        real = Reassessment(images.accepted, source, images.model, aligned)
    tally, errors = Tally(len(aligned.classes), info.score), list[tuple[str, DataError]]()
    batches = run_source(source, info.preprocess, predictor.load, "logits", batch_size, workers)
    done = 0
    for slots, answers in _count(batches, source, tally, aligned):
        for i, ((file, error), best) in enumerate(zip(slots, answers, strict=True), done):
            label = int(source.labels[i]) if images.has_labels else None
            if error is not None:
                errors.append((file, error))
            right = real.add(i, best[0][0]) if real is not None and best else None
            named = tuple((aligned.classes[answer], score) for answer, score in best)
            on_answer(
                Answer(
                    file,
                    None if label is None else aligned.classes[label],
                    named,
                    bool(best) and best[0][0] == label,
                    right,
                    error,
                )
            )
        done += len(slots)
        on_progress(done, len(source))
    if not tally.count:
        raise DataError(
            f"none of the {len(source):,} images can be read",
            where=images.data,
            hint=f"the first error is: {errors[0][0]}: {errors[0][1].what}",
        )
    result, warnings = tally.result(), images.warnings
    if not math.isfinite(result.loss):
        warnings = (*warnings, f"some outputs are not finite numbers: {NOT_FINITE}")
    inference = predictor.load()
    return Report(
        predictor.name,
        images.data,
        images.split,
        info.model.image_size,
        str(inference.device),
        str(inference.dtype).removeprefix("torch."),
        aligned.classes,
        tuple(aligned.first.tolist()),
        tally.count,
        result if images.has_labels else None,
        real,
        warnings,
        tuple(errors),
    )


def open_labelled(
    predictor: Predictor,
    data: DataConfig,
    split: Split = "auto",
    rules: MatchRules | None = None,
    accepted: Accepted | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Labelled:
    """A dataset to evaluate a checkpoint on; classes are matched by id, then by unique name.

    Args:
        split: "auto" takes the test split, else the validation split (on the data that the model
            was trained on: what its run held out), else all images.
        rules: how classes are matched, and among which the model answers; None: the defaults.
        accepted: ReaL labels (`imagenet.read_accepted`); a directory of images without class
            directories has no others.
        report: called with a line about what takes time.

    Raises:
        DataError: the data cannot be used, or has classes that are not the model's.
        ConfigError: the model does not classify, or does not name its classes.
    """
    info, rules = predictor.info, rules or MatchRules()
    if not info.model.num_classes:
        raise ConfigError(
            "the model has no classification head",
            where=predictor.name,
            hint="evaluate its features: "
            f"`vit fewshot --data {data.path} --model {predictor.name}`",
        )
    if info.score == "none":
        raise ConfigError("the model is a regression and predicts no classes", where=predictor.name)
    source = None
    if accepted is not None:
        source = open_unlabelled(Path(os.path.expanduser(data.path)), imagenet_classes())
    has_labels, name, warnings = source is None, "all images", tuple[str, ...]()
    if source is None:
        record = _split_record(predictor.file.parent)
        source, name, warnings = open_split(data, split, record, report)
        present = np.flatnonzero(source.counts()).tolist()
    else:
        present, rules = list(range(len(source.classes))), replace(rules, skip_unknown=True)
    model, assumed = _classes_of(predictor, source, accepted is not None)
    aligned = align(source.classes, present, model, rules, imagenet_classes(), data.path)
    there, left_out = {name for label in source.classes for name in label}, list[str]()
    if absent := [name for name in rules.mapping if name not in there]:
        warnings += (f"the mapping names classes that {data.path} does not have: {listed(absent)}",)
    if has_labels:
        source, left_out = _evaluated(source, aligned)
    if len(aligned.classes) < len(model):
        report(
            f"predictions are restricted to {len(aligned.classes):,} of the model's "
            f"{len(model):,} classes"
        )
    warnings = (*warnings, *assumed, *left_out)
    return Labelled(data.path, name, source, aligned, model, accepted, has_labels, warnings)


def _classes_of(
    predictor: Predictor, source: Source, imagenet: bool
) -> tuple[tuple[ClassLabel, ...], list[str]]:
    """The model's classes, and what had to be assumed where it does not name them."""
    count = predictor.info.model.num_classes
    if predictor.info.classes:
        return predictor.classes, []
    unnamed = "the model has no class names: assuming"
    if len(source.classes) == count:
        return source.classes, [f"{unnamed} those of the dataset, in their order"]
    if count == len(imagenet_classes()) and imagenet:
        return imagenet_classes(), [f"{unnamed} those of ImageNet"]
    raise ConfigError(
        f"the model has {count:,} classes without names, but the dataset has "
        f"{len(source.classes):,}",
        where=predictor.name,
        hint=f"write a copy with names: `vit convert {predictor.name} DST --classes FILE`",
    )


def _evaluated(source: Source, aligned: Alignment) -> tuple[Source, list[str]]:
    """The images of classes that can be answered, labelled with these; a line about the others."""
    labels, counts = aligned.of_data[source.labels], source.counts()
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise DataError("no images are left to evaluate", where=source.root)
    lines = []
    if len(kept) < len(source):
        names = [
            label.name
            for label, count, place in zip(source.classes, counts, aligned.of_data, strict=True)
            if count and place < 0
        ]
        count = len(source) - len(kept)
        lines = [f"left out: {counted(count, 'image')} of {listed(names)}"]
    return replace(source.select(kept), classes=aligned.classes, labels=labels[kept]), lines


def _split_record(directory: Path) -> dict[str, Any] | None:
    """The split of a run (its split.json)."""
    try:
        record = json.loads((directory / "split.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
