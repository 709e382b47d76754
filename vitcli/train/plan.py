"""The auto rule: what a run takes where its configuration says None, and what it will cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from vitcli.config import Architecture, BiTConfig, ResNetConfig, Size
from vitcli.devices import free_memory
from vitcli.machine import cpu_cores
from vitcli.train_config import TrainConfig


@dataclass(frozen=True)
class Plan:
    """A configuration without gaps, and what the user should know before step 1."""

    config: TrainConfig
    train_size: int
    tokens: int
    parameters: int

    @property
    def epochs(self) -> float:
        """Passes over the training part."""
        return (self.config.steps or 0) * (self.config.batch_size or 0) / self.train_size


def make_plan(
    config: TrainConfig, model: Architecture, train_size: int, device: torch.device
) -> Plan:
    """Fills in what the configuration leaves open, from the number of training images n.

    - batch: the largest power of two up to n / 16, between 8 and 512 (pretrain: 1,024).
    - steps, finetune: the paper's for data of such a size (Table 4, as BiT-HyperRule, arXiv
      1912.11370, generalises it): 500 below 20,000 images, 10,000 below 500,000, else 20,000;
      on a CPU at most 10 epochs (and at least 100 steps). pretrain: 90 epochs.
    - lr: sgd 0.01, adam and adamw 1e-3 (finetune: 1e-4).
    - warm-up: a fifth of the steps, at most 500 (pretrain: a tenth, at most 10,000).
    - evaluation: 20 times a run, at least 10 steps apart.
    - micro-batches: as large as half of the free memory holds, at most 128 images.
    """
    pretrain = config.task == "pretrain"
    batch = config.batch_size or _power_of_two(train_size // 16, 8, 1024 if pretrain else 512)
    steps = config.steps
    if steps is None and config.epochs is not None:
        steps = max(1, round(config.epochs * train_size / batch))
    if steps is None:
        steps = _auto_steps(pretrain, train_size, batch, device.type == "cpu")
    warmup = config.warmup
    if warmup is None:
        warmup = min(steps // 10, 10_000) if pretrain else min(steps // 5, 500)
    accumulate = config.accumulate or _micro_batches(batch, model, device)
    filled = dataclasses.replace(
        config,
        batch_size=batch,
        steps=steps,
        warmup=warmup,
        accumulate=accumulate,
        lr=config.lr or _auto_lr(config),
        eval_every=config.eval_every or max(10, -(-steps // 20)),
        resolution=model.image_size,
        workers=_auto_workers(device) if config.workers is None else config.workers,
    )
    return Plan(filled, train_size, model.num_tokens, model.num_params())


def _auto_steps(pretrain: bool, train_size: int, batch: int, on_cpu: bool) -> int:
    if pretrain:
        return max(1, 90 * train_size // batch)
    steps = 500 if train_size < 20_000 else 10_000 if train_size < 500_000 else 20_000
    return min(steps, max(100, 10 * train_size // batch)) if on_cpu else steps


def _auto_lr(config: TrainConfig) -> float:
    if config.optimizer == "sgd":
        return 0.01
    return 1e-3 if config.task == "pretrain" else 1e-4


def _auto_workers(device: torch.device) -> int:
    return 1 if device.type == "cpu" else min(cpu_cores(), 16)


def _power_of_two(n: int, low: int, high: int) -> int:
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)


def _micro_batches(batch: int, model: Architecture, device: torch.device) -> int:
    """The smallest divisor of the batch whose parts fit. What a block keeps for its backward
    pass is about 16 vectors of D and 3 of mlp_dim a token, at most 4 bytes a value."""
    if isinstance(model, BiTConfig):
        per_image = _resnet_bytes(model.resnet, model.image_size)
    else:
        per_token = (16 * model.width + 3 * model.mlp_dim) * 4
        per_image = model.num_tokens * model.depth * per_token
        per_image += _resnet_bytes(model.stem, model.image_size) if model.stem else 0
    fits = min(max(1, int(free_memory(device) // 2 // per_image)), 128)
    return next(k for k in range(1, batch + 1) if batch % k == 0 and batch // k <= fits)


def _resnet_bytes(resnet: ResNetConfig, image_size: Size) -> int:
    """What a ResNet keeps for its backward pass: a feature map before and behind every norm and
    ReLU, so about 3 for a convolution."""
    return sum(3 * 4 * layer.outputs for layer in resnet.layers(image_size))
