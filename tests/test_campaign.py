"""Fuzzing: mutated files and decompression bombs are either read or raise a VitError. To run more
rounds:

    ROUNDS=500 python -m pytest -m slow tests/test_campaign.py
"""

import contextlib
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import resource
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save
from typer.testing import CliRunner

from checkpoints.golden_cases import GOLDEN, TIMM_VIT
from data.conftest import tar_bytes
from layouts.released_names import open_clip
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.store import open_store
from vitcli.checkpoints.tensor_file import LazyTensor, Store
from vitcli.cli.main import app
from vitcli.config import DataConfig
from vitcli.data.classes import read_classes
from vitcli.data.dataset import open_dataset
from vitcli.data.image_inputs import find_images
from vitcli.data.images import decode
from vitcli.errors import CheckpointError, VitError
from vitcli.layouts.reading import read_layout

PHOTO = Path(__file__).parent / "images" / "cat.jpg"
ROUNDS = int(os.environ.get("ROUNDS", 10))
"""Number of mutants per target."""
WORDS = [b"\0", b"\xff", b'"', b"[", b"-1", b"null", b"1e999", b"NaN", b'"\\ud800"', b"../../x"]
WORDS += [b"9" * 30, b"9" * 5000, b"[" * 2000, b"x" * 300, "é".encode(), b"\x80\x02", b"0"]
VALUES = [None, True, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -1e300, float("inf"), float("nan")]
VALUES += ["", "x", "\0", "\ud800", "a" * 5000, [], {}, [[[]]], [1, "x"], {"a": {"b": [None]}}]
VALUES += [[3, -7, 10**9], [0, 0], {"x": 1}, [[1, 2]] * 3, json.loads("[" * 60 + "]" * 60)]
VALUES += [2, 3, 48, 2**63 - 1, 2**100, 1e-300, "gelu", [1, 2, 3], ["a"], {"0": "a"}]
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
Target = tuple[dict[str, bytes], Callable[[Path], Any]]
"""The files of a directory, starting with the one to mutate, and a function that reads it."""


def read_checkpoint(path: Path) -> None:
    path = path.parent if path.name.endswith("config.json") else path
    for tensor in open_checkpoint(path).tensors.values():
        tensor.read()


def read_ours(path: Path) -> None:
    result = CliRunner().invoke(app, ["info", str(path), "--debug"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    load(path)


def read_list(path: Path) -> None:
    for image in itertools.islice(find_images([f"@{path}"], offline=True), 100):
        with contextlib.suppress(VitError):
            decode(image.read())


def read_dataset(path: Path) -> None:
    dataset = open_dataset(DataConfig(str(path)))
    for source in (dataset.train, dataset.val, dataset.test):
        for row in range(min(len(source), 20) if source is not None else 0):
            source.read(row)


def checkpoints() -> dict[str, Target]:
    """Weights and configurations of golden cases, and of a CLIP with OpenAI's names."""
    found: dict[str, Target] = {}
    for case in sorted(GOLDEN.iterdir()):
        configs = {path.name: path.read_bytes() for path in case.glob("config.json")}
        if case.name.startswith("hf_"):
            configs["preprocessor_config.json"] = json.dumps(PROCESSOR).encode()
        for path in [*case.glob("model.*"), *case.glob("checkpoint.npz")]:
            data, name = path.read_bytes(), path.name.removesuffix(".gz")
            files = {name: gzip.decompress(data) if path.suffix == ".gz" else data} | configs
            found[case.name] = files, read_checkpoint
            for config in configs:
                found[f"{case.name} {config}"] = {config: files[config]} | files, read_checkpoint
    clip = open_clip(load_file(GOLDEN / "timm_clip_prenorm" / "model.safetensors"))
    config = {"open_clip_config.json": json.dumps(OPEN_CLIP).encode()}
    found["open_clip_config.json"] = config | {"model.safetensors": save(clip)}, read_checkpoint
    return found


def targets() -> dict[str, Target]:
    found = checkpoints()
    arrays = load_file(TIMM_VIT / "model.safetensors")
    state = {"model": {name: torch.from_numpy(array) for name, array in arrays.items()}}
    bomb = {"x": torch.zeros(1).expand(10**6, 10**5)}
    for name, content, zipped in (
        ("pickle zip", state, True),
        ("pickle old", state, False),
        ("bomb pickle", bomb, True),
    ):
        torch.save(content, file := io.BytesIO(), _use_new_zipfile_serialization=zipped)
        found[name] = {"x.pth": file.getvalue()}, read_checkpoint
    np.savez_compressed(file := io.BytesIO(), x=np.zeros(20_000_000))
    found["bomb npz"] = {"x.npz": file.getvalue()}, read_checkpoint
    found["ours"] = {"model.safetensors": open_checkpoint("default").file.read_bytes()}, read_ours
    names = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(arrays)}
    shards = {"model.safetensors.index.json": json.dumps({"weight_map": names}).encode()}
    for part in names.values():
        shards[part] = save({n: array for n, array in arrays.items() if names[n] == part})
    found["index"] = shards, read_checkpoint
    photo = Image.open(PHOTO).resize((48, 40))
    images = {f"image {kind}": (kind, photo) for kind in ("jpeg", "gif", "bmp", "tiff", "webp")}
    images |= {"bomb png": ("png", Image.new("1", (30_000, 30_000))), "image png": ("png", photo)}
    for name, (kind, image) in images.items():
        image.save(file := io.BytesIO(), kind)
        found[name] = {"x": (png := file.getvalue())}, lambda path: decode(path.read_bytes())
    pictures = {"a.png": png, "b.png": png}
    found["list"] = {"list.txt": b"a.png\nb*.png\n# c\nd/\n", **pictures}, read_list
    found["classes"] = {"classes.txt": "n1\tcat\nn2\tdög\nship\n".encode()}, read_classes
    rows = b"path,label,split\na.png,cat,train\nb.png,dog,test\n"
    found["csv"] = {"data.csv": rows, **pictures}, read_dataset
    sample = {"png": png, "cls": b"1"}
    tar = tar_bytes({f"{i}.{end}": sample[end] for i in range(3) for end in sample})
    found["shard"] = {"train-0.tar": tar}, read_dataset
    found["shard gz"] = {"train-0.tar.gz": gzip.compress(tar)}, read_dataset
    return found


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Mutate the bytes, or the JSON or zip archive that they contain."""
    length = int.from_bytes(data[:8], "little")
    with contextlib.suppress(Exception):  # earlier mutations may have made it invalid
        if draw.random() < 0.7 and data.startswith(b"PK"):
            return mutate_zip(data, draw)
        if draw.random() < 0.7 and data[8:9] == b"{":
            text = json.dumps(mutate_json(json.loads(data[8 : 8 + length]), draw)).encode()
            return len(text).to_bytes(8, "little") + text + data[8 + length :]
        if draw.random() < 0.7:
            return json.dumps(mutate_json(json.loads(data), draw)).encode()
    return mutate_bytes(data, draw)


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    """Change, drop, repeat or replace bytes, more often near the start."""
    size = max(len(data), 1)
    at = draw.randrange(min(size, draw.choice((64, 4096, size))))
    end = at + draw.choice((1, 4, 100))
    new = draw.choice((b"", data[at:end] * 2, bytes([draw.randrange(256)]), draw.choice(WORDS)))
    return data[: draw.choice((at, end))] + new + (data[end:] if draw.random() < 0.95 else b"")


def mutate_json(value: Any, draw: random.Random) -> Any:
    """Replace, drop or rename a nested value, including in JSON within a string."""
    if isinstance(value, dict) and value and draw.random() < 0.93:
        key, kind = draw.choice([*value, *["__metadata__"] * 20]), draw.random()
        key = key if key in value else draw.choice(list(value))
        if kind < 0.1:
            renamed = {k + ("\0" if k == key else ""): v for k, v in value.items()}
            return renamed if kind < 0.05 else {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        at = draw.randrange(len(value))
        return [*value[:at], mutate_json(value[at], draw), *value[at + draw.choice((0, 1, 1)) :]]
    if isinstance(value, str) and value.startswith("{") and draw.random() < 0.95:
        return json.dumps(mutate_json(json.loads(value), draw))
    return draw.choice(VALUES)


def mutate_zip(data: bytes, draw: random.Random) -> bytes:
    """Mutate one member and rewrite the archive, so that its checksums are valid."""
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(file := io.BytesIO(), "w") as new,
    ):
        if sum(member.file_size for member in old.infolist()) > 1e7:
            return mutate_bytes(data, draw)
        pickles = [name for name in old.namelist() if name.endswith(".pkl")]
        chosen = draw.choice(pickles or old.namelist())
        for name in old.namelist():
            content = old.read(name)
            start = mutate_bytes(content[:4096], draw) if name == chosen else content[:4096]
            new.writestr(name, start + content[4096:])
    return file.getvalue()


def attempt(target: Target, name: str, number: int) -> str:
    """Read a mutant in less than 1 GB of memory; number 0 is the original file."""
    draw, before = random.Random(f"{name}-{number}"), peak()
    with tempfile.TemporaryDirectory() as directory:
        for file, data in target[0].items():
            Path(directory, file).write_bytes(data)
        path = Path(directory, next(iter(target[0])))
        for _ in range(number and draw.choice((1, 1, 2, 4))):
            path.write_bytes(mutate(path.read_bytes(), draw))
        outcome = "read"
        try:
            target[1](path)
        except VitError:
            outcome = "refused"
    assert peak() - before < 1e6
    return outcome


def peak() -> int:
    """Peak memory of this process, in kB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.parametrize(
    ("rounds", "seed"), [(100, 0), pytest.param(5_000, 1, marks=pytest.mark.slow)]
)
def test_mutated_shapes(rounds: int, seed: int) -> None:
    """Unexpected tensor shapes raise nothing but CheckpointError."""
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


@pytest.mark.filterwarnings("ignore")
def test_mutated_checkpoints() -> None:
    outcomes = Counter[str]()
    for name, target in checkpoints().items():
        outcomes.update(attempt(target, name, number) for number in range(1, 5))
    assert outcomes.keys() == {"read", "refused"}
    assert min(outcomes.values()) > outcomes.total() // 15


FOUND: dict[str, Target] = {}
"""The targets, which the forked process inherits."""


def attempt_found(mutant: tuple[str, int]) -> str:
    return attempt(FOUND[mutant[0]], *mutant)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mutated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a subprocess with a timeout, to detect crashes and hangs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    FOUND.update(targets())
    mutants = [(name, number) for number in range(ROUNDS) for name in FOUND]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        outcomes = pool.imap(attempt_found, mutants)
        for mutant in mutants:
            try:
                outcomes.next(timeout=600)
            except Exception as error:
                raise AssertionError(mutant) from error
