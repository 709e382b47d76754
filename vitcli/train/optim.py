"""Optimizers, learning-rate schedules, layer-wise learning rates and freezing.

Layer 0 is the stem: patch embedding, tokens, position embeddings. Layers 1 to n are the blocks;
layer n + 1 is the head and everything after the final norm. The final norm belongs to the last
block, as in timm (`timm/optim/_param_groups.py`).
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitcli.devices import multiplies_bf16
from vitcli.errors import ConfigError
from vitcli.train.config import TrainConfig

_BLOCK = re.compile(r"(?:stages\.\d+\.)?blocks\.\d+\.")
_HEAD = {"head", "head_dist", "drop"}
_AFTER_NORM = {"attn_pool", "fc_norm", "pre_logits"}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups marked "muon", AdamW for the others, at one learning rate: the update of
    a matrix is scaled to the RMS of AdamW's (arXiv 2502.16982, section 2.2). Betas are AdamW's.

    Takes the same steps as `torch.optim.Muon`, but for all matrices of one shape at once. This is
    faster: on a GPU, launching the kernels dominates the time of a step of small matrices.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr})
        remaining = [group for group in self.param_groups if not group["muon"]]
        self.adamw = torch.optim.AdamW(remaining, lr, betas, fused=True) if remaining else None
        if self.adamw is not None:
            self.adamw.state = self.state  # keyed by parameter, so the two do not collide

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of both optimizers."""
        for group in self.param_groups:
            if group["muon"]:
                by_shape = defaultdict[torch.Size, list[Tensor]](list)
                for matrix in group["params"]:
                    by_shape[matrix.shape].append(matrix)
                for matrices in by_shape.values():
                    self._muon_step(matrices, group["lr"], group["weight_decay"])
        if self.adamw is not None:
            self.adamw.step()

    def _muon_step(self, matrices: list[Tensor], lr: float, weight_decay: float) -> None:
        """W <- (1 - lr * decay) W - 0.2 lr sqrt(max(h, w)) O, where O is the orthogonalized
        Nesterov momentum. matrices: each (h, w); those without a gradient are not updated."""
        gradients, momenta = list[Tensor](), list[Tensor]()
        matrices = [matrix for matrix in matrices if matrix.grad is not None]
        for matrix in matrices:
            assert matrix.grad is not None
            state = self.state[matrix]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(matrix)
            gradients.append(matrix.grad)
            momenta.append(state["momentum_buffer"].lerp_(matrix.grad, 1 - _MOMENTUM))
        if not matrices:
            return
        updates = orthogonalize(torch.stack(gradients).lerp(torch.stack(momenta), _MOMENTUM))
        step_size = 0.2 * lr * math.sqrt(max(matrices[0].shape))
        for matrix, update in zip(matrices, updates.unbind(), strict=True):
            matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-step_size)


_MOMENTUM = 0.95


def orthogonalize(matrices: Tensor) -> Tensor:
    """Move the singular values of matrices (n, h, w) close to 1, by five Newton-Schulz iterations
    (https://kellerjordan.github.io/posts/muon/). In bf16, or in float32 where bf16 is emulated: a
    step of ViT-Ti on a CPU would take six times as long."""
    height, width = matrices.shape[1:]
    x = matrices.bfloat16() if multiplies_bf16(matrices.device) else matrices
    x = x.mT if height > width else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if height > width else x


class MovingAverage(AveragedModel):
    """An exponential moving average of a model's parameters; frozen ones are shared, not copied.

    In every step, torch's `update_parameters` moves its update count to the device, for which the
    CPU waits until the GPU is idle.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        average_fn = get_ema_multi_avg_fn(decay)
        super().__init__(model, multi_avg_fn=average_fn)
        self.average_fn = average_fn
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                parent, _, attribute = name.rpartition(".")
                setattr(self.module.get_submodule(parent), attribute, parameter)

    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's parameters; the first call copies them."""
        if self.n_averaged == 0:
            super().update_parameters(model)
            return
        pairs = zip(self.module.parameters(), model.parameters(), strict=True)
        trained = [(avg.detach(), p.detach()) for avg, p in pairs if p.requires_grad]
        self.average_fn([avg for avg, _ in trained], [p for _, p in trained], self.n_averaged)
        self.n_averaged += 1


class Optimizer(NamedTuple):
    """A choice of `TrainConfig.optimizer`."""

    factory: Callable[..., torch.optim.Optimizer]
    arguments: Callable[[TrainConfig], dict[str, Any]]
    """Arguments besides parameters, learning rate and weight decay."""
    default_lr: dict[str, float]
    """Default peak learning rate of each task."""


_ADAM_LR = {"pretrain": 1e-3, "finetune": 1e-4}
OPTIMIZERS = {
    "sgd": Optimizer(
        torch.optim.SGD, lambda c: {"momentum": c.momentum}, {"pretrain": 0.01, "finetune": 0.01}
    ),
    "adam": Optimizer(torch.optim.Adam, lambda c: {"betas": c.betas, "fused": True}, _ADAM_LR),
    "adamw": Optimizer(torch.optim.AdamW, lambda c: {"betas": c.betas, "fused": True}, _ADAM_LR),
    "muon": Optimizer(MuonAdamW, lambda c: {"betas": c.betas}, _ADAM_LR),
}


class Layers:
    """Maps parameter names to layers, for a ViT, a hybrid or a BiT ResNet, or for an objective
    whose `model` is one."""

    def __init__(self, model: nn.Module) -> None:
        names = (name.removeprefix("model.") for name, _ in model.named_parameters())
        blocks = map(_BLOCK.match, names)
        self.blocks = list(dict.fromkeys(match[0] for match in blocks if match))

    def __call__(self, name: str) -> int:
        """Return the layer of a parameter or of a module without children, given its full name."""
        name = name.removeprefix("model.")
        block = _BLOCK.match(name)
        if block:
            return self.blocks.index(block[0]) + 1
        top = name.partition(".")[0]
        if top == "norm":
            return len(self.blocks)
        return len(self.blocks) + 1 if top in _HEAD | _AFTER_NORM else 0

    def scale(self, name: str, decay: float) -> float:
        """Return the learning-rate factor of layer l of n + 1: decay^(n + 1 - l), so 1 for the head
        (BEiT, arXiv 2106.08254; `LayerDecayValueAssigner` of its optim_factory.py)."""
        return decay ** (len(self.blocks) + 1 - self(name))

    def is_frozen(self, name: str, setting: int | str) -> bool:
        """Whether `TrainConfig.freeze` freezes a parameter or module."""
        top = name.removeprefix("model.").partition(".")[0]
        if setting == "backbone":
            return not top.startswith("head")
        return self(name) <= int(setting) and top != "norm"


def freeze(model: nn.Module, setting: int | str | None) -> None:
    """Freeze the lower part of a model. No gradients are computed below the lowest trained
    parameter.

    Args:
        setting: "backbone": all but the head; N: the stem and the first N blocks; None: nothing.

    Raises:
        ConfigError: the model has fewer than N blocks.
    """
    if setting is None:
        return
    layers = Layers(model)
    if isinstance(setting, int) and setting > len(layers.blocks):
        depth = len(layers.blocks)
        raise ConfigError(
            f"--freeze {setting}: the model has only {depth} blocks",
            hint=f"use at most --freeze {depth}, or --freeze backbone",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not layers.is_frozen(name, setting))


def set_training(model: nn.Module, setting: int | str | None) -> None:
    """Set training mode, except for frozen modules, whose dropout would only add noise."""
    model.train()
    if setting is None:
        return
    layers = Layers(model)
    for name, module in model.named_modules():
        if not any(module.children()) and layers.is_frozen(name, setting):
            module.eval()


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the trained parameters. Weight decay applies to matrices and kernels
    only, not to biases, norms, tokens and position embeddings (like big_vision's `.*/kernel`
    masks). Each group has an "lr_scale", below 1 in lower layers if `layer_decay` is set; "muon"
    marks groups of block matrices.

    AdamW subtracts lr(t) * decay * w from w. With `decay_by="schedule"`, lr(t) / lr * decay * w is
    subtracted, as in big_vision (optax.py): AdamW gets the decay divided by the peak rate.
    """
    layers, layer_decay = Layers(model), config.layer_decay
    matrix_decay = config.weight_decay
    if config.decay_by == "schedule":
        matrix_decay /= config.lr or 1.0
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = parameter.ndim >= 2 and name.endswith("weight")
            weight_decay = matrix_decay if is_matrix else 0.0
            scale = layers.scale(name, layer_decay) if layer_decay is not None else 1.0
            muon = is_matrix and parameter.ndim == 2 and 1 <= layers(name) <= len(layers.blocks)
            groups.setdefault((weight_decay, scale, muon), []).append(parameter)
    param_groups = [
        {"params": parameters, "weight_decay": weight_decay, "lr_scale": scale, "muon": muon}
        for (weight_decay, scale, muon), parameters in groups.items()
    ]
    optimizer = OPTIMIZERS[config.optimizer]
    return optimizer.factory(param_groups, lr=config.lr or 0.0, **optimizer.arguments(config))


def build_scaler(
    optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype
) -> torch.amp.GradScaler:
    """Build the loss scaler, which is enabled for fp16."""
    if device.type == "mps":
        # The scaler skips steps that overflow; fused optimizers do not (pytorch PR 186360).
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of step 1, 2, ..., `config.steps`: a linear warm-up, then a decay
    that reaches 0 after the last step, so that every step trains (vit_jax counts from step 0:
    vit_jax/utils.py `create_learning_rate_schedule`)."""
    peak, steps, warmup = config.lr or 0.0, config.steps or 1, config.warmup or 0
    progress = max(step - 1 - warmup, 0) / max(steps - warmup, 1)
    decay = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
    }[config.schedule]
    return peak * decay * (min(1.0, step / warmup) if warmup else 1.0)
