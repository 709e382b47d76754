"""Run `vit` in the test process: importing torch for every command would take minutes."""

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import Result

from cli import training_runs
from conftest import disable_figures
from peers.random_models import save_random
from vitcli.architectures.resnet import bit_resnet
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import save_checkpoint
from vitcli.cli import output, progress
from vitcli.config import BiTConfig


@pytest.fixture(autouse=True)
def no_plain_progress(monkeypatch):
    """Plain progress is printed every ten seconds, and would appear in slow tests."""
    monkeypatch.setattr(progress, "PLAIN_EVERY", 1e9)
    monkeypatch.setattr(output, "quiet", False)


@pytest.fixture
def vit():
    """`vit("predict", path, ...)` returns the exit code, stdout and stderr of the command."""
    return training_runs.vit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """`terminal("stderr")` turns a stream into a color terminal. Call it inside the test: pytest
    replaces the streams between fixture setup and the test."""

    def make(name: str) -> io.StringIO:
        stream = Terminal()
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return stream

    return make


def strip_ansi(text: str) -> str:
    """Remove the codes of colors and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def error_message(result: Result, exit_code: int = 1) -> str:
    """The error of a failed command, with at most one hint."""
    assert (result.exit_code, result.stdout) == (exit_code, ""), result.output
    assert "Traceback" not in result.stderr
    message = result.stderr[result.stderr.index("error: ") :]
    assert len(message.splitlines()) <= 2
    return message


def write_images(
    directory: Path,
    count: int,
    level: int,
    seed: int,
    noise: int = 15,
    size: tuple[int, int] = (70, 64),
) -> None:
    """Write images of noise around a gray level."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = np.clip(rng.normal(level, noise, (*size, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(directory / f"{i}.png")


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Two classes of eight images each."""
    root = tmp_path_factory.mktemp("data") / "pets"
    for seed, (name, level) in enumerate((("cats", 60), ("dogs", 190))):
        write_images(root / name, 8, level, seed, noise=20, size=(20, 20))
    return root


@pytest.fixture(scope="session")
def resnet(tmp_path_factory):
    """A small BiT ResNet for 64 px images."""
    config = BiTConfig(bit_resnet((1, 1, 1, 1), 0.5), (64, 64))
    return save_random(tmp_path_factory.mktemp("models") / "bit", config)


@pytest.fixture(scope="session")
def nan_checkpoint(tiny_checkpoint, tmp_path_factory):
    """The tiny model with weights that make all outputs NaN."""
    weights = load_file(tiny_checkpoint / "model.safetensors")
    weights["patch_embed.proj.bias"][:] = np.nan
    folder = tmp_path_factory.mktemp("models") / "nan"
    return save_checkpoint(folder, weights, read_info(tiny_checkpoint)[0])


@pytest.fixture(scope="session")
def pretrained(images, tmp_path_factory):
    """A model pre-trained at 16 px."""
    folder = tmp_path_factory.mktemp("runs") / "pretrained"
    options = [*training_runs.TINY, *training_runs.SHORT]
    with pytest.MonkeyPatch.context() as patch:
        disable_figures(patch)
        result = training_runs.vit("pretrain", "--data", images, *options, "-o", folder)
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def no_figures(monkeypatch):
    """Skip figures: drawing them would take longer than training."""
    disable_figures(monkeypatch)
