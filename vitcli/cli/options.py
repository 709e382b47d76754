"""Options shared by several commands, as dataclasses that `parameters.py` turns into commands."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from vitcli.cli import output, progress
from vitcli.cli.parameters import OTHER
from vitcli.config import (
    CHANGE_PREPROCESS,
    MACHINE,
    POSEMB_METHODS,
    PosembMethod,
    Precision,
    Preprocess,
    Size,
)
from vitcli.fields import Requirement, key_value, option, parse_device, parse_grid, parse_size
from vitcli.words import join_or

if TYPE_CHECKING:
    from vitcli.checkpoints.read import Checkpoint
    from vitcli.prediction import Predictor

MODEL = (
    "Model name (see `vit models`), run directory, checkpoint file, or Hub repo "
    "(org/name[@revision]); ./x is always a path. Included: default (classes of CIFAR-10) and "
    "default-pretrained (Tiny-ImageNet)."
)
INPUT = "Input"
"""A heading in `--help`."""
CHECKPOINT = (
    "Model name (see `vit models`), run directory, checkpoint file in any layout, or Hub repo."
)
DEVICES = (
    "Number of devices to use on this machine, with one process (rank) each; on a CPU, the ranks "
    "share the cores. For several machines, use torchrun.  [default: 1]"
)
RESOLUTION = Requirement(
    "has no effect unless --resolution resizes position embeddings",
    lambda args: bool(args.resolution),
)
RESIZED = "Input size in pixels; position embeddings are resized to match.  [default: the model's]"


def device_option() -> Any:
    """`--device`."""
    return option(
        "auto",
        "--device auto|cpu|cuda[:N]|mps",
        "Device to run on; auto is the first available of cuda, mps and cpu.",
        MACHINE,
        parse=parse_device,
    )


def precision_option() -> Any:
    """`--precision`."""
    return option(
        "auto",
        "--precision",
        "Floating-point precision; auto is bf16 if the hardware supports it, else fp32.",
        MACHINE,
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of every command."""

    json: bool = option(False, "--json", "Print JSON, one object per line.", OTHER)
    offline: bool = option(False, "--offline", "Do not use the network.")
    quiet: bool = option(False, "--quiet -q", "Print only results, warnings and errors.", OTHER)
    debug: bool = option(False, "--debug", "Print the traceback if the command fails.")


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(CommonOptions):
    """Options of commands that may download a model."""

    allow_pickle: bool = option(
        False,
        "--allow-pickle",
        "Accept Hub repos that have only pickled weights; no code in the pickles is run.",
        OTHER,
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DownloadOptions):
    """Options of commands that run a model."""

    model: str = option("default", "--model -m NAME|PATH|REPO", MODEL)
    resolution: Any = option(None, "--resolution N|HxW", RESIZED, INPUT, parse=parse_size)
    """A size or None; a tuple of sizes for `vit evaluate`."""
    posemb_method: PosembMethod = option(
        "bilinear", "--posemb-method", POSEMB_METHODS, INPUT, requires=RESOLUTION
    )
    device: str = device_option()


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(ModelOptions):
    """Options of commands that run a model over many images."""

    devices: int | None = option(None, "--devices N", DEVICES, MACHINE, min=1, max=1024)
    precision: Precision = precision_option()
    batch_size: int | None = option(
        None,
        "--batch-size -b N",
        "Images per batch.  [default: 4 per core on a CPU, 64 on a GPU]",
        min=1,
    )
    workers: int | None = option(
        None, "--workers N", "Number of threads that decode images.  [default: one per core]", min=1
    )


@dataclass(frozen=True, kw_only=True)
class PreprocessOptions(InferenceOptions):
    """Options of commands that can override a model's preprocessing."""

    preprocess: dict[str, Any] = option(
        {},
        "--preprocess KEY=VALUE",
        CHANGE_PREPROCESS,
        INPUT,
        parse=key_value(Preprocess, size="--resolution"),
    )


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options of commands that write a checkpoint, listed after the command's own."""

    force: bool = option(False, "--force", "Overwrite existing output.")
    dry_run: bool = option(False, "--dry-run", "Print what would be written, without writing it.")
    old_grid: Size | None = option(
        None,
        "--old-grid RxC",
        "Rows and columns of the stored position embeddings, if the file does not specify them.",
        parse=parse_grid,
    )


@contextlib.contextmanager
def fetching(args: DownloadOptions) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments for library functions that may download a model, with progress."""
    with progress.DownloadDisplay() as display:
        yield {"offline": args.offline, "on_progress": display, "allow_pickle": args.allow_pickle}


def open_predictor(args: ModelOptions, resolution: Size | None = None) -> Predictor:
    """Open the selected model, downloading it if needed; in fp32 if there is no --precision."""
    from vitcli.prediction import Predictor

    precision = args.precision if isinstance(args, InferenceOptions) else "fp32"
    with fetching(args) as kwargs:
        return Predictor(
            args.model,
            args.device,
            precision,
            resolution=resolution,
            posemb_method=args.posemb_method,
            preprocess=args.preprocess if isinstance(args, PreprocessOptions) else None,
            **kwargs,
        )


def note_missing_names(predictor: Predictor) -> None:
    """Print a note if class indices are shown instead of names."""
    if predictor.classes and not predictor.info.classes:
        output.note(f"{predictor.name}: the model has no class names, so class indices are shown")


def read_checkpoint(args: DownloadOptions, name: str) -> Checkpoint:
    """Open a checkpoint, downloading it if needed."""
    from vitcli.checkpoints.read import open_checkpoint

    with fetching(args) as kwargs:
        return open_checkpoint(name, **kwargs)


def ending(*suffixes: str) -> Callable[[str], str]:
    """Return a parser that rejects output paths without one of the suffixes."""

    def parse(path: str) -> str:
        if not path.lower().endswith(suffixes):
            raise ValueError(f"'{path}' does not end in {join_or(suffixes)}")
        return path

    return parse


def figure_option(usage: str, what: str, group: str | None = None) -> Any:
    """An option that names the file of a figure."""
    parse = ending(".png", ".pdf", ".svg")
    return option(None, usage, f"Plot {what} (.png, .pdf or .svg).", group, parse=parse)


def model_files(path: str) -> list[str]:
    """Return a model's path and, if it is a directory, the files in it."""
    return [path, *(file.path for file in os.scandir(path))] if os.path.isdir(path) else [path]


def check_overwrite(inputs: Iterable[str | None], path: str | None, option: str) -> None:
    """Raise BadParameter if `path` would overwrite an input, an image or a checkpoint."""
    if path and os.path.isfile(path):
        from vitcli.checkpoints.feature_file import holds_a_model
        from vitcli.data.files import is_image

        real_path = os.path.realpath(path)
        if real_path in [os.path.realpath(name) for name in inputs if name]:
            raise _overwrite_error(path, "an input", option)
        if is_image(real_path):
            raise _overwrite_error(path, "an image", option)
        if holds_a_model(real_path):
            raise _overwrite_error(path, "a checkpoint or other data", option)


def check_dataset_overwrite(data: Iterable[str], path: str | None, option: str) -> None:
    """Raise BadParameter if `path` would overwrite a file in a dataset."""
    roots = tuple(os.path.realpath(root) + os.sep for root in data)
    if path and os.path.isfile(path) and os.path.realpath(path).startswith(roots):
        raise _overwrite_error(path, "in the dataset", option)


def _overwrite_error(path: str, role: str, option: str) -> typer.BadParameter:
    return typer.BadParameter(f"'{path}' is {role} and would be overwritten", param_hint=option)
