"""Batches: order, parts for ranks, unreadable images, and worker processes and their failures."""

import dataclasses
import errno
import functools
import gc
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from vitcli.config import AugmentConfig, DataConfig
from vitcli.data import loader
from vitcli.data.dataset import open_split
from vitcli.data.loader import Batch, train_batches
from vitcli.data.order import batch_orders, sample_rng
from vitcli.data.transforms import TrainTransform
from vitcli.errors import DataError, ImageError

AUGMENT = AugmentConfig(randaugment=(2, 10), erasing=0.3)
TRAIN = TrainTransform((8, 10), "bilinear", AUGMENT)


@pytest.fixture
def source(make_directory):
    return open_split(DataConfig(str(make_directory({"cat": 5, "dog": 6}))))[0]


def raise_error(error: ImageError) -> None:
    raise error


load = functools.partial(train_batches, on_unreadable=raise_error)


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("batch_size", [4, 30])
def test_batch_is_determined_by_seed_and_step(source, batch_size):
    batches = list(load(source, TRAIN, batch_size, seed=7, start_step=0, steps=6, workers=0))
    assert len(batches) == 6
    stream = np.concatenate([indices.numpy() for _, _, indices in batches])
    assert sorted(stream[:11]) == sorted(stream[11:22]) == list(range(11))
    assert list(stream[:11]) != list(stream[11:22])
    for step, (images, labels, indices) in enumerate(batches):
        assert (images.dtype, images.shape) == (torch.uint8, (batch_size, 3, 8, 10))
        assert labels.tolist() == source.labels[indices].tolist()
        for place, index in enumerate(indices.tolist()):
            epoch = (batch_size * step + place) // 11  # a batch may span several
            expected = TRAIN(source.read(index), sample_rng(7, epoch, index))
            assert torch.equal(images[place], expected)


def test_balanced_epochs_have_equal_class_counts(make_directory):
    source, _ = open_split(DataConfig(str(make_directory({"bee": 2, "cat": 9, "dog": 11}))))
    batches = list(batch_orders(source, 22, seed=3, start_step=0, steps=8, balanced=True))
    for indices, _ in batches:  # one epoch each
        assert np.ptp(np.bincount(source.labels[indices])) <= 1
        bees = np.bincount(indices)[source.labels[: indices.max() + 1] == 0]
        assert np.ptp(bees) <= 1  # both equally often
    pairs = [pair for order in batches for pair in zip(*(a.tolist() for a in order), strict=True)]
    assert len(set(pairs)) == len(pairs)  # repetitions are augmented differently
    assert set(np.concatenate([indices for indices, _ in batches])) == set(range(22))
    resumed = list(batch_orders(source, 5, 3, start_step=4, steps=9, balanced=True))
    expected = list(batch_orders(source, 5, 3, start_step=0, steps=9, balanced=True))[4:]
    assert np.array_equal(np.array(resumed), np.array(expected))


@pytest.mark.parametrize(("workers", "batch_size"), [(1, 4), (2, 7), (3, 2)])
def test_batches_do_not_depend_on_workers_or_resuming(source, workers, batch_size):
    """Workers do not overwrite batches that are not read yet."""
    expected = list(load(source, TRAIN, batch_size, 3, 0, 12, workers=0))
    batches = []
    for batch in load(source, TRAIN, batch_size, 3, 2, 12, workers):
        time.sleep(0.02)  # let the workers get as far ahead as they can
        batches.append(batch)
    assert_equal(expected[2:], batches)


def test_workers_without_fork_send_batches_through_pipes(source, monkeypatch):
    monkeypatch.setattr(loader, "_CAN_FORK", False)
    batches = list(load(source, TRAIN, 7, 3, 0, 5, workers=2))
    assert_equal(list(load(source, TRAIN, 7, 3, 0, 5, workers=0)), batches)


@pytest.mark.parametrize(
    ("part", "workers"), [(range(5), 2), (range(5, 10), 0), (range(5, 10), 2), (range(3, 4), 0)]
)
def test_batch_part_includes_preceding_images(source, part, workers):
    whole = list(load(source, TRAIN, 10, 0, 0, 3, workers=0))
    places = [(place - 1) % 10 for place in (*part, part.stop)]
    for batch, got in zip(
        whole, load(source, TRAIN, 10, 0, 0, 3, workers, part=part, lead=1), strict=True
    ):
        for column in range(3):
            assert torch.equal(batch[column][places], got[column])


# ---------------------------------------------------------------------------------------------
# Unreadable images


def test_unreadable_image_is_replaced_by_next_of_its_class(source):
    readable = list(load(source, TRAIN, 4, 7, 0, 9, workers=0))
    bad = [source.where(i) for i in (3, 4, 10)]
    for name in bad:
        Path(name).write_bytes(b"\xff\xd8\xff")
    reported: list[str | None] = []
    skipping = [
        list(
            load(
                *(source, TRAIN, 4, 7, start, 9, workers),
                on_unreadable=lambda error: reported.append(error.where),
            )
        )
        for start, workers in ((0, 0), (0, 3), (5, 2))
    ]
    assert set(reported) == set(bad)
    assert_equal(skipping[0], skipping[1])
    assert_equal(skipping[0][5:], skipping[2])
    stand_in = {3: 0, 4: 0, 10: 5}
    for (old, labels, indices), (new, same, found) in zip(readable, skipping[0], strict=True):
        assert torch.equal(labels, same)
        assert [stand_in.get(i, i) for i in indices.tolist()] == found.tolist()
        assert all(
            torch.equal(a, b)
            for a, b, i in zip(old, new, indices.tolist(), strict=True)
            if i not in stand_in
        )


def test_class_without_readable_images_is_an_error(source):
    for i in range(5):
        Path(source.where(i)).write_bytes(b"")
    with pytest.raises(ImageError):
        list(load(source, TRAIN, 4, 7, 0, 9, 0, on_unreadable=lambda error: None))


# ---------------------------------------------------------------------------------------------
# Worker processes


class KilledReader:
    def __init__(self, source) -> None:
        self.source, self.reads = source, 0

    def read(self, row: int) -> bytes:
        self.reads += 1
        if self.reads > 4:
            time.sleep(1)  # until the first batch has left the process
            os.kill(os.getpid(), signal.SIGKILL)
        return self.source.read(row)


def test_killed_worker_raises_data_error(source, monkeypatch):
    # torch checks every 5 s whether its workers run.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    killed = dataclasses.replace(source, reader=KilledReader(source))
    batches = load(killed, TRAIN, 4, 0, 0, 3, workers=1)
    next(batches)
    (worker,) = multiprocessing.active_children()
    multiprocessing.connection.wait([worker.sentinel])  # no error is raised here
    with pytest.raises(DataError) as caught:
        list(batches)
    assert "--workers" in str(caught.value.hint) and "\n" not in caught.value.what
    assert not multiprocessing.active_children()


def test_worker_that_cannot_be_started_stops_the_others(source, monkeypatch):
    """They ignore SIGTERM, so the program would wait for them forever when it exits."""
    fork, forks = os.fork, []

    def fork_once() -> int:
        if forks:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        forks.append(fork())
        return forks[0]

    monkeypatch.setattr(os, "fork", fork_once)
    # torch's own raises an AttributeError, which Python ignores.
    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "__del__", lambda _: None)
    with pytest.raises(DataError) as caught:
        list(load(source, TRAIN, 4, 0, 0, 3, workers=2))
    assert os.strerror(errno.EAGAIN) in caught.value.what
    assert "--workers" in str(caught.value.hint)
    assert len(forks) == 1
    for process in multiprocessing.active_children():
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
    del caught
    gc.collect()  # the incomplete iterator


def test_closing_the_iterator_stops_workers(source):
    batches = load(source, TRAIN, 2, 0, 0, 10_000, workers=2)
    next(batches)
    children = set(multiprocessing.active_children())
    assert len(children) == 2
    batches.close()
    assert not any(child.is_alive() for child in children)


EXITS = """
import os, sys
from vitcli.config import AugmentConfig, DataConfig
from vitcli.data.dataset import open_split
from vitcli.data.loader import train_batches
from vitcli.data.transforms import TrainTransform

sys.modules[train_batches.__module__]._CAN_FORK = False  # images fill a pipe
source = open_split(DataConfig({root!r}))[0]
transform = TrainTransform((128, 128), "bilinear", AugmentConfig())
for end in ("raise SystemExit(7)", "os.kill(os.getpid(), 9)"):
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        batches = train_batches(source, transform, 4, 0, 0, 10**6, 2, print)
        print(len(next(batches)[0]), flush=True)
        exec(end)
"""


def test_workers_exit_with_the_parent_process(make_directory):
    code = EXITS.format(root=str(make_directory({"cat": 5, "dog": 6})))
    # run() returns once no process holds the output open.
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout, result.stderr) == (0, "4\n7\n4\n-9\n", "")
