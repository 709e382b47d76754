"""How good a model is on labelled pictures.

`evaluate` is the command's: any checkpoint on any data, decoded in threads as for `vit predict`.
`evaluate_model` is the training loop's: a model as it stands, decoded in worker processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitcli.config import ClassLabel, DataConfig, Preprocess, Score
from vitcli.data.inputs import Picture
from vitcli.data.records import Source
from vitcli.data.sources import Part, open_part
from vitcli.errors import ConfigError, DataError
from vitcli.metrics import Evaluation, Tally
from vitcli.prediction import Predictor

if TYPE_CHECKING:
    import torch
    from torch import nn


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
    tally, errors, done = (
        Tally(info.model.num_classes, info.score),
        list[tuple[str, DataError]](),
        0,
    )
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
    score: Score = "softmax",
    on_progress: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """One pass over `source` in evaluation mode; leaves the model in it.

    Args:
        model: (B, 3, H, W) -> logits (B, K); its classes are the source's, in the same order.
        dtype: of the computation (autocast); weights stay as they are.
        score: what makes a confidence of a logit.
        on_progress: called with the number of pictures of each batch.

    Raises:
        PictureError: names a picture that cannot be decoded.
    """
    import torch

    from vitcli.data.loader import eval_batches
    from vitcli.data.transforms import EvalTransform, to_float

    tally = Tally(len(source.classes), score)
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
