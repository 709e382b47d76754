"""Batched inference, with images decoded in background threads.

Prediction, evaluation (of a checkpoint or during training) and feature extraction share this code,
so the same weights at the same precision give the same numbers everywhere. Heavy imports are
deferred, so that the first images are decoded while torch is being imported.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

from vitcli.config import ModelConfig
from vitcli.data.decoder import PAUSE, Batch, BatchItem, Decoder
from vitcli.data.image_inputs import ImageInput
from vitcli.errors import ConfigError, DataError, ImageError
from vitcli.machine import cpu_cores, free_memory, is_launched

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vitcli.checkpoints.info import CheckpointInfo
    from vitcli.config import Architecture
    from vitcli.data.source import Ints, Source
    from vitcli.distributed import Ranks
    from vitcli.prediction import Predictor

T = TypeVar("T")
Output = Literal["logits", "features", "losses", "reconstructions"]
"""What is computed of an image; the last two, by objectives that hide patches."""

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
        if isinstance(self.model, ViT):
            self.model.computes_all_tokens = False
            if device.type == "cpu" and dtype is torch.bfloat16:
                accelerate(self.model, CORE_BATCH)
        self.batch_size = CORE_BATCH * cpu_cores() if device.type == "cpu" else GPU_BATCH
        self.chunk_size = sys.maxsize

    def load(self) -> Inference:
        """Return the loaded model, as `Predictor.load` does."""
        return self

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


Batches = Iterator[tuple[list[BatchItem], "Ints", "Tensor"]]
"""For each batch, in order: its images, the indices of those without an error, and the model's
output for these."""


def run(
    images: Iterator[ImageInput],
    model: Predictor | Inference,
    output: Output,
    batch_size: int | None = None,
    workers: int | None = None,
    pause: float | None = PAUSE,
) -> Batches:
    """Run a model over images in batches, distributed over ranks; every rank yields all results.

    Args:
        model: loaded once decoding of the first images has started.
        batch_size: None for the device's default.
        workers: number of decoding threads; None for one per core.
        pause: seconds to wait for an image before running a partial batch; None to wait forever.
    """
    indexed, preprocess = enumerate(images), model.info.preprocess
    if (ranks := current_ranks()) is None:
        decoder = Decoder(indexed, preprocess, batch_size or 0, workers, pause)
        yield from _run(decoder, model, output, batch_size)
        return
    size = batch_size or model.load().batch_size
    own = (pair for pair in indexed if pair[0] // size % ranks.world_size == ranks.rank)
    decoder = Decoder(own, preprocess, size, workers, pause=None)
    own_batches = _run(decoder, model, output, size)
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
    decoder: Decoder, model: Predictor | Inference, output: Output, batch_size: int | None
) -> Batches:
    """Implement `run` for the images of this process."""
    import numpy as np

    with decoder:
        inference = model.load()
        size = batch_size or inference.batch_size
        compute = partial(inference.compute, output)
        with contextlib.closing(CorePool(inference.device)) as cores:
            pending: deque[tuple[list[BatchItem], Ints, Callable[[], Tensor]]] = deque()
            while True:
                # Start the next batch before the slowest core has finished this one.
                while not pending or (len(pending) < 2 and decoder.ready(size)):
                    items, batch = decoder.take(size)
                    if not items:
                        break
                    indices = np.array([index for index, _ in batch], np.int64)
                    pending.append((items, indices, cores.submit(compute, batch)))
                if not pending:
                    break
                items, indices, wait = pending.popleft()
                yield items, indices, wait()


def run_source(
    source: Source,
    model: Predictor | Inference,
    output: Output,
    workers: int | None = None,
    on_progress: Callable[[int], None] = lambda count: None,
    on_unreadable: Callable[[ImageError], None] = lambda error: None,
    batch_size: int | None = None,
) -> Batches:
    """Like `run` for the images of a source, always in the same batches.

    Args:
        on_progress: called with the number of images in each batch.
        on_unreadable: called with the error for each unreadable image.

    Raises:
        DataError: no image can be read.
    """
    images = (ImageInput(source.where(i), partial(source.read, i)) for i in range(len(source)))
    errors = list[ImageError]()
    batches = run(images, model, output, batch_size, workers, pause=None)
    for items, indices, outputs in batches:
        for error in (item.error for item in items if item.error is not None):
            errors.append(error)
            on_unreadable(error)
        yield items, indices, outputs
        on_progress(len(items))
    if len(errors) == len(source):
        raise DataError(
            f"none of the {len(source):,} images can be read",
            where=source.root,
            hint=f"the first error is: {errors[0].message}",
        )


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
