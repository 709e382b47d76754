"""Fixtures and hooks for all tests."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

# Threads do not speed up tiny models, and cost minutes where cores are shared.
# Set before torch is imported; commands started by tests inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONUNBUFFERED", None)  # users have buffered output

from checkpoints.golden_cases import TIMM_VIT
from hub_server import LoopbackHub
from vitcli import retry
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import ClassLabel, ModelConfig, Preprocess

ROOT = Path(__file__).parent

# Background jobs of a shell ignore Ctrl-C, which commands started by tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """If CI is set, fail skipped comparisons with timm and transformers."""
    report = yield
    if report.skipped and item.get_closest_marker("peers") and os.environ.get("CI"):
        report.outcome = "failed"
    return report


CLASSES = (
    ClassLabel("n02012849", "crane"),  # the bird
    ClassLabel("n03126707", "crane"),  # the machine
    *(ClassLabel(f"n{i:08}", name) for i, name in enumerate(("cat", "dog", "ship", "jay"))),
    *(ClassLabel(name, name) for name in ("horse", "rocket", "coffee", "Grüne Mamba")),
)
"""Classes of the tiny checkpoint. Two share a name, as in ImageNet."""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: timm's golden ViT for 64 x 64 images, with ten classes. Images of that
    size are not resized, so its logits must match timm's."""
    model = ModelConfig(
        width=48, depth=2, num_heads=3, mlp_dim=192, image_size=(64, 64), num_classes=10
    )
    info = CheckpointInfo(model, Preprocess(size=(64, 64)), CLASSES, provenance={"data": "none"})
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save_checkpoint(folder, load_file(TIMM_VIT / "model.safetensors"), info)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three images: the two with timm's logits, and the cat in a subdirectory; also a hidden image
    and a text file."""
    folder = tmp_path_factory.mktemp("images")
    for name, pixels in zip("ab", np.load(TIMM_VIT / "io.npz")["image_u8"], strict=True):
        Image.fromarray(pixels).save(folder / f"{name}.png")
    (folder / "deep").mkdir()
    shutil.copy(ROOT / "images" / "cat.jpg", folder / "deep")
    shutil.copy(ROOT / "images" / "cat.jpg", folder / ".hidden.jpg")
    (folder / "notes.txt").write_text("no image\n")
    return folder


@pytest.fixture(scope="session")
def timm_logits() -> np.ndarray:
    """timm's logits (2, 10) of the tiny checkpoint for a.png and b.png."""
    return np.load(TIMM_VIT / "io.npz")["logits"]


class VitProcess(subprocess.Popen[str]):
    """`vit` in a subprocess."""

    def __init__(self, *args: object, **environment: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "vitcli", *map(str, args)]
        env = os.environ | environment
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)

    def __exit__(self, kind: type[BaseException] | None, *failure: Any) -> None:
        if kind is not None:
            self.kill()  # the test failed, so the process might wait forever
        super().__exit__(kind, *failure)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a condition holds or `process` has exited; fail after ten minutes."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "it did not happen in ten minutes"
        assert process is None or process.poll() is None or condition(), process.communicate()
        time.sleep(0.01)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before retries, in seconds. They return at once, and only they advance the clock
    that retries see."""
    delays: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(delays), sleep=delays.append)
    monkeypatch.setattr(retry, "time", clock)
    return delays


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> Iterator[LoopbackHub]:
    """An empty Hub on loopback. This process and its subprocesses are logged in as "me", with an
    empty cache."""
    with LoopbackHub() as running:
        use_hub(monkeypatch, running.environment, tmp_path / "home")
        yield running


def use_hub(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], home: Path) -> None:
    """Point the client to a Hub, with its cache and token in `home`. It reads its environment on
    import, so its constants are patched as well."""
    from huggingface_hub import constants

    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_HUB_CACHE",
        "HTTP_PROXY",
        "http_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**environment, "HF_HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    url = environment["HF_ENDPOINT"]
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)


def disable_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty files instead of figures, which would take most of the time of a short run."""
    from vitcli.figures import attention_plots, plots

    def draw(*args: Any) -> None:
        next(value for value in args if isinstance(value, Path)).touch()

    names = ("training_curves", "confusion_matrix", "reliability", "accuracy_by_rate")
    for name in (*names, "reconstructions"):
        monkeypatch.setattr(plots, name, draw)
    for name in ("side_by_side", "contact_sheet", "distance_by_depth", "filter_tiles"):
        monkeypatch.setattr(attention_plots, name, draw)
