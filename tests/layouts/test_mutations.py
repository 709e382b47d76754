"""Shapes of other programs, mutated: read, or refused by a CheckpointError."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from checkpoints.golden_cases import GOLDEN
from vitcli.checkpoints.store import Store, open_store
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.errors import CheckpointError
from vitcli.layouts.reading import read_layout


@pytest.mark.parametrize(
    ("rounds", "seed"), [(200, 0), pytest.param(5_000, 1, marks=pytest.mark.slow)]
)
def test_mutated_shapes(rounds: int, seed: int) -> None:
    """Anything but a CheckpointError is raised."""
    draw, refused = random.Random(seed), 0
    files = sorted([*GOLDEN.glob("*/checkpoint*.npz"), *GOLDEN.glob("hf_*/model.safetensors")])
    files += sorted(GOLDEN.glob("timm_*/model.safetensors"))
    stores = [open_store(path) for path in files]
    for _ in range(rounds):
        store = draw.choice(stores)
        tensors = dict(store.tensors)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice(list(tensors))
            shape = list(tensors.pop(name).shape)
            change = draw.randrange(5)
            if change == 0:
                continue
            if change == 1 or not shape:
                shape.append(draw.choice([0, 1, 7]))
            elif change == 2:
                shape.pop()
            else:
                shape[draw.randrange(len(shape))] = draw.choice([0, 1, 2, 3, 48, 10**6, 2**40])
            name = name.replace("0", "7") if draw.random() < 0.1 else name
            tensors[name] = LazyTensor("float32", tuple(shape), lambda: np.zeros(0))
        bare = Path("/nowhere/x.npz") if draw.random() < 0.5 else store.path
        try:
            read_layout(Store(bare, "pickle", tensors))
        except CheckpointError:
            refused += 1
    assert refused > rounds // 2
