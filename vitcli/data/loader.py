"""Batches of images, decoded by worker processes.

A batch is a function of (seed, step) alone: workers only decide when it is ready. Workers share the
work of a batch in chunks, and send them as numpy arrays through pipes: torch would send tensors
through shared memory, of which containers often have 64 MB, and a full one kills the worker.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from vitcli.data.order import batch_orders, sample_rng
from vitcli.data.source import Ints, Source
from vitcli.data.transforms import EvalTransform, TrainTransform
from vitcli.errors import DataError, ImageError, VitError

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,))."""

_CHUNK_BYTES = 4 << 20


class _Order(NamedTuple):
    """A chunk to make: which images, in which epochs."""

    indices: Ints
    epochs: Ints
    last: bool
    """Whether the chunk ends a batch."""


class _Chunk(NamedTuple):
    images: npt.NDArray[np.uint8]
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
    balanced: bool = False,
    part: range | None = None,
    lead: int = 0,
) -> Generator[Batch]:
    """Each global batch, or a part of it, for the steps start_step .. steps - 1.

    Args:
        on_unreadable: called with each image that cannot be read, whenever it comes. The next
            readable image of its class (`Source.same_class`) takes its place, with the same
            random choices; which one depends on the files alone.
        part: places in the global batch; None: all.
        lead: images before the part that come with it; before the first image is the last one.

    Raises:
        ImageError: no image of a class can be read.
    """
    part = range(batch_size) if part is None else part
    places = np.arange(part.start - lead, part.stop) % batch_size
    share = -(-len(places) // max(workers, 1))
    chunk_size = max(1, min(share, _CHUNK_BYTES // (3 * transform.size[0] * transform.size[1])))
    orders = (
        _Order(indices[chunk], epochs[chunk], chunk[-1] == places[-1])
        for indices, epochs in batch_orders(source, batch_size, seed, start_step, steps, balanced)
        for chunk in np.split(places, range(chunk_size, len(places), chunk_size))
    )
    images = _Images(source, transform, seed)
    if workers:
        ahead = 2 * len(places)  # two batches in all
        chunks = _in_processes(images, orders, workers, max(1, ahead // (chunk_size * workers)))
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
            gathered.append(chunk)
            if chunk.last:
                pixels = torch.from_numpy(np.concatenate([piece.images for piece in gathered]))
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
        images = []
        shown, unreadable = order.indices.copy(), list[ImageError]()
        for place, epoch in enumerate(order.epochs.tolist()):
            wanted = int(order.indices[place])
            for index in self.source.same_class(wanted):
                try:
                    images.append(self._image(index, sample_rng(self.seed, epoch, wanted)))
                    shown[place] = index
                    break
                except ImageError as error:
                    unreadable.append(error)
            else:  # returned, as torch would bury it in the text of a traceback
                return unreadable[-1]
        return _Chunk(torch.stack(images).numpy(), shown, unreadable, order.last)

    def _image(self, index: int, rng: np.random.Generator) -> torch.Tensor:
        try:
            data = self.source.read(index)
            if isinstance(self.transform, EvalTransform):
                return self.transform(data)
            return self.transform(data, rng)
        except ImageError as error:
            hint = error.hint or "repair or remove the file"
            raise ImageError(error.what, where=self.source.where(index), hint=hint) from error


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
            hint="if memory ran out, lower --workers",
        )


def _unchanged(chunk: object) -> object:
    return chunk


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # the processes are the parallelism
    # Ctrl-C, and the SIGTERM of a scheduler, reach the whole group: the main process alone decides
    # how a run ends. Workers end with it (they watch an event, and whether it is alive).
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
