"""The supported layouts, in order of precedence: a file is in the first that recognizes it."""

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
"""The name of a writable layout: one of `formats()`."""
OURS: Format = "vit"
"""As an output format: timm's layout, with our own description included."""


def recognize(store: Store) -> tuple[Layout, Match]:
    """Return the layout that recognizes a file, and its match.

    Raises:
        CheckpointError: no layout recognizes it, or it cannot be read.
    """
    for layout in LAYOUTS:
        if (match := layout.find(store)) is not None:
            return layout, match
    transformers.read_config(store.path.parent)  # which may name an unsupported model
    supported = ", ".join(sorted(layout.name for layout in LAYOUTS))
    raise CheckpointError(
        "not a Vision Transformer or BiT ResNet in a supported layout",
        where=store.path,
        hint=f"supported layouts: {supported}",
    )


def layout_of(name: str) -> Layout:
    """Return the layout with this name; "vit" means timm's."""
    return next(layout for layout in LAYOUTS if layout.name == ("timm" if name == OURS else name))


def formats() -> list[str]:
    """Return the names of the layouts that can be written."""
    return [OURS, *(layout.name for layout in LAYOUTS if layout.suffixes and layout.name != "timm")]


def default_format(model: Architecture, suffix: str) -> str:
    """Return the default layout for an output: ours, or for npz files the original authors'."""
    if suffix != ".npz":
        return OURS
    return "bit-npz" if isinstance(model, BiTConfig) else "vit-npz"


def config_files() -> list[str]:
    """Return the names of all layouts' configuration files, without duplicates."""
    return list(dict.fromkeys(name for layout in LAYOUTS for name in layout.config_files))
