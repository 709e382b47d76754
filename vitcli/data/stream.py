"""A training split without random access: remote shards that are read sequentially.

The batch of a step depends only on (seed, step), not on the number of ranks and workers. Each epoch
concatenates the shards in random order and cuts them into lanes (`--streams`), which are read in
parallel; each lane shuffles blocks of its samples. Each position in the batch belongs to one lane.
A worker that loads some positions of each batch reads their lanes, and skips samples for other
positions without decoding them.

Every epoch contains each sample exactly once. A lane has as many samples as it has positions in the
batches of the epoch, so all lanes end together. A resumed run reads each lane from the start of its
current block, and no shards before that.
"""

import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.classes import INTEGER, ClassIndex, out_of_range, parse_class
from vitcli.data.order import block_rng, order_rng
from vitcli.data.source import Ints
from vitcli.errors import DataError, ImageError

T = TypeVar("T")

SHUFFLE_BUFFER = 4096
"""Samples in the shuffle buffers of all lanes (encoded images in memory), over all ranks."""
MAX_LANES = 64
"""Maximum default number of lanes."""


class StreamOptions(NamedTuple):
    """Options of a stream."""

    images: int | None = None
    """Number of samples (`--train-images`), if the data does not specify it."""
    lanes: int | None = None

    def lanes_of(self, shards: int) -> int:
        """The number of lanes for this number of shards."""
        return self.lanes or min(shards, MAX_LANES)


class Sample(NamedTuple):
    """An encoded image and its label, as in the data."""

    key: str
    """Shard and name, for messages."""
    image: bytes | None
    label: str | None

    @property
    def number(self) -> int:
        """A 63-bit hash of the key, used as a seed."""
        return int.from_bytes(hashlib.sha256(self.key.encode(errors="replace")).digest()[:8]) >> 1


class Shard(Protocol):
    """Samples in a fixed order; must be picklable."""

    @property
    def name(self) -> str:
        """Its URL or path."""
        ...

    def samples(self, start: int) -> Iterator[Sample]:
        """Yield the samples from index `start` on. Raises VitError if they cannot be read."""
        ...


@dataclass(frozen=True, eq=False)
class Stream:
    """Labeled images, read sequentially."""

    classes: tuple[ClassLabel, ...]
    shards: tuple[Shard, ...]
    sizes: Ints  # (S,), number of samples in each shard
    lanes: int
    root: str
    numbers: dict[int, int]
    """The class index for each label that is a number."""
    exact: bool = True
    """Whether `sizes` are exact; if not, samples beyond the assumed size are skipped, and a shard
    with fewer is read again from the start."""

    def __len__(self) -> int:
        return int(self.sizes.sum())

    def fingerprint(self) -> str:
        """A short hash of classes, shards and sizes, which changes when one of them does."""
        parts = (self.classes, [shard.name for shard in self.shards], self.sizes.tolist())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def content(self, sample: Sample) -> tuple[bytes, int]:
        """A sample's image and class index. Raises ImageError if either is missing, and DataError
        as `label` does."""
        label = self.label(sample)
        if sample.image is None:
            raise ImageError("the sample has no image", where=sample.key)
        return sample.image, label

    def label(self, sample: Sample) -> int:
        """The class index of a sample.

        Raises:
            ImageError: it has no label.
            DataError: its label is not one of the classes.
        """
        if not sample.label:
            raise ImageError("the sample has no label", where=sample.key)
        if INTEGER.fullmatch(sample.label):
            if (index := self.numbers.get(int(sample.label))) is not None:
                return index
            what = out_of_range(sample.label, self.numbers)
        else:
            matches = self._index.find(parse_class(sample.label))
            if len(matches) == 1:
                return matches[0]
            what = f"the classes do not include the label '{sample.label:.80}'"
        hint = "pass the class list of this dataset with --classes FILE"
        raise DataError(what, where=sample.key, hint=hint)

    @functools.cached_property
    def _index(self) -> ClassIndex:
        return ClassIndex(self.classes)

    # -----------------------------------------------------------------------------------------
    # Lanes

    def lane_of(self, position: int, batch_size: int) -> int:
        """The lane that provides a position of the batch."""
        return int(np.searchsorted(self._bounds(batch_size), position, side="right")) - 1

    def positions(self, lane: int, batch_size: int) -> range:
        """The positions of the batch that a lane provides."""
        start, stop = self._bounds(batch_size)[lane : lane + 2].tolist()
        return range(start, stop)

    def _bounds(self, batch_size: int) -> Ints:
        return np.arange(self.lanes + 1) * batch_size // self.lanes

    def _lane_counts(self, samples: int, batch_size: int) -> Ints:
        """(lanes,): how many of the first `samples` samples come from each lane."""
        bounds = self._bounds(batch_size)
        batches, remainder = divmod(samples, batch_size)
        return batches * np.diff(bounds) + np.clip(remainder - bounds[:-1], 0, np.diff(bounds))

    def lane(
        self, lane: int, batch_size: int, seed: int, step: int
    ) -> Iterator[tuple[int, Sample]]:
        """Yield (epoch, sample) of a lane from a step on, forever."""
        position = step * batch_size
        block_size = max(1, SHUFFLE_BUFFER // min(self.lanes, batch_size))  # for each lane in use
        for epoch in itertools.count(position // len(self)):
            first = self._lane_counts(epoch * len(self), batch_size)
            shares = self._lane_counts((epoch + 1) * len(self), batch_size) - first
            start = int(shares[:lane].sum())
            done = max(0, int((self._lane_counts(position, batch_size) - first)[lane]))
            block, offset = divmod(done, block_size)
            stop = start + int(shares[lane])
            samples = self._read(order_rng(seed, epoch), start + block * block_size, stop)
            rngs = (block_rng(seed, epoch, lane, i) for i in itertools.count(block))
            shuffled = shuffle(samples, block_size, rngs)
            yield from ((epoch, sample) for sample in itertools.islice(shuffled, offset, None))

    def _read(self, rng: np.random.Generator, start: int, stop: int) -> Iterator[Sample]:
        """Yield samples start:stop of the shards concatenated in random order."""
        order = rng.permutation(len(self.shards))
        ends = np.cumsum(self.sizes[order])
        for position in range(int(np.searchsorted(ends, start, side="right")), len(order)):
            index = int(order[position])
            shard_start = int(ends[position] - self.sizes[index])
            if shard_start >= stop:
                return
            yield from self._read_shard(
                index, max(start - shard_start, 0), min(stop, int(ends[position])) - shard_start
            )

    def _read_shard(self, index: int, start: int, stop: int) -> Iterator[Sample]:
        """Yield samples start:stop of a shard."""
        shard, remaining = self.shards[index], stop - start
        samples: Iterator[Sample] = iter(())  # for an empty shard, which is not read
        while remaining:
            samples, before = shard.samples(start), remaining
            for sample in itertools.islice(samples, remaining):
                yield sample
                remaining -= 1
            if remaining and self.exact:
                raise self._size_error(index, f"{stop - remaining:,}")
            if remaining < before:
                start = 0
            elif size := sum(1 for _ in shard.samples(0)):
                start %= size
            else:
                raise DataError("the shard has no samples", where=shard.name)
        if self.exact and stop == self.sizes[index] and next(samples, None) is not None:
            raise self._size_error(index, "more")

    def _size_error(self, index: int, count: str) -> DataError:
        return DataError(
            f"the shard has {count} samples, but {self.sizes[index]:,} were expected",
            where=self.shards[index].name,
            hint="correct the number of its samples in sizes.json",
        )


def unopened(root: str) -> Stream:
    """Stands for a training split that is not needed."""
    return Stream((), (), np.empty(0, np.int64), 1, root, {})


def shuffle(samples: Iterator[T], size: int, rngs: Iterator[np.random.Generator]) -> Iterator[T]:
    """Shuffle each block of `size` samples with its own generator. The next block is read while
    this one is yielded, so only `size` samples are in memory at a time."""
    block: list[T | None] = [*itertools.islice(samples, size)]
    while block:
        next_block = list[T | None]()
        for index in next(rngs).permutation(len(block)).tolist():
            sample, block[index] = block[index], None
            assert sample is not None
            yield sample
            next_block += itertools.islice(samples, 1)
        block = next_block
