"""Predict classes or features of images, streaming results in order.

Heavy imports are deferred (see `inference.py`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vitcli.checkpoints import read
from vitcli.checkpoints.info import unique_names, warn_of_assumptions, warn_of_left_out
from vitcli.config import ClassLabel, PosembMethod, Precision, Score, Size
from vitcli.data.image_inputs import ImageInput, find_images
from vitcli.errors import NOT_FINITE, ImageError, warn
from vitcli.fields import as_size, check_choice, check_positive
from vitcli.hub import registry
from vitcli.inference import (
    LONG_SEQUENCE,
    LONG_SEQUENCE_WARNING,
    Batches,
    Inference,
    Output,
    check_memory,
    run,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from vitcli.checkpoints.info import CheckpointInfo
    from vitcli.checkpoints.load import LoadedModel
    from vitcli.hub.fetch import Progress

    AnyImage = str | Path | bytes | Image | ImageInput
    Images = AnyImage | Iterable[AnyImage]

TOP_K = 5
"""Default number of classes per image."""
_LOADING = threading.Lock()  # concurrent first calls must not load a model more than once


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted class of an image."""

    index: int
    id: str
    label: str
    """The class name, with the id if it is not unique: "crane (n02012849)"."""
    score: float


@dataclass(frozen=True, slots=True)
class Result:
    """The predictions for one image, or the error that prevented reading it."""

    file: str
    model: str
    predictions: tuple[Prediction, ...] = ()
    """Best first."""
    features: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    """(feature_dim,), the input of the head; only from `Predictor.embed`."""
    error: ImageError | None = None


def predict(
    spec: str | Path,
    images: Images,
    *,
    top_k: int = TOP_K,
    threshold: float | None = None,
    batch_size: int | None = None,
    workers: int | None = None,
    device: str | torch.device = "auto",
    precision: Precision = "auto",
    resolution: int | Size | None = None,
    posemb_method: PosembMethod = "bilinear",
    preprocess: Mapping[str, Any] | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Iterator[Result]:
    """Classify images, yielding results in order. An unreadable image yields a result with `error`.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        images: one or more names as on the command line (files, directories, patterns, URLs),
            encoded bytes, or Pillow images. An iterator is consumed in a background thread.
        top_k: number of classes per image.
        threshold: leave out classes with a lower score; None keeps all.
        batch_size: None for the device's default.
        workers: number of decoding threads; None for one per core.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto (bf16 if the hardware supports it), fp32, bf16 or fp16.
        resolution: input size, an int for both sides or (height, width); None for the checkpoint's.
        posemb_method: how to resize position embeddings for another resolution.
        preprocess: fields of `Preprocess` to override.
        offline: never use the network.
        on_progress: called while a checkpoint is downloaded.
        allow_pickle: accept Hub repos that have only pickled weights; no code in them is run.

    Raises:
        VitError: the model cannot be loaded, or has no classification head.
    """
    predictor = Predictor(
        spec,
        device,
        precision,
        offline,
        on_progress,
        resolution,
        posemb_method,
        allow_pickle,
        preprocess,
    )
    return predictor.predict(images, top_k, threshold, batch_size, workers)


class Predictor:
    """A checkpoint ready for inference. The header is read immediately; the weights (and torch) are
    loaded once decoding of the first images has started.

    Args:
        resolution: input size, if not the checkpoint's; position embeddings are resized by
            `posemb_method`. The checkpoint's is the size that its library feeds the
            model: transformers may crop images to fewer pixels than DINOv2 was trained on.
        preprocess: fields of `Preprocess` to override.

    The other arguments and the errors are those of the function `predict`.
    """

    def __init__(
        self,
        spec: str | Path,
        device: str | torch.device = "auto",
        precision: Precision = "auto",
        offline: bool = False,
        on_progress: Progress | None = None,
        resolution: int | Size | None = None,
        posemb_method: PosembMethod = "bilinear",
        allow_pickle: bool = False,
        preprocess: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("posemb_method", PosembMethod, posemb_method)
        check_choice("precision", Precision, precision)
        self.requested = str(device), precision
        self.info: CheckpointInfo
        """Metadata of the model."""
        self.info, self.file = read.read_info(
            spec, offline=offline, on_progress=on_progress, allow_pickle=allow_pickle
        )
        if preprocess:
            self.info = self.info.with_preprocess(preprocess)
        if resolution is None and "input_size" in self.info.provenance:  # as transformers does
            height, width = self.info.provenance["input_size"]
            resolution, posemb_method = (height, width), "bicubic-hf"
        resolution = as_size(resolution)
        self.stored_model, self.posemb_method = self.info.model, posemb_method
        if resolution is not None and resolution != self.stored_model.image_size:
            from vitcli.checkpoints.adapt import at_size

            self.info = at_size(self.info, resolution, posemb_method)
            check_memory(self.info.model, self.requested[0])
            if self.info.model.num_tokens > LONG_SEQUENCE:
                warn(LONG_SEQUENCE_WARNING.format(self.info.model.num_tokens))
        self.name = registry.aliases().get(str(spec), str(spec))
        warn_of_assumptions(self.info, self.name)
        warn_of_left_out(self.info, self.name)
        self.offline = offline
        self._inference: Inference | None = None

    @property
    def classes(self) -> tuple[ClassLabel, ...]:
        """The model's classes, named by index if the checkpoint has no names."""
        count = self.info.model.num_classes
        return self.info.classes or tuple(ClassLabel(str(i), str(i)) for i in range(count))

    def with_info(self, info: CheckpointInfo) -> Predictor:
        """Return a predictor for the same file, loaded as a different model with a subset of its
        tensors: without a head, or with fewer blocks."""
        clone = copy.copy(self)
        clone.info = info
        return clone

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles load the model again, which cannot be copied on every CPU."""
        return {**self.__dict__, "_inference": None}

    def predict(
        self,
        images: Images,
        top_k: int = TOP_K,
        threshold: float | None = None,
        batch_size: int | None = None,
        workers: int | None = None,
    ) -> Iterator[Result]:
        """Classify images; see the function `predict`."""
        check_positive(top_k=top_k)
        self.info.require_head(self.name, "save its features instead with --features FILE.npy")
        batches = self._run(images, "logits", batch_size, workers)
        return self._predict(batches, top_k, threshold)

    def _predict(self, batches: Batches, top_k: int, threshold: float | None) -> Iterator[Result]:
        classes, names = self.classes, unique_names(self.classes)
        for items, _, logits in batches:
            rows = iter(logits)
            for _, name, error in items:
                best = () if error else self._top_classes(next(rows), top_k)
                predictions = (
                    Prediction(i, classes[i].id, names[i], score)
                    for score, i in best
                    if threshold is None or score >= threshold
                )
                yield Result(name, self.name, tuple(predictions), error=error)

    def _top_classes(self, logits: Tensor, top_k: int) -> Iterator[tuple[float, int]]:
        """Return the top scores and classes of one image. On a whole batch, torch would wait for
        the other cores, which are computing the next one."""
        best = logits.topk(min(top_k, len(logits))).indices
        scores = to_scores(logits, self.info.score)[best]
        self.check_finite(float(scores[0]))  # NaN counts as the largest
        return zip(scores.tolist(), best.tolist(), strict=True)

    def check_finite(self, output: float) -> None:
        """Warn if an output is not finite, as it would look like a valid result."""
        if not math.isfinite(output):
            warn(f"some outputs are not finite: {NOT_FINITE}", self.name)

    def embed(
        self, images: Images, batch_size: int | None = None, workers: int | None = None
    ) -> Iterator[Result]:
        """Compute the features of each image, in order: results with `features`, or `error`."""
        return self._embed(self._run(images, "features", batch_size, workers))

    def _embed(self, batches: Batches) -> Iterator[Result]:
        for items, _, features in batches:
            rows = iter(features.numpy())
            for _, name, error in items:
                row = None if error else next(rows)
                self.check_finite(0.0 if row is None else float(row.sum()))
                yield Result(name, self.name, features=row, error=error)

    def _run(
        self, images: Images, output: Output, batch_size: int | None, workers: int | None
    ) -> Batches:
        check_positive(batch_size=batch_size, workers=workers)
        inputs = iter_images(images, self.offline)
        return run(inputs, self, output, batch_size, workers)

    def load(self) -> Inference:
        """Load the model onto its device in its precision; cached."""
        with _LOADING:
            self._inference = self._inference or self._load()
        return self._inference

    def _load(self) -> Inference:
        _prefetch(self.file)
        from vitcli.checkpoints.adapt import adapt
        from vitcli.checkpoints.load import load_weights
        from vitcli.devices import choose_device, choose_precision

        device = choose_device(self.requested[0])
        dtype = choose_precision(self.requested[1], device)
        weights = load_weights(self.file).tensors
        tensors = {name: weights[name] for name in self.info.model.tensor_shapes()}
        if self.info.model != self.stored_model:
            tensors = adapt(tensors, self.stored_model, self.info.model, self.posemb_method)
        return Inference(self.info, tensors, device, dtype)

    @property
    def model(self) -> LoadedModel:
        """The torch module, for inference in `precision`: a ResNet's weights are standardized, and
        bf16 on a CPU replaces some layers with fused ones. `vitcli.load` returns the ordinary
        module."""
        return self.load().model


def to_scores(logits: Tensor, score: Score) -> Tensor:
    """Convert logits (..., K) to scores, like transformers' pipeline."""
    if score == "none":
        return logits
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _prefetch(file: Path) -> None:
    """Have the kernel prefetch the weights while torch is being imported."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), open(file, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def iter_images(images: Images, offline: bool = False) -> Iterator[ImageInput]:
    """Yield image inputs; strings and paths are expanded as on the command line."""
    is_one = isinstance(images, (str, Path, bytes, bytearray, memoryview, ImageInput))
    # Arrays of pixels or bytes and open files are iterable, too.
    is_one |= getattr(getattr(images, "dtype", None), "kind", "") in {*"biuf"}
    is_one |= getattr(images, "ndim", 0) >= 2 or hasattr(images, "read")
    if is_one or not isinstance(images, Iterable):
        images = [cast(Any, images)]
    for image in images:
        if isinstance(image, (bytearray, memoryview)):
            image = bytes(image)
        if isinstance(image, ImageInput):
            yield image
        elif isinstance(image, (str, Path)):
            yield from find_images([str(image)], offline)
        else:
            name = getattr(image, "filename", "") or f"<{type(image).__name__}>"
            yield ImageInput(name, partial(_identity, image), shared=not isinstance(image, bytes))


def _identity(image: Any) -> Any:
    return image
