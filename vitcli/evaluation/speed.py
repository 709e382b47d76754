"""Measure a model's speed and the largest batch that fits in memory (`vit bench`).

Weights are random, as speed does not depend on them. Images are random pixels on the device, so
decoding and copying are not measured.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli import machine
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import Architecture, BiTConfig, ModelConfig, Preprocess, Size
from vitcli.devices import is_out_of_memory
from vitcli.errors import RunError
from vitcli.inference import CorePool, Inference
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.words import pluralize

Work = Literal["inference", "training"]
Compute = Callable[[Tensor], object]
"""A forward pass or a training step on images (B, 3, H, W)."""

CLASSES = 1000
"""Number of classes of the head added to a model without one."""
TRAINING_BATCH = {"cpu": 32, "cuda": 128, "mps": 32}
MATRIX_SIZE = {"cpu": 2048, "cuda": 8192, "mps": 4096}
"""Size of the square matrices whose product defines peak FLOPs for MFU."""
MIN_GROWTH = 256 << 20
"""Bytes that a CPU process must grow before memory per image is estimated from its growth."""
TIMED_SECONDS, TIMED_RUNS = 1.0, 3
"""Minimum duration and number of runs of a measurement."""


@dataclass(frozen=True)
class Speed:
    """The measurements of one model at one resolution, in inference or training."""

    model: str
    resolution: Size
    work: Work
    """Training is a step of forward pass, backward pass, gradient clipping and AdamW."""
    device: str
    precision: str
    threads: int
    parameters: int
    tokens: int | None
    """Tokens per image; None for a ResNet."""
    flops: int
    """FLOPs of the forward pass per image; a training step takes three times as many."""
    batch_size: int
    """Batch size for the next three fields."""
    images_per_second: float
    mfu: float
    """FLOPs per second, relative to a large matrix product in the same precision."""
    memory: int | None
    """Peak memory in bytes: allocated by torch on a GPU, used by this process on a CPU; None if the
    system does not report it."""
    largest_batch: int
    """Largest batch that fits in memory, up to the search limit. On a CPU, where a process that
    uses too much is killed, it is extrapolated from the memory use of smaller batches."""


def matrix_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the best FLOPs per second of the product of two large matrices."""
    size = MATRIX_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    # As in a linear layer: without the transpose, fp16 and bf16 take minutes on many CPUs.
    return 2 * size**3 / min(_time_runs(lambda: a @ b.T, device))


def measure(
    name: str,
    config: Architecture,
    device: torch.device,
    dtype: torch.dtype,
    work: Work,
    batch_size: int | None,
    max_batch: int,
    peak_flops: float,
) -> Speed:
    """Measure a model at its resolution.

    Args:
        dtype: dtype for inference, or for autocast in training.
        batch_size: batch size of the measurement, not of the search for the largest; None for the
            device's default.
        max_batch: upper limit of the search, at least `batch_size`.
        peak_flops: `matrix_flops` of the device.

    Raises:
        RunError: the batch does not fit in memory.
    """
    make = {"inference": _make_inference, "training": _make_training}[work]
    compute, default = make(config.with_classes(config.num_classes or CLASSES), device, dtype)
    image_dtype = dtype if work == "inference" else torch.float32

    def run(count: int) -> None:
        compute(torch.randn((count, 3, *config.image_size), device=device).to(image_dtype))
        _synchronize(device)

    find = _largest_by_estimate if device.type == "cpu" else _largest_by_trial
    largest = find(run, max_batch)
    count = batch_size or min(default, max(largest, 1))
    if count > largest:
        height, width = config.image_size
        raise RunError(
            f"{name}: a batch of {pluralize(count, 'image')} of {height} x {width} pixels does not "
            f"fit in memory for {work}",
            hint=f"use a --batch-size of {largest:,} or less" if largest else None,
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "mps":
        torch.mps.empty_cache()  # release memory used by the larger batches of the search
    else:
        machine.reset_peak_memory()
    images = torch.randn((count, 3, *config.image_size), device=device).to(image_dtype)
    rate = count / statistics.median(_time_runs(partial(compute, images), device))
    passes = 3 if work == "training" else 1
    return Speed(
        model=name,
        resolution=config.image_size,
        work=work,
        device=str(device),
        precision=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        parameters=config.num_params(),
        tokens=None if isinstance(config, BiTConfig) else config.num_tokens,
        flops=2 * config.macs(),
        batch_size=count,
        images_per_second=rate,
        mfu=rate * passes * 2 * config.macs() / peak_flops,
        memory=_peak_memory(device),
        largest_batch=largest,
    )


# ---------------------------------------------------------------------------------------------
# Workloads


def _build(config: Architecture) -> ViT | BiT:
    model = ViT(config) if isinstance(config, ModelConfig) else BiT(config)
    model.init_weights(0)
    for weight in model.head.parameters():
        nn.init.normal_(weight, std=0.02)  # with zeros, most gradients would be zero
    return model


def _make_inference(
    config: Architecture, device: torch.device, dtype: torch.dtype
) -> tuple[Compute, int]:
    """Return a forward pass as in `vit predict`, and its default batch size."""
    info = CheckpointInfo(config, Preprocess(size=config.image_size))
    inference, cores = Inference(info, _build(config).state_dict(), device, dtype), CorePool(device)

    def logits(images: Any) -> Any:
        with torch.inference_mode():
            return inference.model(images)

    def compute(images: Any) -> Tensor:
        return cores.submit(logits, images)()

    return compute, inference.batch_size


def _make_training(
    config: Architecture, device: torch.device, dtype: torch.dtype
) -> tuple[Compute, int]:
    """Return a training step, and its default batch size."""
    step = training_step(_build(config).to(device).train(), config.num_classes, device, dtype)
    return step, TRAINING_BATCH[device.type]


def training_step(
    model: nn.Module, num_classes: int, device: torch.device, dtype: torch.dtype
) -> Compute:
    """Return a step as in the training loop, with autocast to `dtype`: forward pass, backward pass,
    gradient clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(images: Tensor) -> None:
        labels = torch.arange(len(images), device=device) % num_classes
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---------------------------------------------------------------------------------------------
# Time and memory


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the default is the current device, maybe another
    elif device.type == "mps":
        torch.mps.synchronize()


def _time_runs(compute: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds taken by each of several runs, after a warm-up run."""
    compute()
    _synchronize(device)
    times: list[float] = []
    while len(times) < TIMED_RUNS or sum(times) < TIMED_SECONDS:
        begin = time.perf_counter()
        compute()
        _synchronize(device)
        times.append(time.perf_counter() - begin)
    return times


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return torch.mps.driver_allocated_memory() if device.type == "mps" else machine.peak_memory()


def _fits(run: Callable[[int], None], count: int) -> bool:
    try:
        run(count)
        return True
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    if torch.cuda.is_available():  # not in the except clause, where the traceback holds tensors
        torch.cuda.empty_cache()
    return False


def _largest_by_trial(run: Callable[[int], None], limit: int) -> int:
    """Find the largest batch up to `limit` that runs, by doubling and bisection; 0 if none."""
    fits, fails = 0, limit + 1
    while fails - fits > 1:
        count = min(max(1, 2 * fits), limit) if fails > limit else (fits + fails) // 2
        fits, fails = (count, fails) if _fits(run, count) else (fits, count)
    return fits


def _largest_by_estimate(run: Callable[[int], None], limit: int) -> int:
    """Estimate it on a CPU from the growth of this process; `limit` if it does not grow."""
    run(1)  # warm-up: loads what every batch needs
    single_peak = _measure_peak(run, 1)
    count, growth = 1, 0
    while growth < MIN_GROWTH and count < min(64, limit):
        count = min(4 * count, limit)
        growth = _measure_peak(run, count) - single_peak
    per_image = growth / max(1, count - 1)
    machine.reset_peak_memory()  # release what the batches used
    if per_image <= 0:
        return limit
    fixed = single_peak - per_image
    available = machine.free_memory() + (machine.peak_memory() or 0) - fixed
    return max(0, min(limit, int(available / per_image)))


def _measure_peak(run: Callable[[int], None], count: int) -> int:
    machine.reset_peak_memory()
    run(count)
    return machine.peak_memory() or 0
