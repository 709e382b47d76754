"""The layouts that are supported: one line each. A file is in the first that recognises it."""

from __future__ import annotations

from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Architecture, BiTConfig
from vitcli.errors import CheckpointError
from vitcli.layouts import transformers
from vitcli.layouts.big_vision import BigVision
from vitcli.layouts.bit import Bit
from vitcli.layouts.layout import Layout, Match
from vitcli.layouts.open_clip import OpenClip
from vitcli.layouts.timm import Timm
from vitcli.layouts.torchvision import Torchvision
from vitcli.layouts.vit_jax import VitJax

LAYOUTS: list[Layout] = [
    OpenClip(),
    Timm(),
    transformers.Transformers(),
    VitJax(),
    Bit(),
    BigVision(),
    Torchvision(),
]

Format = str
"""The name of a layout that can be written: one of `formats()`."""
OURS: Format = "vit"
"""As a target: timm's layout, with our own description in it."""


def recognise(store: Store) -> tuple[Layout, Match]:
    """The layout of a file, and what it holds.

    Raises:
        CheckpointError: it is in none, or cannot be read.
    """
    for layout in LAYOUTS:
        if (match := layout.find(store)) is not None:
            return layout, match
    transformers.read_config(store.path.parent)  # which may name an unsupported model
    known = ", ".join(sorted(layout.name for layout in LAYOUTS))
    raise CheckpointError(
        "not a Vision Transformer or BiT ResNet in a supported layout",
        where=store.path,
        hint=f"supported layouts: {known}",
    )


def layout_of(name: str) -> Layout:
    """The layout of that name; "vit" is timm's."""
    return next(layout for layout in LAYOUTS if layout.name == ("timm" if name == OURS else name))


def formats() -> list[str]:
    """The layouts that can be written."""
    return [OURS, *(la.name for la in LAYOUTS if la.suffixes and la.name != "timm")]


def default_format(model: Architecture, suffix: str) -> str:
    """The layout of an output for which none is given: ours, or of npz files the authors'."""
    if suffix != ".npz":
        return OURS
    return "bit-npz" if isinstance(model, BiTConfig) else "vit-npz"


def companions() -> list[str]:
    """Names of every layout's configuration files, each once."""
    return list(dict.fromkeys(name for layout in LAYOUTS for name in layout.companions))
