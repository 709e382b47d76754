"""Find, read, decode and resize images in threads, ahead of the model.

This module imports nothing heavy, so the first images can be decoded while torch is still being
imported."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from vitcli.config import Preprocess
from vitcli.data.image_inputs import ImageInput
from vitcli.errors import DataError, ImageError
from vitcli.machine import cpu_cores

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
    Decoded = tuple["BatchItem", Pixels | None]

Batch = list[tuple[int, "Pixels"]]
"""Decoded images and their indices."""

PREFETCH_BYTES = 64 << 20
"""Memory for decoded images that are queued for the model."""
PAUSE = 0.25
"""Seconds to wait for another image (as of a list that is still being written) before computing an
incomplete batch."""


class BatchItem(NamedTuple):
    """An image in a batch. If it has an error, it has no pixels and no row in the output tensor."""

    position: int
    """Index among all images."""
    name: str
    error: ImageError | None = None


class Decoder:
    """Find, read, decode and resize images, given with their indices, in threads, in order, with
    bounded prefetching."""

    def __init__(
        self,
        images: Iterator[tuple[int, ImageInput]],
        preprocess: Preprocess,
        batch: int,
        workers: int | None = None,
        pause: float | None = PAUSE,
    ) -> None:
        # Imported here: concurrent imports in threads may see a partially initialized package.
        from vitcli.data.fit import Fit

        height, width = preprocess.size
        self.prefetch = max(2 * batch, 16, min(256, PREFETCH_BYTES // (3 * height * width)))
        self.images, self.pause = images, pause
        self.fit, self.is_exiting = Fit(preprocess), sys.is_finalizing
        self.pool = ThreadPoolExecutor(workers or min(32, cpu_cores()), "decode")
        # `_find` holds one more.
        self.pending: queue.Queue[Future[Decoded] | None] = queue.Queue(self.prefetch - 1)
        self.ended = self.closed = False
        self.failure: BaseException | None = None
        threading.Thread(target=self._find, name="find", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self.closed = True
        if self.is_exiting():  # the threads have ended, and globals are gone
            return
        self.pool.shutdown(wait=False, cancel_futures=True)
        # Unblock `_find`, so that it ends.
        while not self.pending.empty():
            self.pending.get_nowait()

    def take(self, count: int) -> tuple[list[BatchItem], Batch]:
        """Return the next `count` images, or fewer: at most `prefetch`, what remains at the end, or
        those found before a gap of `pause` seconds; none after the end. An exception from the
        iterator of images is raised after the images before it."""
        futures: list[Future[Decoded]] = []
        with contextlib.suppress(queue.Empty):
            while len(futures) < min(count, self.prefetch) and not self.ended:
                future = self.pending.get(timeout=self.pause if futures else None)
                if future is None:
                    self.ended = True
                else:
                    futures.append(future)
        if not futures and self.failure is not None:
            raise self.failure
        decoded = [future.result() for future in futures]
        batch = [(item.position, pixels) for item, pixels in decoded if pixels is not None]
        return [item for item, _ in decoded], batch

    def ready(self, count: int) -> bool:
        """Whether `take` would return images without blocking."""
        count = min(count, self.pending.maxsize)
        with self.pending.mutex:
            queued = list(islice(self.pending.queue, count))
        futures = [future for future in queued if future is not None]
        enough = len(futures) == count or None in queued
        return enough and len(futures) > 0 and all(future.done() for future in futures)

    def _find(self) -> None:
        try:
            for index, image in self.images:
                if self.closed:
                    return
                future: Future[Decoded] = Future()
                if image.shared:
                    future.set_result(self._decode(index, image))
                else:
                    future = self.pool.submit(self._decode, index, image)
                self.pending.put(future)
        except BaseException as error:  # of the caller's iterator; `take` raises it
            self.failure = error
        self.pending.put(None)

    def _decode(self, index: int, image: ImageInput) -> Decoded:
        import numpy as np

        try:
            return BatchItem(index, image.name), np.asarray(self.fit(image.read()))
        except DataError as error:
            named = ImageError(error.what, where=image.name, hint=error.hint)
            return BatchItem(index, image.name, named), None
