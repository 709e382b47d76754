"""Evaluation of a checkpoint on any labeled images: `open_labeled` matches their classes to the
model's, and `evaluate` measures it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitcli.config import ClassLabel, DataConfig, Size
from vitcli.data.alignment import Alignment, MatchRules, align
from vitcli.data.classes import quote_list
from vitcli.data.dataset import Split, open_split
from vitcli.data.directory import open_unlabeled
from vitcli.data.source import Source
from vitcli.errors import ConfigError, DataError, ImageError, warn
from vitcli.evaluation.imagenet import (
    ReaLAccuracy,
    ReaLLabels,
    correct_classes,
    imagenet_classes,
)
from vitcli.inference import run_source
from vitcli.metrics import Evaluation, MetricAccumulator
from vitcli.prediction import Predictor
from vitcli.typed_json import from_json
from vitcli.words import pluralize, public_url, quote

if TYPE_CHECKING:
    from torch import Tensor


def _align_logits(logits: Tensor, alignment: Alignment) -> Tensor:
    """Map logits (B, K) of the model's classes to the evaluated classes. If several of the model's
    classes map to one, take their maximum."""
    import torch

    if len(alignment.classes) == logits.shape[1]:
        return logits
    mapped = torch.from_numpy(np.flatnonzero(alignment.model_to_class >= 0))
    class_indices = torch.from_numpy(alignment.model_to_class)[mapped].expand(len(logits), -1)
    aligned = logits.new_full((len(logits), len(alignment.classes)), float("-inf"))
    return aligned.scatter_reduce(1, class_indices, logits[:, mapped], "amax")


@dataclass(frozen=True)
class LabeledImages:
    """A dataset to evaluate on, with its classes aligned to a model's."""

    data: str
    split: str
    """Description of the split."""
    source: Source
    """Its labels are indices into the aligned classes."""
    alignment: Alignment
    accepted: list[set[int]] | None
    """The aligned classes that are correct for each image by its ReaL labels, evaluated in addition
    to the dataset's own."""
    has_labels: bool
    """Whether the dataset has labels of its own; images without class directories have none."""


@dataclass(frozen=True)
class Report:
    """The result of `evaluate`."""

    model: str
    data: str
    split: str
    """Description of the split."""
    resolution: Size
    """Height and width of the model's input."""
    device: str
    precision: str
    """Dtype of the encoder: "float32", "bfloat16" or "float16"."""
    classes: tuple[ClassLabel, ...]
    """What labels and predictions index: the model's classes, or those that it may predict."""
    indices: tuple[int, ...]
    """Index of each class in the model; the first if several map to one."""
    images: int
    """Number of images read."""
    evaluation: Evaluation | None
    """None if the images have no labels of their own."""
    real: ReaLAccuracy | None
    """Accuracy on ReaL labels, which accept several classes per image."""
    errors: tuple[ImageError, ...]
    """Errors of unreadable images, which no metric counts."""


@dataclass(frozen=True, slots=True)
class LabeledPrediction:
    """The prediction for one labeled image, or the error that prevented reading it."""

    file: str
    label: ClassLabel | None
    """None if the dataset has no labels."""
    best: tuple[tuple[ClassLabel, float], ...] = ()
    """The top five classes (or fewer) and their scores, best first."""
    correct: bool = False
    """Whether the top class is the label."""
    accepted: bool | None = None
    """Whether the top class is among the ReaL labels; None if they do not apply."""
    error: ImageError | None = None


def evaluate(
    predictor: Predictor,
    images: LabeledImages,
    batch_size: int | None = None,
    workers: int | None = None,
    on_prediction: Callable[[LabeledPrediction], None] = lambda prediction: None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Report:
    """Evaluate a checkpoint on a dataset.

    Args:
        images: opened with this predictor, or one of the same model at another resolution.
        workers: number of decoding threads; None for one per core.
        on_prediction: called with the prediction for each image, in order.
        on_progress: called with the number of images in each batch.

    Raises:
        DataError: no image can be read.
    """
    info, source, alignment = predictor.info, images.source, images.alignment
    real = None if images.accepted is None else ReaLAccuracy(images.accepted)
    accumulator = MetricAccumulator(len(alignment.classes), info.score)
    errors = list[ImageError]()
    batches = run_source(
        source, predictor, "logits", workers, on_progress, errors.append, batch_size
    )
    for items, indices, logits in batches:
        top = iter(accumulator.add(_align_logits(logits, alignment), source.labels[indices]))
        for i, file, error in items:
            label = int(source.labels[i]) if images.has_labels else None
            best = next(top) if error is None else []
            accepted = real.add(i, best[0][0]) if real is not None and best else None
            top_classes = tuple((alignment.classes[index], score) for index, score in best)
            on_prediction(
                LabeledPrediction(
                    file,
                    None if label is None else alignment.classes[label],
                    top_classes,
                    bool(best) and best[0][0] == label,
                    accepted,
                    error,
                )
            )
    evaluation = accumulator.result()
    predictor.check_finite(evaluation.loss)
    inference = predictor.load()
    return Report(
        predictor.name,
        images.data,
        images.split,
        info.model.image_size,
        str(inference.device),
        str(inference.dtype).removeprefix("torch."),
        alignment.classes,
        tuple(alignment.class_to_model.tolist()),
        accumulator.count,
        evaluation if images.has_labels else None,
        real,
        tuple(errors),
    )


def open_labeled(
    predictor: Predictor,
    data: DataConfig,
    split: Split = "auto",
    rules: MatchRules | None = None,
    real_labels: ReaLLabels | None = None,
    report: Callable[[str], None] = lambda message: None,
) -> LabeledImages:
    """Open a dataset for evaluation, matching classes by id, then by unique name.

    Args:
        split: "auto" takes the test split, else the validation split (on the model's own training
            data, the images that its run held out), else all images.
        rules: how classes are matched, and which the model may predict; None for the defaults.
        real_labels: ReaL labels (`registry.real_labels`), the only labels of a directory of images
            without class directories.
        report: called with a status message.

    Raises:
        DataError: the dataset cannot be used, or has classes that the model does not have.
        ConfigError: the model is not a classifier, or its classes have no names.
    """
    info, rules = predictor.info, rules or MatchRules()
    fewshot = f"vit fewshot --data {quote(data.path)} --model {quote(predictor.name)}"
    info.require_head(predictor.name, f"evaluate its features: `{fewshot}`")
    if info.score == "none":
        raise ConfigError("the model is a regression and predicts no classes", where=predictor.name)
    source = None
    if real_labels is not None:
        source = open_unlabeled(Path(data.path), imagenet_classes())
    has_labels, split_name = source is None, "all images"
    if source is None:
        record = _split_record(predictor.file.parent)
        source, split_name = open_split(data, split, record, report)
        present = np.flatnonzero(source.counts()).tolist()
    else:
        present, rules = list(range(len(source.classes))), replace(rules, skip_unknown=True)
    model_classes = _get_model_classes(predictor, source, real_labels is not None)
    alignment = align(source.classes, present, model_classes, rules, imagenet_classes(), data.path)
    dataset_names = {name for label in source.classes for name in label}
    if absent := [name for name in rules.mapping if name not in dataset_names]:
        warn(f"no classes {quote_list(absent)}, which the mapping names", data.path)
    if has_labels:
        source = _select_evaluated(source, alignment, data.path)
    if len(alignment.classes) < len(model_classes):
        report(
            f"predictions are restricted to {len(alignment.classes):,} of the model's "
            f"{len(model_classes):,} classes"
        )
    accepted = None
    if real_labels is not None:
        accepted = correct_classes(real_labels, source, model_classes, alignment)
    return LabeledImages(public_url(data.path), split_name, source, alignment, accepted, has_labels)


def _get_model_classes(
    predictor: Predictor, source: Source, allow_imagenet: bool
) -> tuple[ClassLabel, ...]:
    """The model's classes; warns about what is assumed if they have no names."""
    count = predictor.info.model.num_classes
    if predictor.info.classes:
        return predictor.classes
    prefix = "no class names: assuming"
    if count == len(imagenet_classes()) and allow_imagenet:
        warn(f"{prefix} those of ImageNet", predictor.name)
        return imagenet_classes()
    if len(source.classes) == count:
        warn(f"{prefix} those of the dataset, in their order", predictor.name)
        return source.classes
    raise ConfigError(
        f"the model has {count:,} classes without names, but the dataset has "
        f"{len(source.classes):,}",
        where=predictor.name,
        hint=f"write a copy with names: `vit convert {quote(predictor.name)} DST --classes FILE`",
    )


def _select_evaluated(source: Source, alignment: Alignment, where: str) -> Source:
    """Select and relabel the images of classes that can be predicted; warn about the others."""
    labels = alignment.data_to_class[source.labels]
    kept = np.flatnonzero(labels >= 0)
    if not len(kept):
        raise DataError("no images are left to evaluate", where=where)
    if len(kept) < len(source):
        unmatched = np.flatnonzero((alignment.data_to_class < 0) & (source.counts() > 0))
        names = quote_list(source.classes[i].name for i in unmatched)
        left_out = pluralize(len(source) - len(kept), "image")
        warn(f"left out: {left_out} of {names}", where)
    return replace(source.select(kept), classes=alignment.classes, labels=labels[kept])


def _split_record(directory: Path) -> dict[str, Any] | None:
    """Read the split of the run in this directory (split.json), if it has a valid one."""
    path = directory / "split.json"
    try:
        # In another person's model, it may be a link to a pipe or an endless device.
        text = path.read_text("utf-8") if path.is_file() else "null"
        record: dict[str, Any] | None = json.loads(text)
        if record is not None and record["kind"] == "held out":
            DataConfig(str(path), val_fraction=record["fraction"], split_seed=record["seed"])
            from_json(list[str], record["val"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError):
        return None
    return record
