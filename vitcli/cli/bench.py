"""`vit bench`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitcli.cli import output, progress
from vitcli.cli.info import named_architecture
from vitcli.cli.options import (
    INPUT,
    DownloadOptions,
    device_option,
    figure_option,
    precision_option,
    read_checkpoint,
)
from vitcli.cli.parameters import UsageError, command
from vitcli.config import Architecture, Precision, Size
from vitcli.fields import option, parse_sizes
from vitcli.hub import registry
from vitcli.words import format_size, pluralize

if TYPE_CHECKING:
    from vitcli.evaluation.speed import Speed, Work


@dataclass(frozen=True, kw_only=True)
class Bench(DownloadOptions):
    """Options of `vit bench`."""

    models: list[str] = option(
        ..., "MODEL", "Model names, paths, Hub repos, or architectures such as B/16."
    )
    train: bool = option(True, "--train/--no-train", "Also measure training steps.")
    batch_size: int | None = option(
        None,
        "--batch-size -b N",
        "Images per batch when measuring speed and memory.  [default: as for `vit predict`; for "
        "training, 32, or 128 on CUDA]",
        min=1,
    )
    max_batch: int = option(
        4096,
        "--max-batch N",
        "Upper limit of the search for the largest batch that fits; a + after a result means that "
        "it was reached.",
        min=1,
    )
    plot: str | None = figure_option("--plot FILE", "speed and largest batch against resolution")
    resolution: tuple[Size, ...] = option(
        (),
        "--resolution --resolutions N|HxW,...",
        "Input sizes in pixels, each measured in turn.  [default: the model's]",
        INPUT,
        parse=parse_sizes,
    )
    device: str = device_option()
    precision: Precision = precision_option()


@command(Bench)
def bench(args: Bench) -> None:
    """Measure the speed of models on this machine.

    For each model and resolution, prints images per second, MFU (FLOPs per second, as a share of
    what a large matrix product reaches on this machine), peak memory, and the largest batch that
    fits. Weights are random; only the header of a checkpoint is read.

    \b
    Examples:
      vit bench default
      vit bench S/16 B/16 R50+B/16 --resolution 224,384 --no-train --plot speed.png
    """
    if (args.batch_size or 0) > args.max_batch:
        raise UsageError(f"--batch-size {args.batch_size} exceeds --max-batch {args.max_batch}")
    output.check_writable(args.plot)
    models = []
    for name in args.models:
        config = _find_architecture(name, args)
        for size in args.resolution or (config.image_size,):
            is_default = size == config.image_size
            models.append((name, config if is_default else config.with_image_size(size)))
    from vitcli.devices import choose_device, choose_precision
    from vitcli.evaluation import speed
    from vitcli.inference import check_memory

    device = choose_device(args.device)
    dtype = choose_precision(args.precision, device)
    workloads: tuple[Work, ...] = ("inference", "training") if args.train else ("inference",)
    results: list[Speed] = []
    for _, config in models:
        check_memory(config, device.type)
    total = 1 + len(workloads) * len(models)
    with progress.Display() as display:

        def show(label: str, done: int) -> None:
            display.show(label, done, total, [f"{done} of {total} done"])

        show("matrix product", 0)
        peak_flops = speed.matrix_flops(device, dtype)
        for (name, config), work in itertools.product(models, workloads):
            show(f"{name} at {format_size(config.image_size)} px, {work}", 1 + len(results))
            limits = args.batch_size, args.max_batch
            results.append(speed.measure(name, config, device, dtype, work, *limits, peak_flops))
            if args.json:
                output.json_line(dataclasses.asdict(results[-1]))
    try:
        if args.plot:
            _draw(results, args.plot)
    finally:
        if not args.json:
            first = results[0]
            threads = f", {pluralize(first.threads, 'thread')}" if first.device == "cpu" else ""
            output.note(f"{first.device}, {first.precision}{threads}")
            show_table(results, args.max_batch)


def _find_architecture(name: str, args: Bench) -> Architecture:
    """Return the architecture for a name; registry models are not downloaded."""
    config = named_architecture(name)
    if config is not None:
        return config
    resolved = registry.resolve(name)
    if isinstance(resolved, registry.RegistryEntry):
        return resolved.model
    return read_checkpoint(args, name).info.model


def show_table(results: Sequence[Speed], max_batch: int) -> None:
    """Print one row per measurement."""
    rows = [
        [
            speed.model,
            format_size(speed.resolution),
            speed.work,
            _three_digits(speed.flops / 1e9),
            _three_digits(speed.images_per_second),
            f"{speed.mfu:.0%}",
            f"{speed.batch_size:,}",
            "-" if speed.memory is None else output.format_bytes(speed.memory),
            f"{speed.largest_batch:,}" + "+" * (speed.largest_batch == max_batch),
        ]
        for speed in results
    ]
    columns = ["model", "px", "work", "GFLOPs", "images/s", "MFU", "batch", "memory"]
    output.table([*columns, "largest batch"], rows, (1, *range(3, 9)))


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _draw(results: Sequence[Speed], path: str) -> None:
    from vitcli.figures import plots

    lines: dict[tuple[str, str], list[tuple[Size, float, int]]] = {}
    for speed in results:
        point = (speed.resolution, speed.images_per_second, speed.largest_batch)
        lines.setdefault((speed.model, speed.work), []).append(point)
    plots.speed_by_resolution(lines, path)
