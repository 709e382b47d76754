"""What is in images: a model's answers, in order, as they come.

Threads find and decode images beside the model (see data/decoder.py). They start first of all: by
the time torch is imported and the weights are there, the first images are too. Importing this
module therefore imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vitcli.checkpoints import read
from vitcli.config import ClassLabel, PosembMethod, Score, Size
from vitcli.data.decoder import Decoder
from vitcli.data.inputs import ImageInput, find_images
from vitcli.errors import ConfigError, DataError
from vitcli.hub import registry
from vitcli.layouts.timm_config import unique_names
from vitcli.machine import cpu_cores

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from PIL.Image import Image
    from torch import Tensor

    from vitcli.checkpoints.info import CheckpointInfo
    from vitcli.checkpoints.load import LoadedModel
    from vitcli.data.decoder import Pixels
    from vitcli.hub.fetch import Progress

    AnyImage = str | Path | bytes | Image | ImageInput

TOP_K = 5
"""Classes that are named for each image."""
CORE_BATCH = 4
"""Images that a CPU computes at once, by core: with more, they outgrow its caches."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class that an image may show."""

    index: int
    id: str
    label: str
    """The class's name; with its id where several classes have it: "crane (n02012849)"."""
    score: float


@dataclass(frozen=True, slots=True)
class Result:
    """The answer for one image: its classes, best first, or what is wrong with it."""

    file: str
    model: str
    predictions: tuple[Prediction, ...] = ()
    error: DataError | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """The head's input for one image, float32 (feature_dim,), or what is wrong with it."""

    file: str
    model: str
    features: npt.NDArray[np.float32] | None = None
    error: DataError | None = None


def predict(
    spec: str | Path,
    images: AnyImage | Iterable[AnyImage],
    *,
    top_k: int = TOP_K,
    threshold: float | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    precision: str = "auto",
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Iterator[Result]:
    """Classifies images, in order, as they come; one that cannot be read has an `error` instead.

    Args:
        spec: a file, a folder, a registry name ("vit-b16-i21k"), "default", or "org/repo[@rev]".
        images: names as on the command line (files, folders, patterns, URLs), encoded bytes, or
            Pillow's images; one, or any number. An iterator is advanced in a thread of its own.
        top_k: classes for each image.
        threshold: leave out classes with a lower score; None keeps all.
        batch_size: images that the model sees at once; None: by device.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: auto (bf16 where the hardware has it), fp32, bf16 or fp16.
        offline: never touch the network.
        on_progress: called while a checkpoint is fetched.
        allow_pickle: take a Hub repo whose weights are a pickle only; nothing in it is run.

    Raises:
        VitError: the model cannot be had, or has no classes.
    """
    predictor = Predictor(spec, device, precision, offline, on_progress, allow_pickle=allow_pickle)
    return predictor.predict(images, top_k, threshold, batch_size)


class Slot(NamedTuple):
    """An image of a batch; with an error it has no row in the batch's tensor."""

    name: str
    error: DataError | None


class Predictor:
    """A checkpoint that is asked about images. Its header is read at once; its weights, and
    torch, when the first images are on their way.

    Args:
        resolution: of its images, where that is not the checkpoint's: the position embeddings
            are resized by `posemb_method`.
    """

    def __init__(
        self,
        spec: str | Path,
        device: str = "auto",
        precision: str = "auto",
        offline: bool = False,
        on_progress: Progress | None = None,
        resolution: Size | None = None,
        posemb_method: PosembMethod = "bilinear",
        allow_pickle: bool = False,
    ) -> None:
        self.info, self.file = read.read_info(spec, offline, on_progress, allow_pickle)
        self.stored, self.posemb_method = self.info.model, posemb_method
        if resolution is not None and resolution != self.stored.image_size:
            from vitcli.checkpoints.adapt import at_size

            self.info = at_size(self.info, resolution, posemb_method)
        self.name = registry.aliases().get(str(spec), str(spec))
        self.classes = self.info.classes or tuple(
            ClassLabel(str(i), str(i)) for i in range(self.info.model.num_classes)
        )
        self.offline = offline
        self.wanted = device, precision
        self._model: LoadedModel | None = None

    def with_info(self, info: CheckpointInfo) -> Predictor:
        """The same file as another model, whose tensors are among the file's: without a head, or
        with fewer blocks."""
        other = copy.copy(self)
        other.info, other._model = info, None
        return other

    def predict(
        self,
        images: AnyImage | Iterable[AnyImage],
        top_k: int = TOP_K,
        threshold: float | None = None,
        batch_size: int | None = None,
    ) -> Iterator[Result]:
        """The function `predict`, of this model."""
        if not self.classes:
            raise ConfigError(
                "the model has no classes: it gives features",
                where=self.name,
                hint="save them with --features FILE.npy",
            )
        names, k = unique_names(self.classes), min(top_k, len(self.classes))
        for slots, logits in self.batches(images, "logits", batch_size):
            rows = iter(logits)
            for name, error in slots:
                answers = () if error is not None else self._best(next(rows), names, k, threshold)
                yield Result(name, self.name, tuple(answers), error)

    def _best(
        self, logits: Tensor, names: Sequence[str], k: int, threshold: float | None
    ) -> Iterator[Prediction]:
        """The best classes of one image. Of many at once, torch would ask for the other cores,
        and wait for them to be done with the next."""
        scores = to_scores(logits, self.info.score)
        best = scores.topk(min(k, len(scores)))
        for score, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if threshold is None or score >= threshold:
                yield Prediction(i, self.classes[i].id, names[i], score)

    def embed(
        self, images: AnyImage | Iterable[AnyImage], batch_size: int | None = None
    ) -> Iterator[Embedding]:
        """The head's input for each image, in order."""
        for slots, features in self.batches(images, "features", batch_size):
            rows = iter(features.numpy())
            for name, error in slots:
                yield Embedding(name, self.name, None if error else next(rows), error)

    def batches(
        self,
        images: AnyImage | Iterable[AnyImage],
        output: Literal["logits", "features"],
        batch_size: int | None = None,
    ) -> Iterator[tuple[list[Slot], Tensor]]:
        """The slots of each batch, in order, and the model's output for those without an error:
        float32 (n, num_classes or feature_dim) on the CPU."""
        found = as_images(images, self.offline)
        with Decoder(found, self.info.preprocess, batch_size or 0) as decoder:
            _expect(self.file)
            model = self.model
            compute = partial(self._run, model if output == "logits" else model.features)
            self.batch_size = batch_size or (
                CORE_BATCH * cpu_cores() if self.device.type == "cpu" else 64
            )
            with contextlib.closing(Cores(self.device)) as cores:
                running: deque[tuple[list[Slot], Callable[[], Tensor]]] = deque()
                while True:
                    # The next batch is under way before this one's slowest core is done.
                    while not running or (len(running) < 2 and decoder.ready(self.batch_size)):
                        if not (decoded := decoder.take(self.batch_size)):
                            break
                        pixels = [got for _, got in decoded if not isinstance(got, DataError)]
                        slots = [
                            Slot(n, got if isinstance(got, DataError) else None)
                            for n, got in decoded
                        ]
                        running.append((slots, cores.start(compute, pixels)))
                    if not running:
                        break
                    slots, result = running.popleft()
                    yield slots, result()

    @property
    def model(self) -> LoadedModel:
        """The model on its device, at its precision; loaded when first asked for."""
        if self._model is None:
            from vitcli.checkpoints.adapt import adapt
            from vitcli.checkpoints.load import build, load_weights
            from vitcli.devices import PRECISIONS, choose_device, choose_precision
            from vitcli.models.cpu import accelerate
            from vitcli.models.vit import ViT

            device, precision = self.wanted
            self.device = choose_device(device)
            self.dtype = choose_precision(precision, self.device)
            weights = load_weights(self.file).tensors
            tensors = {name: weights[name] for name in self.info.model.tensor_shapes()}
            if self.info.model != self.stored:
                tensors = adapt(tensors, self.stored, self.info.model, self.posemb_method)
            self._model = build(self.info, tensors, self.device, self.dtype).eval()
            # A head takes a thousandth of the time, and the 8 bits of a logit in bf16 may tie.
            heads = {n: t.to(self.device).float() for n, t in tensors.items() if "head" in n}
            self._model.load_state_dict(heads, strict=False, assign=True)
            fast = self.device.type == "cpu" and self.dtype == PRECISIONS["bf16"]
            if fast and isinstance(self._model, ViT):
                accelerate(self._model, CORE_BATCH)
        return self._model

    def _run(self, compute: Callable[[Tensor], Tensor], pixels: list[Pixels]) -> Tensor:
        import numpy as np
        import torch

        from vitcli.data.transforms import to_float

        if not pixels:
            return torch.empty(0, 1)
        with torch.inference_mode():
            stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
            images = to_float(stacked.to(self.device), self.info.preprocess).to(self.dtype)
            return self._within_memory(compute, images).float().cpu()

    def _within_memory(self, compute: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Halves the batch, and those to come, for as long as memory does not hold it."""
        import torch

        from vitcli.devices import ran_out_of_memory

        try:
            return compute(images)
        except RuntimeError as error:
            if len(images) == 1 or not ran_out_of_memory(error):
                raise
        self.batch_size = (len(images) + 1) // 2
        return torch.cat([self._within_memory(compute, part) for part in images.chunk(2)])


class Cores:
    """A batch in parts, each computed by a core of its own: cores that share every matrix wait for
    each other. What is small, or on a GPU, is computed in one."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.count = torch.get_num_threads() if device.type == "cpu" else 1
        self.pool = ThreadPoolExecutor(self.count, "compute", torch.set_num_threads, (1,))
        if self.count > 1:
            all_there = threading.Barrier(self.count)

            def settle(_: int) -> int:
                all_there.wait()
                return torch.get_num_threads()  # from the first question on, its number is its own

            list(self.pool.map(settle, range(self.count)))
            torch.set_num_threads(self.count)  # of threads to come, too

    def close(self) -> None:
        """Lets the threads end."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def start(
        self, compute: Callable[[list[Pixels]], Tensor], batch: list[Pixels]
    ) -> Callable[[], Tensor]:
        """Begins to compute a batch; the function that waits for it gives its rows."""
        import torch

        if self.count == 1 or len(batch) < 2 * self.count:
            return partial(compute, batch)
        share = -(-len(batch) // self.count)
        parts = [batch[i : i + share] for i in range(0, len(batch), share)]
        results = self.pool.map(compute, parts)
        return lambda: torch.cat(list(results))


def to_scores(logits: Tensor, score: Score) -> Tensor:
    """The scores of logits (..., K), as transformers' pipeline has them."""
    if score == "none":
        return logits
    return logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)


def _expect(file: Path) -> None:
    """Asks the system to read the weights into memory while torch is being imported."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def as_images(images: AnyImage | Iterable[AnyImage], offline: bool = False) -> Iterator[ImageInput]:
    """Whatever names or is an image, one by one; strings and paths as on the command line."""
    if isinstance(images, (str, Path, bytes, ImageInput)) or not isinstance(images, Iterable):
        images = [images]
    for image in images:
        if isinstance(image, ImageInput):
            yield image
        elif isinstance(image, (str, Path)):
            yield from find_images([str(image)], offline)
        else:
            name = getattr(image, "filename", "") or f"<{type(image).__name__}>"
            yield ImageInput(name, partial(_given, image), shared=not isinstance(image, bytes))


def _given(image: Any) -> Any:
    return image
