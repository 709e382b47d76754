"""What the loop's model sees: images, or features where these cannot change.

With a frozen backbone and no augmentation an image's features are the same in every epoch. They
are computed once, of images as evaluation sees them, and the run trains the head on them: the
same function of the weights at a small part of the cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from vitcli.data.loader import train_batches
from vitcli.data.order import batch_orders
from vitcli.data.source import Source
from vitcli.data.transforms import EvalTransform, to_float
from vitcli.devices import free_memory, to_device
from vitcli.errors import NOT_FINITE, CheckpointError
from vitcli.evaluate import evaluate_source
from vitcli.inference import Inference, features_of
from vitcli.metrics import Evaluation, Tally

if TYPE_CHECKING:
    from vitcli.train.run import Run

Report = Callable[[dict[str, Any]], None]
Computed = dict[tuple[str, str], Tensor]
"""Features (N, D) of a part ("train", "val") of images, by their fingerprint: what the runs of a
sweep, which start from one model, have from each other."""

EVALUATED_AT_ONCE = 8192
"""Rows of features."""


class Inputs(Protocol):
    """The training and the validation part, as a model takes them."""

    @property
    def parts(self) -> int:
        """How many parts a batch goes through the model in."""

    def batches(self, first: int, last: int) -> Generator[tuple[Tensor, Tensor]]:
        """(inputs (B, ...), labels int64 (B,)) of the steps first + 1 to last, on the device."""

    def logits(self, inputs: Tensor) -> Tensor:
        """The model's answers (B, K)."""

    def evaluate(self, model: Any) -> Evaluation:
        """A model, or its average, on the validation part; leaves it in evaluation mode."""


def make_inputs(run: Run, report: Report, computed: Computed) -> Inputs:
    """Images, or their features where they are fixed and fit into memory: those that are
    `computed` already, else they are added there."""
    if not has_fixed_features(run):
        return Images(run, report)
    count = len(run.train) + (len(run.val) if run.val is not None else 0)
    text = f"the features of {count:,} images are computed once: nothing changes them"
    report({"event": "note", "text": text})
    return Features(run, counting("features", count, report), computed)


def counting(what: str, total: int, report: Report) -> Callable[[int], None]:
    """Called with the images of a batch, reports how many of all are done, after a second."""
    done, started = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if time.monotonic() - started > 1.0:
            report({"event": "progress", "what": what, "done": done, "total": total})

    return advance


def has_fixed_features(run: Run) -> bool:
    """Whether `Features` can stand for `Images`: they are fixed, and fit into memory."""
    images = len(run.train) + (len(run.val) if run.val is not None else 0)
    needed = 4 * images * run.info.model.feature_dim
    return _are_features_fixed(run) and needed < free_memory(run.device) / 4


def _are_features_fixed(run: Run) -> bool:
    """Whether an image's features are the same at every step."""
    config, augment = run.config, run.config.augment
    changed = augment.flip or augment.randaugment or augment.erasing or augment.crop_area != (1, 1)
    mixed = augment.mixup or augment.cutmix or config.dropout
    two_heads = bool(getattr(run.model, "head_dist", None))
    return not (config.freeze != "backbone" or changed or mixed or two_heads)


class Images:
    """Decoded and augmented for every step."""

    def __init__(self, run: Run, report: Report) -> None:
        self.run, self.report = run, report

    @property
    def parts(self) -> int:
        return self.run.config.accumulate or 1

    def batches(self, first: int, last: int) -> Generator[tuple[Tensor, Tensor]]:
        run, config = self.run, self.run.config
        # The pixels that `Features` sees: how much memory is free decides nothing but the time.
        still = EvalTransform(run.preprocess) if _are_features_fixed(run) else None
        for pixels, labels, _ in train_batches(
            run.train,
            still or run.train_transform,
            batch_size=config.batch_size or 1,
            seed=config.seed,
            start_step=first,
            steps=last,
            workers=config.workers or 0,
            balanced=config.balanced_sampling,
        ):
            images = to_float(to_device(pixels, run.device), run.preprocess)
            yield images, to_device(labels, run.device)

    def logits(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.run.model(inputs)
        return logits

    def evaluate(self, model: nn.Module) -> Evaluation:
        run = self.run
        assert run.val is not None
        advance = counting("validation", len(run.val), self.report)
        inference = inference_of(run, model)
        return evaluate_source(inference, run.val, None, run.config.workers, advance)


def inference_of(run: Run, model: nn.Module) -> Inference:
    """A model in training, or its average, as `vit predict` would compute with it."""
    return Inference(run.info, model.state_dict(), run.device, run.dtype)


class Features:
    """Features (N, D) in float32, on the device."""

    parts = 1

    def __init__(self, run: Run, advance: Callable[[int], None], computed: Computed) -> None:
        self.run = run

        def features(part: str, source: Source) -> Tensor:
            key = part, source.fingerprint()
            if key not in computed:
                computed[key] = self._compute(source, advance)
            return computed[key]

        self.train = features("train", run.train)
        self.val = features("val", run.val) if run.val is not None else None

    def batches(self, first: int, last: int) -> Generator[tuple[Tensor, Tensor]]:
        run, config = self.run, self.run.config
        labels = torch.from_numpy(run.train.labels)
        for indices, _ in batch_orders(
            run.train, config.batch_size or 1, config.seed, first, last, config.balanced_sampling
        ):
            rows = torch.from_numpy(indices)
            yield self.train[to_device(rows, run.device)], to_device(labels[rows], run.device)

    def logits(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.run.model.head(inputs)
        return logits

    def evaluate(self, model: Any) -> Evaluation:
        run = self.run
        assert run.val is not None and self.val is not None
        tally = Tally(len(run.val.classes), run.config.loss)
        with torch.inference_mode():
            for start in range(0, len(self.val), EVALUATED_AT_ONCE):
                part = slice(start, start + EVALUATED_AT_ONCE)
                logits = model.head(self.val[part])  # in float32, as `Inference` has it
                tally.add(logits.float().cpu(), run.val.labels[part])
        return tally.result()

    def _compute(self, source: Source, advance: Callable[[int], None]) -> Tensor:
        """Raises CheckpointError where a feature is not finite."""
        run = self.run
        inference = inference_of(run, run.model)
        features = features_of(inference, source, run.config.workers, advance).to(run.device)
        if not features.isfinite().all():
            raise CheckpointError(
                "the model's features are not finite numbers",
                where=run.config.model,
                hint=NOT_FINITE,
            )
        return features
