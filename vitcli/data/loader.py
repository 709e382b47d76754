"""Batches of images, decoded by worker processes.

A batch is a function of (seed, step) alone: workers only decide when it is ready. Workers share the
work of a batch in chunks: of a source, each takes the next chunk; of a stream, each has places of
its own in every batch, as it must read their lanes in order. Chunks are sent as numpy arrays
through pipes: torch would send tensors through shared memory, of which containers often have 64 MB,
and a full one kills the worker.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from vitcli.data.order import batch_orders, sample_rng
from vitcli.data.source import Ints, Source
from vitcli.data.stream import Sample, Stream
from vitcli.data.transforms import EvalTransform, TrainTransform
from vitcli.errors import DataError, ImageError, VitError
from vitcli.machine import STOP_SIGNALS

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,)); of a stream,
the numbers of the samples instead of indices."""

_CHUNK_BYTES = 4 << 20


class _Order(NamedTuple):
    """A chunk to make: which images, in which epochs."""

    indices: Ints
    epochs: Ints
    last: bool
    """Whether the chunk ends a batch."""


class _Chunk(NamedTuple):
    images: npt.NDArray[np.uint8]
    labels: Ints
    indices: Ints
    unreadable: list[ImageError]
    last: bool


def train_batches(
    source: Source | Stream,
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
            random choices; which one depends on the files alone. In a stream, it is the next one
            of the lane.
        part: places in the global batch; None: all.
        lead: images before the part that come with it; before the first image is the last one.

    Raises:
        ImageError: no image of a class can be read.
    """
    part = range(batch_size) if part is None else part
    places = np.arange(part.start - lead, part.stop) % batch_size
    share = -(-len(places) // max(workers, 1))
    chunk_size = max(1, min(share, _CHUNK_BYTES // (3 * transform.size[0] * transform.size[1])))
    if isinstance(source, Stream):
        lanes = _Lanes(source, transform, seed, batch_size, places, range(start_step, steps))
        workers = min(workers, len(places))
        chunks = _in_processes(lanes, None, workers, 2) if workers else (chunk for chunk in lanes)
    else:
        images = _Images(source, transform, seed)
        orders = (
            _Order(indices[chunk], epochs[chunk], chunk[-1] == places[-1])
            for indices, epochs in batch_orders(
                source, batch_size, seed, start_step, steps, balanced
            )
            for chunk in np.split(places, range(chunk_size, len(places), chunk_size))
        )
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
                arrays = zip(*(chunk[:3] for chunk in gathered), strict=True)
                pixels, labels, indices = map(torch.from_numpy, map(np.concatenate, arrays))
                yield pixels, labels, indices
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
        labels = self.source.labels[shown]
        return _Chunk(torch.stack(images).numpy(), labels, shown, unreadable, order.last)

    def _image(self, index: int, rng: np.random.Generator) -> torch.Tensor:
        try:
            return _pixels(self.transform, self.source.read(index), rng)
        except ImageError as error:
            raise _located(error, self.source.where(index)) from error


class _Lanes(IterableDataset[_Chunk | VitError]):
    """Makes chunks of a stream, one of every batch in each worker process."""

    def __init__(
        self,
        stream: Stream,
        transform: TrainTransform | EvalTransform,
        seed: int,
        batch_size: int,
        places: Ints,
        steps: range,
    ) -> None:
        self.stream, self.transform, self.seed = stream, transform, seed
        self.batch_size, self.places, self.steps = batch_size, places, steps

    def __iter__(self) -> Iterator[_Chunk | VitError]:
        info: Any = get_worker_info()
        number, of = (info.id, info.num_workers) if info else (0, 1)
        mine = np.array_split(self.places, of)[number].tolist()
        stream, batch = self.stream, self.batch_size
        lane_of = {place: stream.lane_of(place, batch) for place in mine}
        lanes = {
            lane: _Lane(stream.lane(lane, batch, self.seed, self.steps.start))
            for lane in sorted(set(lane_of.values()))
        }
        try:
            for _ in self.steps:
                taken = {k: lanes[k].take(stream.places(k, batch)) for k in lanes}
                wanted = [(lanes[k], *taken[k][place]) for place, k in lane_of.items()]
                yield self._chunk(wanted, last=number == of - 1)  # torch takes turns
        except VitError as error:  # returned, as torch would bury it in the text of a traceback
            yield error

    def _chunk(self, wanted: list[tuple[_Lane, int, Sample]], last: bool) -> _Chunk:
        images = np.empty((len(wanted), 3, *self.transform.size), np.uint8)
        labels, numbers = np.empty((2, len(wanted)), np.int64)
        unreadable = list[ImageError]()
        for i, (lane, epoch, asked) in enumerate(wanted):
            for sample in lane.and_next(asked):
                rng = sample_rng(self.seed, epoch, asked.number)
                try:
                    labels[i] = self.stream.label(sample)
                    if sample.image is None:
                        raise ImageError("the sample has no image")
                    images[i] = _pixels(self.transform, sample.image, rng).numpy()
                    numbers[i] = sample.number
                    break
                except ImageError as error:
                    unreadable.append(_located(error, sample.key))
            else:
                raise unreadable[-1]
        return _Chunk(images, labels, numbers, unreadable, last)


class _Lane:
    """A lane, read ahead where an image cannot be read."""

    MOST = 1000
    """Images that cannot be read, one after the other, before the run ends."""

    def __init__(self, samples: Iterator[tuple[int, Sample]]) -> None:
        self.samples = samples
        self.ahead = deque[tuple[int, Sample]]()

    def take(self, places: range) -> dict[int, tuple[int, Sample]]:
        """The next samples, with their epochs, for these places."""
        return {p: self.ahead.popleft() if self.ahead else next(self.samples) for p in places}

    def and_next(self, sample: Sample) -> Iterator[Sample]:
        """The sample, and those that the lane's next batches begin with."""
        yield sample
        for i in range(self.MOST):
            if i == len(self.ahead):
                self.ahead.append(next(self.samples))
            yield self.ahead[i][1]


def _pixels(
    transform: TrainTransform | EvalTransform, data: bytes, rng: np.random.Generator
) -> torch.Tensor:
    return transform(data) if isinstance(transform, EvalTransform) else transform(data, rng)


def _located(error: ImageError, where: str) -> ImageError:
    return ImageError(error.what, where=where, hint=error.hint or "repair or remove the file")


def _in_processes(
    dataset: Any, orders: Iterator[_Order] | None, workers: int, prefetch: int
) -> Generator[_Chunk | VitError]:
    sampler = None
    if orders is not None:
        # Drawn here: if there is none to draw, no process is to be left behind.
        if (first := next(orders, None)) is None:
            return
        sampler = itertools.chain([first], orders)
    others = set(multiprocessing.active_children())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        chunks: Any = iter(
            DataLoader(
                dataset,
                batch_size=None,
                sampler=sampler,
                num_workers=workers,
                prefetch_factor=prefetch,
                collate_fn=_unchanged,
                worker_init_fn=_start_worker,
                # Forked workers share the index arrays and start at once; macOS and Windows cannot.
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                generator=torch.Generator(),  # else it draws from the generator that dropout uses
            )
        )
    processes = set(multiprocessing.active_children()) - others
    failure = None
    try:
        yield from chunks
    except RuntimeError as error:  # torch's own: what the workers expect is among the chunks
        failure = str(error).partition("\n")[0]
    finally:
        del chunks  # the last reference: the workers end now
        for process in processes:
            process.kill()  # one that waits for a server has not ended
    if failure:
        raise DataError(
            f"a worker process that decodes images failed: {failure}",
            hint="if memory ran out, lower --workers",
        )


def _unchanged(chunk: object) -> object:
    return chunk


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # the processes are the parallelism
    # Ctrl-C, and the signals of a scheduler, reach the whole group: the main process alone decides
    # how a run ends. Workers end with it (they watch an event, and whether it is alive).
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
