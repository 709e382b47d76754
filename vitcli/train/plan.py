"""Automatic values for options that a configuration leaves unset, and the cost of a run."""

import dataclasses
import time
from typing import Any

import torch

from vitcli.architectures.variants import variant_name
from vitcli.config import Architecture, BiTConfig, ModelConfig
from vitcli.devices import free_memory, is_out_of_memory
from vitcli.errors import ConfigError
from vitcli.machine import cpu_cores
from vitcli.train.config import TrainConfig
from vitcli.train.events import Plan
from vitcli.train.inputs import has_fixed_features
from vitcli.train.optim import OPTIMIZERS, Layers, set_training
from vitcli.train.run import Run, out_of_memory
from vitcli.words import pluralize


def fill_defaults(
    config: TrainConfig,
    model: Architecture,
    train_size: int,
    device: torch.device,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> TrainConfig:
    """Fill in the options that the configuration leaves unset, given n training images.

    - batch size: the largest power of two up to n / 16, between 8 and 512 (pretrain: 1,024).
    - steps, finetune: the paper's for datasets of this size (Table 4, as generalized by
      BiT-HyperRule, arXiv 1912.11370): 500 below 20,000 images, 10,000 below 500,000, else 20,000;
      on a CPU at most 10 epochs (and at least 100 steps). pretrain: 90 epochs.
    - lr: by optimizer and task (`OPTIMIZERS`); without classes, by objective (`default_lr`).
    - warm-up: a fifth of the steps, at most 500 (pretrain: a tenth, at most 10,000).
    - evaluation: 20 times per run, at least 10 steps apart; metrics: 100 times or more.
    - micro-batches: as large as fits into half of a rank's free memory, at a precision of `dtype`;
      on a CPU at most 128 images, as larger ones are not faster.

    Raises:
        ConfigError: a batch has fewer images than there are ranks.
    """
    pretrain = config.task == "pretrain"
    power_of_two = 1 << max(train_size // 16, 1).bit_length() - 1
    batch_size = config.batch_size or min(max(power_of_two, 8), 1024 if pretrain else 512)
    if batch_size < ranks:
        raise ConfigError(
            f"a batch of {pluralize(batch_size, 'image')} cannot be split over {ranks} ranks",
            hint="use a larger --batch-size or fewer --devices",
        )
    steps = config.steps
    if steps is None and config.epochs is not None:
        steps = max(1, round(config.epochs * train_size / batch_size))
    if steps is None and pretrain:
        steps = max(1, 90 * train_size // batch_size)
    elif steps is None:
        steps = 500 if train_size < 20_000 else 10_000 if train_size < 500_000 else 20_000
        if device.type == "cpu":
            steps = min(steps, max(100, 10 * train_size // batch_size))
    workers = 1 if device.type == "cpu" else min(cpu_cores(), 16)
    config = dataclasses.replace(config, batch_size=batch_size, steps=steps)
    per_rank = _largest_micro_batch(model, device, dtype, config.grad_checkpointing)
    missing = {k: v for k, v in auto_values(config).items() if getattr(config, k) is None}
    return dataclasses.replace(
        config,
        accumulate=config.accumulate or -(-batch_size // (ranks * per_rank)),
        resolution=model.image_size,
        workers=workers if config.workers is None else config.workers,
        **missing,
    )


def auto_values(config: TrainConfig) -> dict[str, Any]:
    """Return the values derived from the number of steps, the batch size and other options."""
    steps, pretrain = config.steps or 0, config.task == "pretrain"
    return {
        "warmup": min(steps // 10, 10_000) if pretrain else min(steps // 5, 500),
        "lr": default_lr(config, config.batch_size or 1),
        "eval_every": max(10, -(-steps // 20)),
        "log_every": max(1, min(50, steps // 100)),
    }


def default_lr(config: TrainConfig, batch_size: int) -> float:
    """Return the default peak learning rate: for MAE in proportion to the batch size (arXiv
    2111.06377, section A.1), for masked patches the paper's (section B.1.2)."""
    if config.objective == "mae":
        return MAE_RATE * batch_size / 256
    if config.objective == "masked-patch":
        return MASKED_PATCH_RATE
    rate = OPTIMIZERS[config.optimizer].default_lr[config.task]
    return LORA_FACTOR * rate if config.lora else rate


LORA_FACTOR = 10
"""LoRA's best learning rate divided by that of full fine-tuning (Schulman et al., "LoRA Without
Regret", Thinking Machines Lab, 2025)."""

MAE_RATE, MASKED_PATCH_RATE = 1.5e-4, 2e-4


def _largest_micro_batch(
    model: Architecture, device: torch.device, dtype: torch.dtype, checkpointing: bool
) -> int:
    """Estimate how many images fit into memory. Per token, a block keeps about 16 vectors of D and
    3 of mlp_dim for its backward pass; with `checkpointing`, all but one keep only their input. A
    ResNet keeps a feature map before and after every norm and ReLU, so about 3 per convolution;
    with `checkpointing`, about half of them."""
    resnet = model.resnet if isinstance(model, BiTConfig) else model.stem
    outputs = sum(layer.outputs for layer in resnet.layers(model.image_size)) if resnet else 0
    values = 3 * outputs // 2 if checkpointing else 3 * outputs
    if isinstance(model, ModelConfig):
        block = 16 * model.width + 3 * model.mlp_dim
        blocks = block + 2 * model.depth * model.width if checkpointing else block * model.depth
        values += model.num_tokens * blocks
    count = max(1, int(free_memory(device) // 2 // (values * dtype.itemsize)))
    return min(count, 128) if device.type == "cpu" else count


def build_plan(run: Run) -> Plan:
    """Summarize a run before its first step, with an estimate of the time it takes."""
    config, model, splits = run.config, run.info.model, run.splits
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    val_images = len(splits.val) if splits.val is not None else 0
    num_images, micro_batches = (run.steps - run.progress.step) * len(run.part), run.micro_batches
    num_passes = _passes_per_image(run) * run.steps * run.batch_size
    if has_fixed_features(run):
        num_features = len(splits.train) + val_images
        num_passes, num_images = num_features, num_features // run.ranks.world_size
        micro_batches = 1
    macs = num_passes * run.objective.macs + run.steps * run.batch_size * run.objective.target_macs
    return Plan(
        model=str(run.info.provenance.get("parent") or variant_name(model)),
        parameters=model.num_params(),
        trained_parameters=trained,
        resolution=model.image_size,
        patch_size=model.patch_size,
        tokens=model.num_tokens,
        flops=2 * run.objective.macs,
        train_images=len(splits.train),
        val_images=val_images,
        classes=model.num_classes,
        class_names=tuple(label.name for label in splits.classes[: min(10, model.num_classes)]),
        steps=run.steps,
        from_step=run.progress.step,
        epochs=run.steps * run.batch_size / len(splits.train),
        exaflops=2 * macs / 1e18,
        batch_size=run.batch_size,
        grad_accum=micro_batches,
        optimizer=config.optimizer,
        lr=config.lr,
        warmup=config.warmup or 0,
        device=str(run.device),
        precision=run.precision,
        ranks=run.ranks.world_size,
        estimated_seconds=None if config.shard else num_images * seconds_per_image(run),
    )


def _passes_per_image(run: Run) -> float:
    """Return the cost of training on an image, in forward passes. For each layer that is not below
    the lowest trained one, the backward pass costs two: one for the gradients of the weights, which
    LoRA hardly needs, and one for those of the inputs."""
    model, layers = run.model.config, Layers(run.model)
    frozen = 0 if run.config.lora else run.config.freeze  # LoRA freezes the stem
    if frozen is None:
        return 3
    trained = (layer for layer in model.layers() if not layers.is_frozen(layer.name, frozen))
    share = sum(layer.macs for layer in trained) / model.macs()
    return 1 + share * (1 if run.config.lora else 2)


def seconds_per_image(run: Run) -> float:
    """Time forward and backward passes of micro-batches of zeros. Weights do not change, and the
    states of the random generators are restored.

    Raises:
        RunError: a single image does not fit into memory.
    """
    count = max(1, -(-len(run.part) // run.micro_batches))
    if run.device.type == "cpu" and not run.config.compile:  # elsewhere, fewer would be slower
        count = min(count, 32)
    devices = [] if run.device.type == "cpu" else [run.device]
    with torch.random.fork_rng(devices, device_type=run.device.type):
        set_training(run.objective, run.config.freeze)
        while True:
            try:
                return min(_time_passes(run, count)) / count
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            if count == 1:
                raise out_of_memory()
            count //= 2


def _time_passes(run: Run, count: int) -> list[float]:
    """Time passes over `count` images, in seconds: at least two, and more within two seconds."""
    objective = run.objective
    images = torch.zeros((count, 3, *run.info.model.image_size), device=run.device)
    labels = torch.zeros(count, dtype=torch.int64, device=run.device)
    times: list[float] = []
    while len(times) < 2 or (len(times) < 8 and sum(times) < 2.0):  # the first one warms up
        started = time.perf_counter()
        x, y = objective.prepare(images, labels, step=0)
        with run.autocast():
            losses, _ = objective(x, y)
        losses.sum().backward()
        losses.sum().item()  # waits for the device
        times.append(time.perf_counter() - started)
        objective.zero_grad(set_to_none=True)
    return times
