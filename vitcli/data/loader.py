"""Batches of images, decoded by worker processes beside the model.

What is in a batch is a function of (seed, step) alone: workers only decide when it is ready.
Batches travel in chunks, so that the first comes soon and shared memory holds little.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from vitcli.config import Size
from vitcli.data.source import Ints, Source
from vitcli.data.transforms import EvalTransform, TrainTransform, order_rng, sample_rng
from vitcli.errors import DataError, ImageError, VitError

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,))."""

Chunk = tuple[torch.Tensor, Ints, Ints, bool]
"""A part of a batch: images, labels, indices, and whether it is the last."""

_CHUNK_BYTES = 4 << 20
_CHUNK_IMAGES = 256


@dataclass(frozen=True)
class _Order:
    """A chunk to make: which images, in which epochs (None: evaluation)."""

    indices: Ints
    epochs: Ints | None
    last: bool
    """Whether the chunk ends a batch."""


def train_batches(
    source: Source,
    transform: TrainTransform | EvalTransform,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
    balanced: bool = False,
) -> Generator[Batch]:
    """This rank's part of each global batch, for the steps start_step .. steps - 1. Rank r of w has
    the r-th of w consecutive runs of the batch.

    Raises:
        ImageError: names the image that cannot be decoded. Nothing is skipped in silence.
    """
    first, end = batch_size * rank // world, batch_size * (rank + 1) // world
    orders = (
        (indices[first:end], epochs[first:end])
        for indices, epochs in batch_orders(source, batch_size, seed, start_step, steps, balanced)
    )
    amounts = _amounts(transform.size, batch_size // world, workers)
    return _load(_Images(source, transform, seed), orders, amounts, workers)


def batch_orders(
    source: Source,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int,
    balanced: bool = False,
) -> Iterator[tuple[Ints, Ints]]:
    """(indices, epochs) of each global batch of the steps start_step .. steps - 1, both int64 (B,);
    index and epoch together decide what happens to an image.

    The images are an endless stream of epochs, one after the other, so a batch may hold the end
    of one and the start of the next. An epoch is a permutation of all images; a balanced one is
    of the same length and has as many of each class.
    """
    if not len(source):
        raise DataError("there are no images to train on", where=source.root)

    @functools.lru_cache(2)
    def order(epoch: int) -> tuple[Ints, Ints]:
        rng = order_rng(seed, epoch)
        if balanced:
            return balanced_order(source, epoch, rng)
        return rng.permutation(len(source)), np.full(len(source), epoch)

    for step in range(start_step, steps):
        position = step * batch_size + np.arange(batch_size)
        epochs, places = np.divmod(position, len(source))
        parts = [
            [array[places[epochs == epoch]] for array in order(epoch)]
            for epoch in np.unique(epochs).tolist()
        ]
        indices, seen = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        yield indices, seen


def balanced_order(source: Source, epoch: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """An epoch with as many images of each class, up to one: (indices, epochs), int64 (N,).

    Images of small classes come several times, all equally often up to once; of large classes
    some are left out. An image that comes for the r-th time has an epoch of its own, so that
    another crop of it is seen.
    """
    counts = source.counts()
    members = np.split(np.argsort(source.labels, kind="stable"), np.cumsum(counts)[:-1])
    present = np.flatnonzero(counts)
    shares = np.full(len(present), len(source) // len(present))
    shares[rng.permutation(len(present))[: len(source) % len(present)]] += 1
    most = -(-int(shares.max()) // int(counts[present].min()))  # in any epoch
    indices, epochs = [], []
    for k, share in zip(present.tolist(), shares.tolist(), strict=True):
        rounds = range(-(-share // int(counts[k])))
        indices.append(np.concatenate([rng.permutation(members[k]) for _ in rounds])[:share])
        epochs.append(epoch * most + np.arange(share) // int(counts[k]))
    mixed = rng.permutation(len(source))
    return np.concatenate(indices)[mixed], np.concatenate(epochs)[mixed]


def eval_batches(
    source: Source,
    transform: EvalTransform,
    batch_size: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
) -> Generator[Batch]:
    """All images in order, once; the last batch may be smaller. Rank r of w has the r-th of w
    consecutive runs of the data set (none, where there are fewer images than ranks).

    Raises:
        ImageError: names the image that cannot be decoded.
    """
    first, end = len(source) * rank // world, len(source) * (rank + 1) // world
    starts = range(first, end, batch_size)
    batches = ((np.arange(start, min(start + batch_size, end)), None) for start in starts)
    amounts = _amounts(transform.size, batch_size, workers)
    return _load(_Images(source, transform, 0), batches, amounts, workers)


class _Images(Dataset[Chunk | VitError]):
    """Makes chunks; lives in the worker processes."""

    def __init__(
        self, source: Source, transform: TrainTransform | EvalTransform, seed: int
    ) -> None:
        self.source = source
        self.transform = transform
        self.seed = seed

    def __getitem__(self, order: _Order) -> Chunk | VitError:
        try:
            images = [self._image(order, place) for place in range(len(order.indices))]
        except VitError as error:
            return error  # torch would bury it in the text of a traceback
        return torch.stack(images), self.source.labels[order.indices], order.indices, order.last

    def _image(self, order: _Order, place: int) -> torch.Tensor:
        index = int(order.indices[place])
        try:
            data = self.source.read(index)
            if isinstance(self.transform, EvalTransform):
                return self.transform(data)
            assert order.epochs is not None
            rng = sample_rng(self.seed, int(order.epochs[place]), index)
            return self.transform(data, rng)
        except ImageError as error:
            hint = error.hint or "repair it, or take it out of the data"
            raise ImageError(error.what, where=self.source.where(index), hint=hint) from error


def _load(
    images: _Images,
    batches: Iterable[tuple[Ints, Ints | None]],
    amounts: tuple[int, int],
    workers: int,
) -> Generator[Batch]:
    chunk_size, prefetch = amounts
    orders = _chunks(batches, chunk_size)
    if workers:
        chunks = _in_processes(images, orders, workers, prefetch)
    else:
        chunks = (images[order] for order in orders)
    # A program that ends with batches left over would wait for the workers for ever (they ignore
    # SIGTERM), so they are told to end before Python waits for them.
    atexit.register(chunks.close)
    gathered: list[Batch] = []
    try:
        for chunk in chunks:
            if isinstance(chunk, VitError):
                raise chunk
            pixels, labels, indices, last = chunk
            if workers:
                pixels = pixels.clone()  # makes room in the memory that processes share
            gathered.append((pixels, torch.from_numpy(labels), torch.from_numpy(indices)))
            if last:
                yield gathered[0] if len(gathered) == 1 else _joined(gathered)
                gathered = []
    finally:
        chunks.close()
        atexit.unregister(chunks.close)


def _joined(parts: list[Batch]) -> Batch:
    images, labels, indices = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels), torch.cat(indices)


def _chunks(batches: Iterable[tuple[Ints, Ints | None]], size: int) -> Iterator[_Order]:
    for indices, epochs in batches:
        for start in range(0, len(indices), size):
            part = slice(start, start + size)
            inner = None if epochs is None else epochs[part]
            yield _Order(indices[part], inner, start + size >= len(indices))


def _amounts(size: Size, batch_size: int, workers: int) -> tuple[int, int]:
    """(images of a chunk, chunks that each worker prepares ahead): two batches ahead in all, as
    far as half of the shared memory holds them. Containers often have 64 MB of it, and a worker
    that finds it full dies of a bus error."""
    image = 3 * size[0] * size[1]
    if not workers:
        return max(1, min(batch_size, _CHUNK_BYTES // image)), 0
    ahead = 2 * batch_size
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = os.statvfs(shared)
        ahead = min(ahead, free.f_bavail * free.f_frsize // 2 // image)
    chunk = min(_CHUNK_IMAGES, _CHUNK_BYTES // image, -(-ahead // (2 * workers)))
    chunk = max(1, chunk)
    return chunk, max(1, ahead // (chunk * workers))


def _in_processes(
    images: _Images, orders: Iterator[_Order], workers: int, prefetch: int
) -> Generator[Chunk | VitError]:
    # Drawn here: if there is none to draw, no process is to be left behind.
    if (first := next(orders, None)) is None:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
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
        chunks: Any = iter(loader)
    try:
        yield from chunks
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a process that decodes images was killed, perhaps for want of memory",
            hint="use fewer with --workers",
        ) from error
    finally:
        chunks._shutdown_workers()  # now, not when the last traceback lets go of them


def _unchanged(chunk: object) -> object:
    return chunk


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # the processes are the parallelism
    # Ctrl-C, and the SIGTERM of a scheduler, reach the whole group: the main process alone decides
    # how a run ends. Its workers end with it (they watch an event, and whether it is alive).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
