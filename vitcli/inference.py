"""Runs a model over images that threads decode while it computes.

Prediction, evaluation (of a checkpoint, or of a model in training) and features all come this way,
so the same weights at the same precision give the same numbers everywhere. Importing this module
imports nothing heavy: the first images are decoded while torch is being imported.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from vitcli.config import ModelConfig
from vitcli.data.decoder import PAUSE, Decoder
from vitcli.data.inputs import ImageInput
from vitcli.errors import ConfigError, DataError, ImageError
from vitcli.machine import cpu_cores, free_memory, is_launched

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vitcli.checkpoints.info import CheckpointInfo
    from vitcli.config import Architecture, Preprocess
    from vitcli.data.decoder import Pixels
    from vitcli.data.source import Ints, Source
    from vitcli.distributed import Ranks

T = TypeVar("T")

CORE_BATCH = 4
"""Images for each core of a CPU at once; more of them outgrow its caches."""
GPU_BATCH = 64
LONG_SEQUENCE = 4096
"""Tokens of an image above which users are warned."""
SLOW = (
    "{:,} tokens per image: the time that attention takes grows quadratically; a lower resolution "
    "or a larger patch size is much faster"
)
"""The warning."""


def check_memory(model: Architecture, device: str = "cpu") -> None:
    """Raises ConfigError where images are too large for the memory that is free; an estimate, made
    before any work: 16 decoded images wait for the model, which keeps a few vectors per token."""
    height, width = model.image_size
    needed = 72 * height * width
    if isinstance(model, ModelConfig) and not device.startswith("cuda"):
        needed += 4 * model.num_tokens * (5 * model.width + model.mlp_dim)
    if needed > (free := free_memory()):
        raise ConfigError(
            f"images of {height} x {width} pixels need about {needed / 1e9:.0f} GB of memory, "
            f"but only {free / 1e9:.0f} GB are free",
            hint="use a lower --resolution",
        )


class Slot(NamedTuple):
    """An image of a batch; one with an error has no row in the batch's tensor."""

    name: str
    error: DataError | None


class Inference:
    """A model in evaluation mode, its encoder in `dtype` and its head in float32: the head takes a
    thousandth of the time, and logits with the 8 bits of bf16 may tie.

    Args:
        tensors: its weights; shared where they need no conversion.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        import torch

        from vitcli.checkpoints.load import build
        from vitcli.models.cpu import accelerate
        from vitcli.models.vit import ViT

        self.info, self.device, self.dtype = info, device, dtype
        self.model = build(info, dict(tensors), device, dtype).eval()
        heads = {n: t.to(device).float() for n, t in tensors.items() if n.startswith("head")}
        self.model.load_state_dict(heads, strict=False, assign=True)
        if device.type == "cpu" and dtype is torch.bfloat16 and isinstance(self.model, ViT):
            accelerate(self.model, CORE_BATCH)
        self.batch_size = CORE_BATCH * cpu_cores() if device.type == "cpu" else GPU_BATCH
        self.at_once = sys.maxsize

    def compute(self, output: Literal["logits", "features"], pixels: list[Pixels]) -> Tensor:
        """Logits or features of images, float32 (n, ...) on the CPU."""
        import numpy as np
        import torch

        from vitcli.data.transforms import to_float

        if not pixels:
            return torch.empty(0, 1)
        with torch.inference_mode():
            stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
            images = to_float(stacked.to(self.device), self.info.preprocess).to(self.dtype)
            function = self.model if output == "logits" else self.model.features
            return self._within_memory(function, images).float().cpu()

    def _within_memory(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """A batch in parts of `at_once` images, which is halved until a part fits into memory."""
        import torch

        from vitcli.devices import ran_out_of_memory

        rows: list[Tensor] = []
        while len(images):
            part = images[: self.at_once]
            try:
                rows.append(function(part))
                images = images[len(part) :]
            except RuntimeError as error:
                if len(part) == 1 or not ran_out_of_memory(error):
                    raise
                self.at_once = (len(part) + 1) // 2
        return torch.cat(rows)


Batches = Iterator[tuple[list[Slot], "Tensor"]]
"""The slots of each batch, in order, and the model's output for those without an error."""


def run(
    images: Iterator[ImageInput],
    preprocess: Preprocess,
    load: Callable[[], Inference],
    output: Literal["logits", "features"],
    batch_size: int | None = None,
    workers: int | None = None,
    pause: float | None = PAUSE,
) -> Batches:
    """Computes images in batches. Ranks deal out the batches among them, and each has all results.

    Args:
        load: gives the model; called once the first images are on their way.
        batch_size: images at once; None: by device.
        workers: threads that decode; None: one for each core.
        pause: seconds without a new image after which a smaller batch is computed; None: never.
    """
    if (ranks := current_ranks()) is None:
        yield from _run(images, preprocess, load, output, batch_size, workers, pause)
        return
    inference = load()
    unit = batch_size or inference.batch_size
    turns = (i // unit % ranks.count for i in itertools.count())
    mine = (image for turn, image in zip(turns, images, strict=False) if turn == ranks.rank)
    own = _run(mine, preprocess, lambda: inference, output, unit, workers, None)
    while True:
        for batch in ranks.gather(next(own, None)):
            if batch is None:
                return
            yield batch


def current_ranks() -> Ranks | None:
    """The ranks that share the work of this command; None where it is alone."""
    if not is_launched():
        return None
    from vitcli import distributed

    return distributed.current()


def _run(
    images: Iterator[ImageInput],
    preprocess: Preprocess,
    load: Callable[[], Inference],
    output: Literal["logits", "features"],
    batch_size: int | None,
    workers: int | None,
    pause: float | None,
) -> Batches:
    """`run` in this process."""
    with Decoder(images, preprocess, batch_size or 0, workers, pause) as decoder:
        inference = load()
        count = batch_size or inference.batch_size
        with contextlib.closing(Cores(inference.device)) as cores:
            running: deque[tuple[list[Slot], Callable[[], Tensor]]] = deque()
            while True:
                # The next batch is under way before this one's slowest core is done.
                while not running or (len(running) < 2 and decoder.ready(count)):
                    if not (decoded := decoder.take(count)):
                        break
                    pixels = [got for _, got in decoded if not isinstance(got, DataError)]
                    slots = [
                        Slot(name, got if isinstance(got, DataError) else None)
                        for name, got in decoded
                    ]
                    running.append((slots, cores.start(partial(inference.compute, output), pixels)))
                if not running:
                    break
                slots, result = running.popleft()
                yield slots, result()


def run_source(
    source: Source,
    preprocess: Preprocess,
    load: Callable[[], Inference],
    output: Literal["logits", "features"],
    batch_size: int | None = None,
    workers: int | None = None,
) -> Batches:
    """`run` over the images of a source, always in the same batches."""
    images = (ImageInput(source.where(i), partial(source.read, i)) for i in range(len(source)))
    return run(images, preprocess, load, output, batch_size, workers, pause=None)


def features_of(
    inference: Inference,
    source: Source,
    workers: int | None,
    on_progress: Callable[[int], None],
    on_unreadable: Callable[[ImageError], None],
) -> tuple[Tensor, Ints]:
    """The features of the images that can be read, float32 (n, feature_dim) on the CPU, and the
    indices of these images in the source (n,).

    Args:
        on_progress: called with the number of images of each batch.
        on_unreadable: called with each image that cannot be read.

    Raises:
        DataError: none can be read.
    """
    import numpy as np
    import torch

    rows, readable = [torch.empty(0, inference.info.model.feature_dim)], list[bool]()
    preprocess = inference.info.preprocess
    batches = run_source(source, preprocess, lambda: inference, "features", workers=workers)
    for slots, features in batches:
        report_unreadable(slots, on_unreadable)
        readable += [slot.error is None for slot in slots]
        rows += [features] * bool(len(features))
        on_progress(len(slots))
    if not any(readable):
        raise none_readable(source)
    return torch.cat(rows), np.flatnonzero(readable)


def none_readable(source: Source) -> DataError:
    """The error where no image of a split can be read."""
    return DataError(
        f"none of the {len(source):,} images can be read",
        where=source.root,
        hint=f"the first one is {source.where(0)}",
    )


def report_unreadable(slots: list[Slot], on_unreadable: Callable[[ImageError], None]) -> None:
    """Calls a function with each image that could not be read."""
    for name, error in slots:
        if error is not None:
            hint = error.hint or "repair or remove the file"
            on_unreadable(ImageError(error.what, where=name, hint=hint))


class Cores:
    """Splits a batch into one part for each core, which is faster than all cores sharing every
    matrix product. Small batches, and those of a GPU, stay whole."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.count = torch.get_num_threads() if device.type == "cpu" else 1
        self.pool = ThreadPoolExecutor(self.count, "compute", torch.set_num_threads, (1,))
        if self.count > 1:
            started = threading.Barrier(self.count)

            def settle(_: int) -> int:
                started.wait()
                return torch.get_num_threads()  # the first query makes the number the thread's own

            list(self.pool.map(settle, range(self.count)))
            torch.set_num_threads(self.count)  # for threads that start later

    def close(self) -> None:
        """Lets the threads end."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def start(self, compute: Callable[[list[T]], Tensor], batch: list[T]) -> Callable[[], Tensor]:
        """Starts to compute a batch; the returned function waits for its rows."""
        import torch

        if self.count == 1 or len(batch) < 2 * self.count:
            return partial(compute, batch)
        share = -(-len(batch) // self.count)
        parts = [batch[i : i + share] for i in range(0, len(batch), share)]
        results = self.pool.map(compute, parts)
        return lambda: torch.cat(list(results))
