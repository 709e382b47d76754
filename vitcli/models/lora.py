"""LoRA: low-rank updates, which are trained instead of the weight matrices (Hu et al., arXiv
2106.09685)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitcli.errors import ConfigError
from vitcli.models.linear import Linear

_DOWN, _UP = ".lora.down.weight", ".lora.up.weight"


class LowRank(nn.Module):
    """An update of a linear layer's matrix, (out, rank) times (rank, in)."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        update: Tensor = self.up(self.down(x))
        return update


def add_lora(model: nn.Module, rank: int, seed: int) -> None:
    """Add an update of this rank to every weight matrix of the blocks, and freeze everything else
    except the head. The updates are initially zero: one factor is, the other is initialized like
    a linear layer of PyTorch, as in the authors' code (loralib/layers.py).

    Raises:
        ConfigError: the model has no Transformer blocks, or a matrix of that rank or less.
    """
    modules = (module for name, module in model.named_modules() if name.startswith("blocks."))
    layers = [module for module in modules if isinstance(module, Linear)]
    full_rank = min((min(layer.weight.shape) for layer in layers), default=0)
    if not full_rank:
        raise ConfigError("--lora requires a model with Transformer blocks, not a BiT ResNet")
    if rank >= full_rank:
        raise ConfigError(
            f"--lora {rank}: the rank of the weight matrices is {full_rank}",
            hint="use a lower rank, such as --lora 8, or leave out --lora",
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head"))
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.lora = update = LowRank(layer.in_features, layer.out_features, rank)
        nn.init.kaiming_uniform_(update.down.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(update.up.weight)


def merge_lora(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict with updates merged into the matrices, as of a model without LoRA."""
    merged = {name: tensor for name, tensor in state.items() if ".lora." not in name}
    for name, up in state.items():
        if name.endswith(_UP):
            layer = name.removesuffix(_UP)
            merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + up @ state[layer + _DOWN]
    return merged
