"""Configurations of other programs, mutated in every way: read, or refused by a CheckpointError."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from campaign import mutate_json
from checkpoints.golden_cases import GOLDEN
from layouts.released_names import open_clip
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.store import Store, open_store
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.errors import CheckpointError
from vitcli.layouts.catalogue import companions
from vitcli.layouts.reading import read_layout

PROCESSOR = {
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
    "resample": 3,
    "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
}
OPEN_CLIP = {
    "model_cfg": {"quick_gelu": True, "vision_cfg": {"width": 48, "image_size": 32}},
    "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"},
}


def sources(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Weights with their configurations: golden cases, and a CLIP under OpenAI's names."""
    found = []
    for case in sorted(GOLDEN.iterdir()):
        if (case / "config.json").is_file() and (case / "model.safetensors").is_file():
            config = json.loads((case / "config.json").read_text())
            found.append((case / "model.safetensors", {"config.json": config}))
            if case.name.startswith("hf_"):
                found[-1][1]["preprocessor_config.json"] = PROCESSOR
    source = GOLDEN / "timm_clip_prenorm" / "model.safetensors"
    arrays = load_file(source)
    save_file(open_clip(arrays), folder / "clip.safetensors")
    return [*found, (folder / "clip.safetensors", {"open_clip_config.json": OPEN_CLIP})]


def fuzz(folder: Path, rounds: int, seed: int) -> tuple[int, int]:
    """(refused, accepted); anything but a CheckpointError is raised."""
    draw = random.Random(seed)
    cases, refused = sources(folder), 0
    (folder / "model").mkdir()
    for _ in range(rounds):
        weights, configs = draw.choice(cases)
        file = folder / "model" / "model.safetensors"
        for name in companions():
            (folder / "model" / name).unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        file.symlink_to(weights)
        for name, config in configs.items():
            for _ in range(draw.randint(1, 2)):
                config = mutate_json(config, draw)
            (folder / "model" / name).write_text(json.dumps(config))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                open_checkpoint(file)
        except CheckpointError:
            refused += 1
    shutil.rmtree(folder / "model")
    return refused, rounds - refused


def fuzz_shapes(rounds: int, seed: int) -> int:
    """How many files of other names and shapes are refused; anything else is raised."""
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
    return refused


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("rounds", "seed"), [(200, 0), pytest.param(5_000, 1, marks=SLOW)])
def test_mutated_shapes(rounds: int, seed: int) -> None:
    assert fuzz_shapes(rounds, seed) > rounds // 2


@pytest.mark.parametrize(("rounds", "seed"), [(250, 0), pytest.param(30_000, 1, marks=SLOW)])
def test_mutated_configurations(tmp_path: Path, rounds: int, seed: int) -> None:
    refused, accepted = fuzz(tmp_path, rounds, seed)
    assert refused > rounds // 6 and accepted > rounds // 15
