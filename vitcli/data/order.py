"""The random number generators of training. Each depends only on (seed, epoch, sample) or (seed,
step), not on workers, ranks, or where a run was interrupted."""

import functools
from collections.abc import Iterator

import numpy as np

from vitcli.data.source import Ints, Source


def sample_rng(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the generator for augmenting image `index` of the training split in an epoch."""
    return np.random.default_rng((seed, 0, epoch, index))


def batch_rng(seed: int, step: int) -> np.random.Generator:
    """Return the generator for mixup and cutmix of a step's global batch."""
    return np.random.default_rng((seed, 1, step))


def mask_rng(seed: int, step: int, position: int) -> np.random.Generator:
    """Return the generator for masking patches of image `position` of a step's global batch."""
    return np.random.default_rng((seed, 3, step, position))


def validation_rng(index: int) -> np.random.Generator:
    """Return the generator for masking patches of a validation image, the same in every run."""
    return np.random.default_rng((0, 4, index))


def order_rng(seed: int, epoch: int) -> np.random.Generator:
    """Return the generator for the order of the images (of a stream: shards) in an epoch."""
    return np.random.default_rng((seed, 2, epoch))


def block_rng(seed: int, epoch: int, lane: int, block: int) -> np.random.Generator:
    """Return the generator for shuffling a block of a stream's lane."""
    return np.random.default_rng((seed, 3, epoch, lane, block))


def batch_orders(
    source: Source,
    batch_size: int,
    seed: int,
    start_step: int,
    steps: int,
    balanced: bool = False,
) -> Iterator[Ints]:
    """Yield int64 (2, B) for each global batch of the steps start_step .. steps - 1: indices and
    epochs, which together determine the augmentation of an image.

    Epochs are contiguous, so a batch may contain the end of one and the start of the next. An epoch
    is a permutation of all images; a balanced one has the same length and equally many images of
    each class.
    """

    @functools.lru_cache(2)
    def order(epoch: int) -> Ints:
        rng = order_rng(seed, epoch)
        if balanced:
            return balanced_order(source, epoch, rng)
        return np.stack([rng.permutation(len(source)), np.full(len(source), epoch)])

    for step in range(start_step, steps):
        global_positions = step * batch_size + np.arange(batch_size)
        epochs, positions = np.divmod(global_positions, len(source))
        pieces = [
            order(epoch)[:, positions[epochs == epoch]] for epoch in np.unique(epochs).tolist()
        ]
        yield np.concatenate(pieces, axis=1)


def balanced_order(source: Source, epoch: int, rng: np.random.Generator) -> Ints:
    """A class-balanced epoch, int64 (2, N): indices and epochs. Class counts differ by at most one.

    Images of small classes are repeated evenly; some of large classes are omitted. Each repetition
    of an image has its own epoch number, so that it is augmented differently.
    """
    counts = source.counts()
    members = np.split(np.argsort(source.labels, kind="stable"), np.cumsum(counts)[:-1])
    present = np.flatnonzero(counts)
    shares = np.full(len(present), len(source) // len(present))
    shares[rng.permutation(len(present))[: len(source) % len(present)]] += 1
    max_rounds = -(-int(shares.max()) // int(counts[present].min()))  # in any epoch
    indices, epochs = [], []
    for k, share in zip(present.tolist(), shares.tolist(), strict=True):
        rounds = range(-(-share // int(counts[k])))
        indices.append(np.concatenate([rng.permutation(members[k]) for _ in rounds])[:share])
        epochs.append(epoch * max_rounds + np.arange(share) // int(counts[k]))
    order = np.stack([np.concatenate(indices), np.concatenate(epochs)])
    return order[:, rng.permutation(len(source))]
