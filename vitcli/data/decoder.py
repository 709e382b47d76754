"""Find, read, decode and resize images in threads, ahead of the model.

This module imports nothing heavy, so the first images can be decoded while torch is still being
imported."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Self

from vitcli.config import Preprocess
from vitcli.data.inputs import ImageInput
from vitcli.errors import DataError
from vitcli.machine import cpu_cores

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Pixels = npt.NDArray[np.uint8]  # (H, W, 3)
    Decoded = tuple[str, Pixels | DataError]

AHEAD_BYTES = 64 << 20
"""Memory for decoded images that are queued for the model."""
PAUSE = 0.25
"""Seconds to wait for another image (as of a list that is still being written) before computing an
incomplete batch."""


class Decoder:
    """Find, read, decode and resize images in threads, in order, with bounded prefetching."""

    def __init__(
        self,
        images: Iterator[ImageInput],
        preprocess: Preprocess,
        batch: int,
        workers: int | None = None,
        pause: float | None = PAUSE,
    ) -> None:
        # Imported here: concurrent imports in threads may see a partially initialized package.
        from vitcli.data.fit import Fit

        height, width = preprocess.size
        self.ahead = max(2 * batch, 16, min(256, AHEAD_BYTES // (3 * height * width)))
        self.images, self.pause = images, pause
        self.fit = Fit(preprocess)
        self.pool = ThreadPoolExecutor(workers or min(32, cpu_cores()), "decode")
        # `_find` holds one more.
        self.waiting: queue.Queue[Future[Decoded] | None] = queue.Queue(self.ahead - 1)
        self.ended = self.closed = False
        self.failure: BaseException | None = None
        threading.Thread(target=self._find, name="find", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: object, trace: TracebackType | None
    ) -> None:
        self.closed = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(queue.Empty):  # unblock `_find`, so that it ends
            while True:
                self.waiting.get_nowait()

    def take(self, count: int) -> list[Decoded]:
        """Return the next `count` images, or fewer: at most `ahead`, the rest at the end, or those
        found before a gap of `pause` seconds; none after the end. An exception from the iterator
        of images is raised after the images before it."""
        taken: list[Future[Decoded]] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < min(count, self.ahead) and not self.ended:
                image = self.waiting.get(timeout=self.pause if taken else None)
                if image is None:
                    self.ended = True
                else:
                    taken.append(image)
        if not taken and self.failure is not None:
            raise self.failure
        return [image.result() for image in taken]

    def ready(self, count: int) -> bool:
        """Whether `take` would return images without blocking."""
        count = min(count, self.waiting.maxsize)
        with self.waiting.mutex:
            there = list(islice(self.waiting.queue, count))
        images = [image for image in there if image is not None]
        enough = len(images) == count or None in there
        return enough and len(images) > 0 and all(image.done() for image in images)

    def _find(self) -> None:
        try:
            for image in self.images:
                if self.closed:
                    return
                decoded: Future[Decoded] = Future()
                if image.shared:
                    decoded.set_result(self._decode(image))
                else:
                    decoded = self.pool.submit(self._decode, image)
                self.waiting.put(decoded)
        except BaseException as error:  # of the caller's iterator; `take` raises it
            self.failure = error
        self.waiting.put(None)

    def _decode(self, image: ImageInput) -> Decoded:
        import numpy as np

        try:
            return image.name, np.asarray(self.fit(image.read()))
        except DataError as error:
            return image.name, error
