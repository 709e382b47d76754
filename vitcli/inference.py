"""Batched inference, with images decoded in background threads.

Prediction, evaluation (of a checkpoint or during training) and feature extraction share this code,
so the same weights at the same precision give the same numbers everywhere. Heavy imports are
deferred, so that the first images are decoded while torch is being imported.
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
from typing import TYPE_CHECKING, Literal, TypeVar

from vitcli.config import ModelConfig
from vitcli.data.decoder import PAUSE, BatchItem, Decoder
from vitcli.data.image_inputs import ImageInput
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
Output = Literal["logits", "features", "losses", "pictures"]
"""What is computed of an image; losses and pictures, by objectives that hide patches."""
Batch = list[tuple[int, "Pixels"]]
"""Decoded images and their indices."""

CORE_BATCH = 4
"""Batch size per CPU core; larger batches do not fit in its caches."""
GPU_BATCH = 64
LONG_SEQUENCE = 4096
"""Number of tokens per image above which to warn."""
LONG_SEQUENCE_WARNING = (
    "{:,} tokens per image: attention time grows quadratically with this number; a lower "
    "resolution or a larger patch size is much faster"
)
"""Warning for long sequences."""
_STARTING = threading.Lock()
"""Held while threads of a pool set torch's number of threads, which is also that of new threads."""


def check_memory(model: Architecture, device: str = "cpu") -> None:
    """Raise ConfigError if images are too large for the free memory. A rough estimate: 16 decoded
    images are queued for the model, which keeps a few vectors per token."""
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


class Inference:
    """A model in evaluation mode, with its encoder in `dtype` and its head in float32: the head
    takes a thousandth of the time, and logits with the 8 bits of bf16 may tie.

    Args:
        tensors: the weights; shared unless they need conversion.
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
        from vitcli.models.resnet import StdConv
        from vitcli.models.vit import ViT

        self.info, self.device, self.dtype = info, device, dtype
        self.model = build(info, dict(tensors), device, dtype).eval()
        heads = {n: t.to(device).float() for n, t in tensors.items() if n.startswith("head")}
        self.model.load_state_dict(heads, strict=False, assign=True)
        for module in self.model.modules():
            if isinstance(module, StdConv):
                module.standardize()
        if device.type == "cpu" and dtype is torch.bfloat16 and isinstance(self.model, ViT):
            accelerate(self.model, CORE_BATCH)
        self.batch_size = CORE_BATCH * cpu_cores() if device.type == "cpu" else GPU_BATCH
        self.chunk_size = sys.maxsize

    def compute(self, output: Output, batch: Batch) -> Tensor:
        """Compute logits or features of images, float32 (n, ...) on the CPU."""
        import numpy as np
        import torch

        from vitcli.data.transforms import to_float

        if not batch:
            model = self.info.model
            size = model.num_classes if output == "logits" else model.feature_dim
            return torch.empty(0, size, dtype=torch.float32, device="cpu")
        # The caller's autocast would apply only to batches that this thread computes.
        with torch.inference_mode(), torch.autocast(self.device.type, enabled=False):
            stacked = torch.from_numpy(np.stack([pixels for _, pixels in batch]))
            stacked = stacked.permute(0, 3, 1, 2)
            images = to_float(stacked.to(self.device), self.info.preprocess).to(self.dtype)
            function = self.model if output == "logits" else self.model.features
            return self._run_in_chunks(function, images).float().cpu()

    def _run_in_chunks(self, function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Process a batch in chunks of `chunk_size` images, halving it when memory runs out."""
        import torch

        from vitcli.devices import is_out_of_memory

        outputs: list[Tensor] = []
        while len(images):
            chunk = images[: self.chunk_size]
            try:
                outputs.append(function(chunk))
                images = images[len(chunk) :]
            except RuntimeError as error:
                if len(chunk) == 1 or not is_out_of_memory(error):
                    raise
                self.chunk_size = (len(chunk) + 1) // 2
        return torch.cat(outputs)


Batches = Iterator[tuple[list[BatchItem], "Tensor"]]
"""The items of each batch, in order, and the model output for those without an error."""


def run(
    images: Iterator[ImageInput],
    preprocess: Preprocess,
    load: Callable[[], Inference],
    output: Output,
    batch_size: int | None = None,
    workers: int | None = None,
    pause: float | None = PAUSE,
) -> Batches:
    """Run a model over images in batches, distributed over ranks; every rank yields all results.

    Args:
        load: returns the model; called once decoding of the first images has started.
        batch_size: None for the device's default.
        workers: number of decoding threads; None for one per core.
        pause: seconds to wait for an image before running a partial batch; None to wait forever.
    """
    if (ranks := current_ranks()) is None:
        decoder = Decoder(images, preprocess, batch_size or 0, workers, pause)
        yield from _run(decoder, load, output, batch_size, itertools.count())
        return
    inference = load()
    size = batch_size or inference.batch_size

    def is_own(index: int) -> bool:
        return index // size % ranks.world_size == ranks.rank

    own_images = (image for i, image in enumerate(images) if is_own(i))
    decoder = Decoder(own_images, preprocess, size, workers, pause=None)
    own_indices = filter(is_own, itertools.count())
    own_batches = _run(decoder, lambda: inference, output, size, own_indices)
    while True:
        for batch in ranks.gather(next(own_batches, None)):
            if batch is None:
                return
            yield batch


def current_ranks() -> Ranks | None:
    """The ranks that share this command's work; None in a single process."""
    if not is_launched():
        return None
    from vitcli import distributed

    return distributed.current()


def _run(
    decoder: Decoder,
    load: Callable[[], Inference],
    output: Output,
    batch_size: int | None,
    indices: Iterator[int],
) -> Batches:
    """Implement `run` for this process, whose images have these indices."""
    with decoder:
        inference = load()
        size = batch_size or inference.batch_size
        compute = partial(inference.compute, output)
        with contextlib.closing(CorePool(inference.device)) as cores:
            pending: deque[tuple[list[BatchItem], Callable[[], Tensor]]] = deque()
            while True:
                # Start the next batch before the slowest core has finished this one.
                while not pending or (len(pending) < 2 and decoder.ready(size)):
                    items, pixels = decoder.take(size)
                    if not items:
                        break
                    taken = zip(items, indices, strict=False)
                    readable = (index for item, index in taken if item.error is None)
                    batch = list(zip(readable, pixels, strict=True))
                    pending.append((items, cores.submit(compute, batch)))
                if not pending:
                    break
                items, wait = pending.popleft()
                yield items, wait()


def run_source(
    source: Source,
    preprocess: Preprocess,
    load: Callable[[], Inference],
    output: Output,
    batch_size: int | None = None,
    workers: int | None = None,
) -> Batches:
    """Like `run` for the images of a source, always in the same batches."""
    images = (ImageInput(source.where(i), partial(source.read, i)) for i in range(len(source)))
    return run(images, preprocess, load, output, batch_size, workers, pause=None)


def run_readable(
    inference: Inference,
    source: Source,
    output: Output,
    workers: int | None,
    on_progress: Callable[[int], None],
    on_unreadable: Callable[[ImageError], None],
) -> Iterator[tuple[Ints, Tensor]]:
    """Run a model over a split. Yields the indices of the readable images of each batch, and their
    outputs.

    Args:
        on_progress: called with the number of images in each batch.
        on_unreadable: called with the error for each unreadable image.

    Raises:
        DataError: no image can be read.
    """
    import numpy as np

    done, preprocess, any_readable = 0, inference.info.preprocess, False
    batches = run_source(source, preprocess, lambda: inference, output, workers=workers)
    for items, outputs in batches:
        for name, error in items:
            if error is not None:
                on_unreadable(ImageError(error.what, where=name))
        readable = done + np.flatnonzero([item.error is None for item in items])
        yield readable, outputs
        any_readable |= len(readable) > 0
        done += len(items)
        on_progress(len(items))
    if not any_readable:
        raise DataError(
            f"none of the {len(source):,} images can be read",
            where=source.root,
            hint=f"the first one is {source.where(0)}",
        )


def compute_features(
    inference: Inference,
    source: Source,
    workers: int | None,
    on_progress: Callable[[int], None],
    on_unreadable: Callable[[ImageError], None],
) -> tuple[Tensor, Ints]:
    """Return the features of all readable images, float32 (n, feature_dim) on the CPU, and their
    indices in the source (n,); see `run_readable`."""
    import numpy as np
    import torch

    batches = run_readable(inference, source, "features", workers, on_progress, on_unreadable)
    readable, features = zip(*batches, strict=True)
    return torch.cat(features), np.concatenate(readable)


class CorePool:
    """A thread pool that runs one chunk of a batch per CPU core, which is faster than parallelizing
    each matrix product. Small batches, and those on a GPU, are not split."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.is_exiting = sys.is_finalizing
        with _STARTING:
            self.num_threads = torch.get_num_threads() if device.type == "cpu" else 1
            self.pool = ThreadPoolExecutor(self.num_threads, "compute", torch.set_num_threads, (1,))
            if self.num_threads > 1:
                barrier = threading.Barrier(self.num_threads)

                def initialize(_: int) -> int:
                    barrier.wait()
                    return torch.get_num_threads()  # the first query makes it thread-local

                list(self.pool.map(initialize, range(self.num_threads)))
                torch.set_num_threads(self.num_threads)  # for threads that start later

    def close(self) -> None:
        """Shut down the pool without waiting."""
        if not self.is_exiting():  # see `Decoder.__exit__`
            self.pool.shutdown(wait=False, cancel_futures=True)

    def submit(self, compute: Callable[[list[T]], Tensor], batch: list[T]) -> Callable[[], Tensor]:
        """Start computing a batch; the returned function waits for the result."""
        import torch

        if self.num_threads == 1 or len(batch) < 2 * self.num_threads:
            return partial(compute, batch)
        size = -(-len(batch) // self.num_threads)
        chunks = [batch[i : i + size] for i in range(0, len(batch), size)]
        results = self.pool.map(compute, chunks)
        return lambda: torch.cat(list(results))
