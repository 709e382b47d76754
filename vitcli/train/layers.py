"""Which layer a part of a model belongs to: for learning rates by depth, and for freezing.

Layer 0 is the stem: patch embedding, tokens, position embeddings. Layers 1 to n are the blocks,
layer n + 1 is the head with all that comes behind the final norm. The final norm counts with the
last block, as in timm (`timm/optim/_param_groups.py`).
"""

from __future__ import annotations

import re

from torch import nn

from vitcli.errors import ConfigError

_BLOCK = re.compile(r"(?:stages\.\d+\.)?blocks\.\d+\.")
_HEAD = {"head", "head_dist", "drop"}
_BEHIND_NORM = {"attn_pool", "fc_norm", "pre_logits"}


class Layers:
    """The layers of a ViT, a hybrid or a BiT ResNet, by the names of its parts."""

    def __init__(self, model: nn.Module) -> None:
        blocks = (_BLOCK.match(name) for name, _ in model.named_parameters())
        self.blocks = list(dict.fromkeys(match[0] for match in blocks if match))

    def __call__(self, name: str) -> int:
        """The layer of a parameter or of a module without children, by its full name."""
        block = _BLOCK.match(name)
        if block:
            return self.blocks.index(block[0]) + 1
        top = name.partition(".")[0]
        if top == "norm":
            return len(self.blocks)
        return len(self.blocks) + 1 if top in _HEAD | _BEHIND_NORM else 0

    def scale(self, name: str, decay: float) -> float:
        """The factor on the learning rate of layer l of n + 1: decay^(n + 1 - l), so 1 for the
        head (BEiT, arXiv 2106.08254; `LayerDecayValueAssigner` of its optim_factory.py)."""
        return decay ** (len(self.blocks) + 1 - self(name))


def freeze(model: nn.Module, what: int | str | None) -> None:
    """Stops the training of a model's lower part; what comes before all that is trained is not
    differentiated at all.

    Args:
        what: "backbone": all but the head; N: the stem and the first N blocks; None: nothing.

    Raises:
        ConfigError: there are not so many blocks.
    """
    if what is None:
        return
    layers = Layers(model)
    count = len(layers.blocks)
    if isinstance(what, int) and what > count:
        raise ConfigError(f"cannot freeze {what} blocks: the model has {count}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not _is_frozen(name, layers, what))


def set_training(model: nn.Module, what: int | str | None) -> None:
    """Training mode, but for what is frozen: its dropout would only be noise."""
    model.train()
    if what is None:
        return
    layers = Layers(model)
    for name, module in model.named_modules():
        if not any(module.children()) and _is_frozen(name, layers, what):
            module.eval()


def _is_frozen(name: str, layers: Layers, what: int | str) -> bool:
    top = name.partition(".")[0]
    if what == "backbone":
        return top not in _HEAD
    return layers(name) <= int(what) and top != "norm"
