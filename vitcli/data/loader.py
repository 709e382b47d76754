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
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
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

Transform = TrainTransform | EvalTransform
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,)); of a stream,
the numbers of the samples instead of indices."""

_CHUNK_BYTES = 4 << 20
_MOST_BAD = 1000
"""Samples of a stream that cannot be read, one after the other, before the run ends."""


class _Chunk(NamedTuple):
    """Places of a batch."""

    images: npt.NDArray[np.uint8]
    labels: Ints
    indices: Ints
    unreadable: list[ImageError]


class _Image(NamedTuple):
    """An image that may take a place."""

    number: int
    where: str
    read: Callable[[], tuple[bytes, int]]
    """Returns its bytes and its label."""


def train_batches(
    source: Source | Stream,
    transform: Transform,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int,
    workers: int,
    on_unreadable: Callable[[ImageError], None],
    balanced: bool = False,
    part: range | None = None,
    lead: int = 0,
    pin: bool = False,
) -> Generator[Batch]:
    """Each global batch, or a part of it, for the steps start_step .. steps - 1.

    Args:
        on_unreadable: called with each image that cannot be read, whenever it comes. The next
            readable image of its class (`Source.same_class`) takes its place, with the same
            random choices; which one depends on the files alone. In a stream, it is the next one
            of the lane.
        part: places in the global batch; None: all.
        lead: images before the part that come with it; before the first image is the last one.
        pin: whether batches are put into pinned memory, from which CUDA copies while computing.

    Raises:
        ImageError: no image of a class can be read.
    """
    part = range(batch_size) if part is None else part
    places = np.arange(part.start - lead, part.stop) % batch_size
    if isinstance(source, Stream):
        lanes = _Lanes(source, transform, seed, batch_size, places, range(start_step, steps))
        chunks = _load(lanes, None, min(workers, len(places)), prefetch=2)
    else:
        if not len(source):
            raise DataError("there are no images to train on", where=source.root)
        share = -(-len(places) // max(workers, 1))
        size = max(1, min(share, _CHUNK_BYTES // (3 * transform.size[0] * transform.size[1])))
        orders = (
            (indices[chunk], epochs[chunk])
            for indices, epochs in batch_orders(
                source, batch_size, seed, start_step, steps, balanced
            )
            for chunk in np.split(places, range(size, len(places), size))
        )
        ahead = 2 * len(places)  # two batches in all
        prefetch = max(1, ahead // (size * max(workers, 1)))
        chunks = _load(_Images(source, transform, seed), orders, workers, prefetch)
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
            if sum(len(chunk.labels) for chunk in gathered) == len(places):
                arrays = zip(*(chunk[:3] for chunk in gathered), strict=True)
                pixels, labels, indices = (_joined(parts, pin) for parts in arrays)
                yield pixels, labels, indices
                gathered = []
    finally:
        chunks.close()
        atexit.unregister(chunks.close)


def _joined(parts: Sequence[npt.NDArray[Any]], pin: bool) -> torch.Tensor:
    """Arrays one behind the other, as one tensor."""
    tensors = [torch.from_numpy(part) for part in parts]
    shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
    return torch.cat(tensors, out=torch.empty(shape, dtype=tensors[0].dtype, pin_memory=pin))


class _Images(Dataset[_Chunk | VitError]):
    """Makes chunks of a source, given its indices and their epochs."""

    def __init__(self, source: Source, transform: Transform, seed: int) -> None:
        self.source, self.transform, self.seed = source, transform, seed

    def __getitem__(self, order: tuple[Ints, Ints]) -> _Chunk | VitError:
        indices, epochs = (array.tolist() for array in order)
        wanted = zip(epochs, indices, map(self._candidates, indices), strict=True)
        return _chunk(self.transform, self.seed, wanted)

    def _candidates(self, wanted: int) -> Iterator[_Image]:
        for index in self.source.same_class(wanted):
            yield _Image(index, self.source.where(index), partial(self._read, index))

    def _read(self, index: int) -> tuple[bytes, int]:
        return self.source.read(index), int(self.source.labels[index])


class _Lanes(IterableDataset[_Chunk | VitError]):
    """Makes chunks of a stream, one of every batch in each worker process."""

    def __init__(
        self,
        stream: Stream,
        transform: Transform,
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
            lane: stream.lane(lane, batch, self.seed, self.steps.start)
            for lane in sorted(set(lane_of.values()))
        }

        def candidates(lane: int, asked: Sample) -> Iterator[_Image]:
            """The sample, and those that the lane's next batches begin with."""
            yield self._image(asked)
            lanes[lane], ahead = itertools.tee(lanes[lane])
            for _, sample in itertools.islice(ahead, _MOST_BAD):
                yield self._image(sample)

        try:
            for _ in self.steps:
                taken = {
                    place: sample
                    for lane in lanes
                    for place, sample in zip(stream.places(lane, batch), lanes[lane], strict=False)
                }
                wanted = (
                    (epoch, sample.number, candidates(lane_of[place], sample))
                    for place in mine
                    for epoch, sample in [taken[place]]
                )
                chunk = _chunk(self.transform, self.seed, wanted)
                yield chunk
                if isinstance(chunk, VitError):
                    return
        except VitError as error:
            yield error

    def _image(self, sample: Sample) -> _Image:
        return _Image(sample.number, sample.key, partial(self.stream.content, sample))


def _chunk(
    transform: Transform, seed: int, wanted: Iterable[tuple[int, int, Iterator[_Image]]]
) -> _Chunk | VitError:
    """The first image that can be read of the candidates for each place.

    An error is returned, as torch would bury it in the text of a traceback.

    Args:
        wanted: for each place its epoch, the index of the image that belongs there, which together
            decide every random choice, and the candidates.
    """
    images, labels, indices, unreadable = [], list[int](), list[int](), list[ImageError]()
    try:
        for epoch, index, candidates in wanted:
            for candidate in candidates:
                try:
                    data, label = candidate.read()
                    images.append(transform(data, sample_rng(seed, epoch, index)).numpy())
                except ImageError as error:
                    hint = error.hint or "repair or remove the file"
                    unreadable.append(ImageError(error.what, where=candidate.where, hint=hint))
                else:
                    labels.append(label)
                    indices.append(candidate.number)
                    break
            else:
                return unreadable[-1]
    except VitError as error:
        return error
    return _Chunk(np.stack(images), np.array(labels), np.array(indices), unreadable)


def _load(
    dataset: Any, orders: Iterator[Any] | None, workers: int, prefetch: int
) -> Generator[_Chunk | VitError]:
    """The chunks that worker processes make, in order; without workers, this process."""
    others = set(multiprocessing.active_children())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        chunks: Any = iter(
            DataLoader(
                dataset,
                batch_size=None,
                sampler=orders,
                num_workers=workers,
                prefetch_factor=prefetch if workers else None,
                collate_fn=_unchanged,
                worker_init_fn=_start_worker,
                # Forked workers share the index arrays and start at once; macOS and Windows cannot.
                multiprocessing_context="fork" if workers and sys.platform == "linux" else None,
                generator=torch.Generator(),  # else it draws from the generator that dropout uses
            )
        )
    processes = set(multiprocessing.active_children()) - others
    failure = None
    try:
        yield from chunks
    except RuntimeError as error:  # torch's own: what the workers expect is among the chunks
        if not workers:
            raise
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
    # how a run ends. Workers end with it.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker once its main process is gone. One that was killed would otherwise leave
    workers for ever: they wait to write to a pipe that nobody reads, and that they, being forked,
    hold open themselves, as they do the sockets by which other ranks notice that it is gone."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(0.5)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # not caught by anyone
