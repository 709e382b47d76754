"""Optimizers and learning rates."""

from __future__ import annotations

import math

import torch
from torch import nn

from vitcli.train.layers import Layers
from vitcli.train_config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of what a run trains. Weight decay acts on matrices and kernels alone: biases,
    norms, tokens and position embeddings are left out (as in big_vision's `.*/kernel` masks). Each
    group has an "lr_scale", below 1 in lower layers where `layer_decay` says so."""
    layers, decay = Layers(model), config.layer_decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            weight_decay = config.weight_decay if is_decayed(name, parameter) else 0.0
            scale = layers.scale(name, decay) if decay is not None else 1.0
            groups.setdefault((weight_decay, scale), []).append(parameter)
    built = [
        {"params": parameters, "weight_decay": weight_decay, "lr_scale": scale}
        for (weight_decay, scale), parameters in groups.items()
    ]
    lr = config.lr or 0.0
    if config.optimizer == "sgd":
        return torch.optim.SGD(built, lr=lr, momentum=config.momentum)
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(built, lr=lr, betas=config.betas, fused=True)


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay acts on a parameter."""
    leaf = name.rsplit(".", 1)[-1]
    return parameter.ndim >= 2 and leaf == "weight"


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of step 1, 2, ..., `config.steps`: a linear warm-up times a decay to 0 that is
    counted after the warm-up (vit_jax/utils.py `create_learning_rate_schedule`)."""
    base, steps, warmup = config.lr or 0.0, config.steps or 1, config.warmup or 0
    progress = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
    decay = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
    }[config.schedule]
    return base * decay * (min(1.0, step / warmup) if warmup else 1.0)
