"""Batches of images, decoded by worker processes.

A batch depends only on (seed, step), not on the number of workers. Batches are split into chunks,
which the workers take in turn. A batch of a stream has a chunk for each worker: a worker loads the
same positions of every batch, because it must read their lanes in order.

Forked workers write images into anonymous shared memory, so the size of /dev/shm does not matter:
containers often have 64 MB, and torch's own transfer of tensors kills the worker when that is full.
If workers are not forked, images are sent through pipes, at a tenth of the speed.
"""

import atexit
import contextlib
import itertools
import math
import mmap
import multiprocessing
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from vitcli.data.order import batch_orders, sample_rng
from vitcli.data.source import Ints, Source
from vitcli.data.stream import Sample, Stream
from vitcli.data.transforms import EvalTransform, TrainTransform
from vitcli.errors import DataError, ImageError, VitError
from vitcli.machine import STOP_SIGNALS, end_with_parent

Transform = TrainTransform | EvalTransform
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(images uint8 (b, 3, H, W), labels int64 (b,), indices into the source int64 (b,)); for a stream,
`Sample.number` instead of indices."""

_CHUNK_BYTES = 4 << 20
_CHUNK_IMAGES = 256
"""The smallest chunk of small images, even if some workers then get no part of a batch: each chunk
costs the main process half a millisecond."""
_CAN_FORK = sys.platform == "linux"
"""Whether workers are forked; not on macOS and Windows."""
_MAX_UNREADABLE = 1000
"""Consecutive unreadable samples of a stream after which the run fails."""


Pixels = npt.NDArray[np.uint8]


class _Chunk(NamedTuple):
    """Part of a batch."""

    images: Pixels | None
    """None if they are in shared memory."""
    labels: Ints
    indices: Ints
    unreadable: list[ImageError]


class _Candidate(NamedTuple):
    """A candidate image for a position in a batch."""

    number: int
    where: str
    read: Callable[[], tuple[bytes, int]]
    """Return its bytes and its label."""


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
    """Yield each global batch, or a part of it, for the steps start_step .. steps - 1.

    Args:
        on_unreadable: called each time an image cannot be read. It is replaced by the next readable
            image of its class (`Source.same_class`), which depends only on the files, or in a
            stream by the next one of the lane, with the same random choices.
        part: positions in the global batch; None: all.
        lead: number of images before the part to include; the last image precedes the first.
        pin: whether to put batches into pinned memory, for asynchronous copies to CUDA devices.

    Raises:
        ImageError: no image of a class can be read.
    """
    if not len(source):
        raise DataError("there are no images to train on", where=source.root)
    part = range(batch_size) if part is None else part
    positions = np.arange(part.start - lead, part.stop) % batch_size
    shape = (len(positions), 3, *transform.size)
    size = -(-len(positions) // max(workers, 1))
    if not isinstance(source, Stream):
        max_images = max(1, _CHUNK_BYTES // (3 * transform.size[0] * transform.size[1]))
        size = min(max(size, _CHUNK_IMAGES), max_images, len(positions))
    slices = [slice(start, start + size) for start in range(0, len(positions), size)]
    workers = min(workers, len(slices)) if isinstance(source, Stream) else workers
    # Two batches in total, or two chunks per worker.
    prefetch = max(2, 2 * len(positions) // (size * max(workers, 1)))
    shared = _shared_batches(shape, workers, ahead=-(-prefetch * workers // len(slices)))
    dataset: _Chunks
    batches: Iterable[Ints]
    if isinstance(source, Stream):
        dataset = _StreamChunks(transform, seed, shared, source, batch_size)
        batches = itertools.repeat(positions, steps - start_step)
    else:
        dataset = _SourceChunks(transform, seed, shared, source)
        orders = batch_orders(source, batch_size, seed, start_step, steps, balanced)
        batches = (order[:, positions] for order in orders)
    requests = (
        _ChunkRequest(step, rows, samples[..., rows])
        for step, samples in enumerate(batches, start_step)
        for rows in slices
    )
    chunks = _load(dataset, requests, workers, prefetch)
    # A program that exits before the last batch would wait forever for the workers, which ignore
    # SIGTERM; closing the generator stops them first.
    atexit.register(chunks.close)
    try:
        for step in range(start_step, steps):
            gathered = list[_Chunk]()
            for chunk in itertools.islice(chunks, len(slices)):
                if isinstance(chunk, VitError):
                    raise chunk
                for error in chunk.unreadable:
                    on_unreadable(error)
                gathered.append(chunk)
            images = [chunk.images for chunk in gathered if chunk.images is not None]
            pixels = torch.empty(shape, dtype=torch.uint8, pin_memory=pin)
            # In numpy, in this thread: torch's threads would compete with workers for cores.
            np.concatenate(images or [shared[step % len(shared)]], out=pixels.numpy())
            labels = torch.from_numpy(np.concatenate([chunk.labels for chunk in gathered]))
            indices = torch.from_numpy(np.concatenate([chunk.indices for chunk in gathered]))
            yield pixels, labels, indices
    finally:
        chunks.close()
        atexit.unregister(chunks.close)


def _shared_batches(shape: tuple[int, ...], workers: int, ahead: int) -> Pixels:
    """Allocate memory shared with workers, (ahead + 1, *shape): for the batch being read and those
    being decoded. Empty if workers are not forked."""
    if not workers or not _CAN_FORK:
        return np.empty((0, *shape), np.uint8)
    memory = mmap.mmap(-1, (ahead + 1) * math.prod(shape))
    return np.frombuffer(memory, np.uint8).reshape(ahead + 1, *shape)


class _ChunkRequest(NamedTuple):
    """A chunk for a worker to load."""

    step: int
    rows: slice
    """Its rows in the loaded part of the step's batch."""
    samples: Ints
    """Of a source, indices and epochs, (2, n); of a stream, positions in the global batch, (n,)."""


@dataclass
class _Chunks(Dataset[_Chunk | VitError]):
    """The chunks of batches, loaded on request."""

    transform: Transform
    seed: int
    shared: Pixels
    """Memory for batches, in turn; empty if images are returned."""

    def samples(self, request: _ChunkRequest) -> Iterator[tuple[int, int, Iterator[_Candidate]]]:
        """Yield, for each position, its epoch and the index of its intended image, which together
        determine every random choice, and the candidates."""
        raise NotImplementedError

    def __getitem__(self, request: _ChunkRequest) -> _Chunk | VitError:
        """Load the first readable candidate for each position. Errors are returned, because torch
        would turn a raised one into the text of a traceback."""
        images, labels, indices, unreadable = [], list[int](), list[int](), list[ImageError]()
        try:
            for epoch, index, candidates in self.samples(request):
                for candidate in candidates:
                    try:
                        data, label = candidate.read()
                        rng = sample_rng(self.seed, epoch, index)
                        images.append(self.transform(data, rng).numpy())
                    except ImageError as error:
                        unreadable.append(ImageError(error.what, where=candidate.where))
                    else:
                        labels.append(label)
                        indices.append(candidate.number)
                        break
                else:
                    return no_replacement_error(unreadable[-1])
        except VitError as error:
            return error
        pixels = None
        if len(self.shared):
            np.stack(images, out=self.shared[request.step % len(self.shared), request.rows])
        else:
            pixels = np.stack(images)
        return _Chunk(pixels, np.array(labels), np.array(indices), unreadable)


@dataclass
class _SourceChunks(_Chunks):
    """Chunks of a source."""

    source: Source

    def samples(self, request: _ChunkRequest) -> Iterator[tuple[int, int, Iterator[_Candidate]]]:
        for index, epoch in request.samples.T.tolist():
            yield epoch, index, self._candidates(index)

    def _candidates(self, intended: int) -> Iterator[_Candidate]:
        for index in self.source.same_class(intended):
            yield _Candidate(index, self.source.where(index), partial(self._read, index))

    def _read(self, index: int) -> tuple[bytes, int]:
        return self.source.read(index), int(self.source.labels[index])


@dataclass
class _StreamChunks(_Chunks):
    """Chunks of a stream. As the workers take turns, each gets the same positions of every batch,
    and keeps their lanes open."""

    stream: Stream
    batch_size: int
    lanes: dict[int, Iterator[tuple[int, Sample]]] = field(default_factory=dict)

    def samples(self, request: _ChunkRequest) -> Iterator[tuple[int, int, Iterator[_Candidate]]]:
        stream, positions, batch_size = self.stream, request.samples.tolist(), self.batch_size
        if not self.lanes:
            lanes = {stream.lane_of(position, batch_size) for position in positions}
            step = request.step
            self.lanes = {lane: stream.lane(lane, batch_size, self.seed, step) for lane in lanes}
        samples = dict[int, tuple[int, int, Sample]]()
        for lane, lane_samples in self.lanes.items():
            lane_positions = stream.positions(lane, batch_size)
            for position, (epoch, sample) in zip(lane_positions, lane_samples, strict=False):
                samples[position] = lane, epoch, sample
        for position in positions:
            lane, epoch, sample = samples[position]
            yield epoch, sample.number, self._candidates(lane, sample)

    def _candidates(self, lane: int, sample: Sample) -> Iterator[_Candidate]:
        """The sample, then the lane's next ones, which later batches use too."""
        yield self._candidate(sample)
        self.lanes[lane], upcoming = itertools.tee(self.lanes[lane])
        for _, following in itertools.islice(upcoming, _MAX_UNREADABLE):
            yield self._candidate(following)

    def _candidate(self, sample: Sample) -> _Candidate:
        return _Candidate(sample.number, sample.key, partial(self.stream.content, sample))


def no_replacement_error(error: ImageError) -> ImageError:
    """The error for an unreadable image without a readable replacement."""
    what = f"{error.what}; none of the images that could replace it can be read either"
    return ImageError(what, where=error.where, hint="repair or remove these images")


def _load(
    dataset: _Chunks, requests: Iterator[_ChunkRequest], workers: int, prefetch: int
) -> Generator[_Chunk | VitError]:
    """Yield the chunks in order, loaded by worker processes or, with 0 workers, by this one."""
    other_processes = set(multiprocessing.active_children())
    in_main_thread = threading.current_thread() is threading.main_thread()
    has_handler = in_main_thread and hasattr(signal, "SIGCHLD")  # not on Windows
    on_child_exit = signal.getsignal(signal.SIGCHLD) if has_handler else None
    try:
        with warnings.catch_warnings(), _stop_signals_blocked():
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            chunks: Any = iter(
                DataLoader(
                    dataset,
                    batch_size=None,
                    sampler=requests,
                    num_workers=workers,
                    prefetch_factor=prefetch if workers else None,
                    collate_fn=_identity,
                    worker_init_fn=_start_worker,
                    # Forked workers share the index arrays and start at once.
                    multiprocessing_context="fork" if workers and _CAN_FORK else None,
                    generator=torch.Generator(),  # else it uses the global one, as dropout does
                )
            )
    except (OSError, RuntimeError) as error:
        for process in set(multiprocessing.active_children()) - other_processes:
            process.kill()  # they ignore SIGTERM: this process would wait for them when it exits
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"cannot start {workers} worker processes to decode images: {reason}",
            hint="lower --workers (0 starts none)",
        ) from error
    finally:
        if on_child_exit is not None:
            # If a worker dies, torch's handler would raise an error wherever the main thread is.
            # `next(chunks)` raises one too.
            signal.signal(signal.SIGCHLD, on_child_exit)
    processes = set(multiprocessing.active_children()) - other_processes
    failure = None
    try:
        yield from chunks
    except RuntimeError as error:  # raised by torch: expected errors are returned as chunks
        if not workers:
            raise
        failure = str(error).partition("\n")[0]
    finally:
        del chunks  # the last reference: the workers stop now
        for process in processes:
            process.kill()  # one that is waiting for a server has not stopped
    if failure:
        raise DataError(
            f"a worker process that decodes images failed: {failure}",
            hint="if memory ran out, lower --workers",
        )


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block the signals for this thread and the processes that it starts, which would die of one
    that arrives before they ignore it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    if not _CAN_FORK:
        resource_tracker.ensure_running()  # not below, as it unblocks signals when it starts
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _identity(chunk: object) -> object:
    return chunk


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)  # parallelism comes from the processes
    # Ctrl-C and a scheduler's signals go to the whole process group, but only the main process
    # handles them. Workers exit with it.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Otherwise, workers would survive a killed parent: they block on writing to a pipe that nobody
    # reads but that they, being forked, keep open themselves, as they do the sockets by which other
    # ranks would notice its death.
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=end_with_parent, args=(parent.pid,), daemon=True).start()
