"""Batches of images, decoded by worker processes.

A batch is a function of (seed, step) alone: workers only decide when it is ready. Batches travel
in chunks, so that the first arrives soon and shared memory holds little.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitcli.config import Size
from vitcli.data.order import batch_orders, sample_rng
from vitcli.data.source import Ints, Source
from vitcli.data.transforms import EvalTransform, TrainTransform
from vitcli.errors import DataError, ImageError, VitError

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,))."""

_CHUNK_BYTES = 4 << 20
_CHUNK_IMAGES = 256


class _Order(NamedTuple):
    """A chunk to make: which images, in which epochs."""

    indices: Ints
    epochs: Ints
    last: bool
    """Whether the chunk ends a batch."""


class _Chunk(NamedTuple):
    images: torch.Tensor
    indices: Ints
    unreadable: list[ImageError]
    last: bool


def train_batches(
    source: Source,
    transform: TrainTransform | EvalTransform,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int,
    workers: int,
    on_unreadable: Callable[[ImageError], None],
    rank: int = 0,
    world: int = 1,
    balanced: bool = False,
) -> Generator[Batch]:
    """This rank's run of each global batch, for the steps start_step .. steps - 1. Rank r of w gets
    the r-th of w consecutive runs of the batch.

    `on_unreadable` is called with each image that cannot be read, whenever it comes. The next
    readable image of its class (`Source.same_class`) takes its place, with the same random
    choices; which one depends on the files alone.

    Raises:
        ImageError: no image of a class can be read.
    """
    first, end = batch_size * rank // world, batch_size * (rank + 1) // world
    chunk_size, prefetch = _amounts(transform.size, batch_size // world, workers)
    orders = (
        _Order(indices[start:stop], epochs[start:stop], stop == end)
        for indices, epochs in batch_orders(source, batch_size, seed, start_step, steps, balanced)
        for start in range(first, end, chunk_size)
        for stop in [min(start + chunk_size, end)]
    )
    images = _Images(source, transform, seed)
    if workers:
        chunks = _in_processes(images, orders, workers, prefetch)
    else:
        chunks = (images[order] for order in orders)
    # A program that ends with batches left over would wait forever for the workers, which ignore
    # SIGTERM; closing the generator ends them first.
    atexit.register(chunks.close)
    gathered: list[_Chunk] = []
    try:
        for chunk in chunks:
            if isinstance(chunk, VitError):
                raise chunk
            for error in chunk.unreadable:
                on_unreadable(error)
            # A copy makes room in the memory that processes share.
            gathered.append(chunk._replace(images=chunk.images.clone()) if workers else chunk)
            if chunk.last:
                pixels = torch.cat([piece.images for piece in gathered])
                indices = np.concatenate([piece.indices for piece in gathered])
                yield pixels, torch.from_numpy(source.labels[indices]), torch.from_numpy(indices)
                gathered = []
    finally:
        chunks.close()
        atexit.unregister(chunks.close)


class _Images(Dataset[_Chunk | VitError]):
    """Makes chunks; lives in the worker processes."""

    def __init__(
        self, source: Source, transform: TrainTransform | EvalTransform, seed: int
    ) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, order: _Order) -> _Chunk | VitError:
        chunk = _Chunk(torch.empty(0), order.indices.copy(), [], order.last)
        images = []
        for place, epoch in enumerate(order.epochs.tolist()):
            wanted = int(order.indices[place])
            for index in self.source.same_class(wanted):
                try:
                    images.append(self._image(index, sample_rng(self.seed, epoch, wanted)))
                    chunk.indices[place] = index
                    break
                except ImageError as error:
                    chunk.unreadable.append(error)
            else:  # returned, as torch would bury it in the text of a traceback
                return chunk.unreadable[-1]
        return chunk._replace(images=torch.stack(images))

    def _image(self, index: int, rng: np.random.Generator) -> torch.Tensor:
        try:
            data = self.source.read(index)
            if isinstance(self.transform, EvalTransform):
                return self.transform(data)
            return self.transform(data, rng)
        except ImageError as error:
            hint = error.hint or "repair or remove the file"
            raise ImageError(error.what, where=self.source.where(index), hint=hint) from error


def _amounts(size: Size, batch_size: int, workers: int) -> tuple[int, int]:
    """(images of a chunk, chunks that each worker prepares ahead): two batches ahead in all, as far
    as half of the shared memory holds them. Containers often have 64 MB of it, and a worker that
    finds it full dies of a bus error."""
    image = 3 * size[0] * size[1]
    if not workers:
        return max(1, min(batch_size, _CHUNK_BYTES // image)), 0
    ahead = 2 * batch_size
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = os.statvfs(shared)
        ahead = min(ahead, free.f_bavail * free.f_frsize // 2 // image)
    chunk = max(1, min(_CHUNK_IMAGES, _CHUNK_BYTES // image, -(-ahead // (2 * workers))))
    return chunk, max(1, ahead // (chunk * workers))


def _in_processes(
    images: _Images, orders: Iterator[_Order], workers: int, prefetch: int
) -> Generator[_Chunk | VitError]:
    # Drawn here: if there is none to draw, no process is to be left behind.
    if (first := next(orders, None)) is None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        chunks: Any = iter(
            DataLoader(
                images,
                batch_size=None,
                sampler=itertools.chain([first], orders),
                num_workers=workers,
                prefetch_factor=prefetch,
                collate_fn=_unchanged,
                worker_init_fn=_start_worker,
                # Forked workers share the index arrays and start at once; macOS and Windows cannot.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator(),  # else it draws from the generator that dropout uses
            )
        )
    failure = None
    try:
        yield from chunks
    except RuntimeError as error:  # torch's own: what the workers expect is among the chunks
        failure = str(error).partition("\n")[0]
    finally:
        del chunks  # the last reference: the workers end now
    if failure:
        raise DataError(
            f"a worker process that decodes images failed: {failure}",
            hint="if memory ran out, use fewer: --workers",
        )


def _unchanged(chunk: object) -> object:
    return chunk


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # the processes are the parallelism
    # Ctrl-C, and the SIGTERM of a scheduler, reach the whole group: the main process alone decides
    # how a run ends. Workers end with it (they watch an event, and whether it is alive).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
