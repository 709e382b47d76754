"""Batches: the order, the parts of ranks, worker processes, and what goes wrong in them."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from data.conftest import MakeFolder
from vitcli.config import AugmentConfig, DataConfig, Preprocess
from vitcli.data import loader
from vitcli.data.dataset import open_split
from vitcli.data.images import decode
from vitcli.data.loader import batch_orders, eval_batches, train_batches
from vitcli.data.source import Source
from vitcli.data.transforms import EvalTransform, TrainTransform, sample_rng, to_tensor
from vitcli.errors import DataError, ImageError

AUGMENT = AugmentConfig(randaugment=(2, 10), erasing=0.3)
TRAIN = TrainTransform((8, 10), "bilinear", AUGMENT)
EVAL = EvalTransform(Preprocess((8, 8)))


@pytest.fixture
def source(make_folder: MakeFolder) -> Source:
    return open_split(DataConfig(str(make_folder({"cat": 5, "dog": 6}))))[0]


def test_a_batch_is_what_seed_and_step_say(source: Source) -> None:
    batches = list(train_batches(source, TRAIN, 4, seed=7, start_step=0, steps=6, workers=0))
    assert len(batches) == 6
    stream = np.concatenate([indices.numpy() for _, _, indices in batches])
    assert sorted(stream[:11]) == sorted(stream[11:22]) == list(range(11))
    assert list(stream[:11]) != list(stream[11:22])
    for step, (images, labels, indices) in enumerate(batches):
        assert images.dtype == torch.uint8
        assert labels.dtype == indices.dtype == torch.int64
        assert images.shape == (4, 3, 8, 10)
        assert labels.tolist() == source.labels[indices].tolist()
        for place, index in enumerate(indices.tolist()):
            epoch = (4 * step + place) // 11  # a batch may straddle two
            expected = TRAIN(source.read(index), sample_rng(7, epoch, index))
            assert torch.equal(images[place], expected)


def test_a_balanced_epoch_has_as_many_of_each_class(make_folder: MakeFolder) -> None:
    source, *_ = open_split(DataConfig(str(make_folder({"bee": 2, "cat": 9, "dog": 12}))))
    batches = list(batch_orders(source, 23, seed=3, start_step=0, steps=8, balanced=True))
    for indices, _ in batches:  # an epoch each
        assert np.ptp(np.bincount(source.labels[indices])) <= 1
        bees = np.bincount(indices)[source.labels[: indices.max() + 1] == 0]
        assert np.ptp(bees) <= 1  # each as often as the other
    pairs = [pair for order in batches for pair in zip(*(a.tolist() for a in order), strict=True)]
    assert len(set(pairs)) == len(pairs)  # what comes again is augmented anew
    assert set(np.concatenate([indices for indices, _ in batches])) == set(range(23))
    resumed = list(batch_orders(source, 5, 3, start_step=4, steps=9, balanced=True))
    whole = list(batch_orders(source, 5, 3, start_step=0, steps=9, balanced=True))[4:]
    for one, other in zip(resumed, whole, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_a_batch(source: Source, workers: int) -> None:
    alone = list(train_batches(source, TRAIN, 7, 0, 0, 5, workers=0))
    together = list(train_batches(source, TRAIN, 7, 0, 0, 5, workers=workers))
    assert len(alone) == len(together)
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_goes_on_where_it_stopped(source: Source) -> None:
    whole = list(train_batches(source, TRAIN, 6, 3, 0, 9, workers=0))
    rest = list(train_batches(source, TRAIN, 6, 3, 5, 9, workers=2))
    assert len(rest) == 4
    for one, other in zip(whole[5:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_may_be_larger_than_the_data(source: Source) -> None:
    (images, _, indices), *_ = train_batches(source, TRAIN, 30, 0, 0, 1, workers=2)
    assert len(images) == 30
    assert max(Counter(indices.tolist()).values()) == 3
    first = indices.tolist().index(int(indices[-1]))
    assert not torch.equal(images[first], images[-1])  # in another epoch, another crop


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ranks_share_the_batch(source: Source, world: int) -> None:
    whole = list(train_batches(source, TRAIN, 10, 0, 0, 3, workers=0))
    ranks = [
        list(train_batches(source, TRAIN, 10, 0, 0, 3, 0, rank, world)) for rank in range(world)
    ]
    for step, batch in enumerate(whole):
        for column in range(3):
            shared = torch.cat([rank[step][column] for rank in ranks])
            assert torch.equal(batch[column], shared)


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_in_order(source: Source, workers: int) -> None:
    batches = list(eval_batches(source, EVAL, 4, workers))
    assert [len(images) for images, _, _ in batches] == [4, 4, 3]
    assert torch.cat([indices for _, _, indices in batches]).tolist() == list(range(11))
    assert torch.cat([labels for _, labels, _ in batches]).tolist() == source.labels.tolist()
    assert torch.equal(batches[2][0][2], EVAL(source.read(10)))
    expected = to_tensor(EVAL.fit(decode(source.read(0))))
    assert torch.equal(batches[0][0][0], expected)


@pytest.mark.parametrize("world", [2, 4, 13])
def test_evaluation_splits_by_sample(source: Source, world: int) -> None:
    seen = [
        torch.cat([torch.empty(0, dtype=torch.int64), *(i for _, _, i in part)]).tolist()
        for part in (eval_batches(source, EVAL, 3, 0, rank, world) for rank in range(world))
    ]
    assert sum(seen, []) == list(range(11))
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.parametrize("size", [4, 11])
def test_batches_do_not_stay_in_the_memory_that_processes_share(source: Source, size: int) -> None:
    """Containers have 64 MB of it, which may be less than a batch."""
    assert not any(images.is_shared() for images, _, _ in eval_batches(source, EVAL, size, 2))


def test_without_an_order_no_process_starts(source: Source) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        list(train_batches(source, TRAIN, 4, -1, 0, 3, workers=2))
    assert not multiprocessing.active_children()


def test_loading_draws_nothing_from_the_generator_that_dropout_uses(source: Source) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(train_batches(source, TRAIN, 4, 0, 0, 3, workers=2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_image_that_cannot_be_decoded_is_named(source: Source, workers: int) -> None:
    bad = Path(source.where(3))
    bad.write_text("a text file named .jpg")
    for batches in (
        train_batches(source, TRAIN, 11, 0, 0, 1, workers),
        eval_batches(source, EVAL, 11, workers),
    ):
        with pytest.raises(ImageError, match="is not an image") as caught:
            list(batches)
        assert caught.value.where == str(bad)
        assert caught.value.hint == "repair it, or take it out of the data"


def test_no_images(source: Source) -> None:
    nothing = source.select(np.empty(0, np.int64))
    with pytest.raises(DataError, match="no images to train on"):
        next(train_batches(nothing, TRAIN, 4, 0, 0, 1, 0))
    assert list(eval_batches(nothing, EVAL, 4, 2)) == []


@dataclasses.dataclass(frozen=True)
class Dies:
    def read(self, row: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


def test_a_killed_worker_is_one_clear_line(source: Source) -> None:
    broken = dataclasses.replace(source, reader=Dies())
    with pytest.raises(DataError, match="decodes images was killed") as caught:
        list(eval_batches(broken, EVAL, 4, 2))
    assert not multiprocessing.active_children()
    assert "--workers" in str(caught.value.hint)


@dataclasses.dataclass(frozen=True)
class Reports:
    """Says what holds in the process that reads."""

    def read(self, row: int) -> bytes:
        state = (
            torch.get_num_threads() == 1,
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
        )
        raise ImageError(repr(state))


def test_workers_leave_signals_to_the_main_process(source: Source) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        reports = dataclasses.replace(source, reader=Reports())
        with pytest.raises(ImageError, match=r"\(True, True, True\)"):
            list(eval_batches(reports, EVAL, 4, 1))
    finally:
        signal.signal(signal.SIGTERM, before)


def test_abandoned_workers_end(source: Source) -> None:
    batches = train_batches(source, TRAIN, 2, 0, 0, 10_000, workers=2)
    next(batches)
    children = set(multiprocessing.active_children())
    assert len(children) == 2
    batches.close()  # type: ignore[attr-defined]
    assert not any(child.is_alive() for child in children)


def test_workers_end_with_an_error_although_its_traceback_is_kept(source: Source) -> None:
    Path(source.where(3)).write_text("a text file named .jpg")
    before = set(multiprocessing.active_children())
    with pytest.raises(ImageError) as caught:
        list(eval_batches(source, EVAL, 2, 2))
    assert caught.tb
    assert set(multiprocessing.active_children()) == before


def test_a_process_that_leaves_batches_over_ends(make_folder: MakeFolder) -> None:
    root = make_folder({"cat": 5, "dog": 6})
    code = (
        "from vitcli.config import *\n"
        "from vitcli.data.loader import train_batches\n"
        "from vitcli.data.dataset import open_split\n"
        "from vitcli.data.transforms import TrainTransform\n"
        f"source = open_split(DataConfig({str(root)!r}))[0]\n"
        "transform = TrainTransform((8, 8), 'bilinear', AugmentConfig())\n"
        "batches = train_batches(source, transform, 4, 0, 0, 10**6, 2)\n"
        "print(len(next(batches)[0]))\n"
        "raise SystemExit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "4\n", "")


@pytest.mark.parametrize(
    ("free", "size", "batch", "workers"),
    [
        (64 << 20, (224, 224), 512, 16),
        (64 << 20, (384, 384), 512, 8),
        (8 << 30, (32, 32), 1024, 2),
        (1 << 20, (512, 512), 64, 4),
    ],
)
def test_shared_memory_holds_what_is_prepared(
    free: int, size: tuple[int, int], batch: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = os.statvfs_result((4096, 4096, 0, 0, free // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(loader.os, "statvfs", lambda path: state)
    chunk, ahead = loader._amounts(size, batch, workers)
    assert chunk >= 1
    assert ahead >= 1
    held = chunk * ahead * workers
    if (chunk, ahead) != (1, 1):
        assert held * 3 * size[0] * size[1] <= free / 2
    if free > 1 << 30:
        assert held >= batch
