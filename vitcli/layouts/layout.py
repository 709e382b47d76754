"""The base class of layouts: how their files are recognized, read and written.

Each layout is a subclass in its own module, and a line in `catalog.py`.
"""

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.tensor_file import LazyTensor, Store, zeros_like
from vitcli.config import Architecture, BiTConfig, ClassLabel, Preprocess, Score, Size
from vitcli.errors import OutputError
from vitcli.layouts import table
from vitcli.layouts.foreign_json import ForeignJson
from vitcli.layouts.shapes import join_names
from vitcli.layouts.table import Row
from vitcli.words import format_setting

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Common means and standard deviations."""


@dataclass(frozen=True)
class Match:
    """A file recognized by a layout: its table of names, and what is known about the model beyond
    the shapes of its tensors."""

    rows: tuple[Row, ...]
    tensors: Mapping[str, LazyTensor]
    """The model's tensors by the table's names: without prefix, stacked blocks split. The file's
    other tensors, such as a text tower's or an optimizer's, are dropped."""
    droppable: str = r"$^"
    """A regex for names in `tensors` that may be dropped."""
    fields: dict[str, Any] = field(default_factory=dict)
    """`ModelConfig` fields from the configuration, or hard-coded by the model's authors."""
    resnet: dict[str, Any] = field(default_factory=dict)
    """`ResNetConfig` fields, likewise."""
    assumed: frozenset[str] = frozenset()
    """Facts that are assumed even if they are in `fields`."""
    known: frozenset[str] = frozenset({"pool"})
    """Facts that are the same for every model in the layout."""
    posemb_tokens: tuple[str, ...] = ()
    """Which tokens may have a position embedding, most likely first; (): decided by shapes."""
    info: CheckpointInfo | None = None
    """The complete description, if the configuration contains one."""
    preprocess: Preprocess | None = None
    """From a configuration; its size is replaced by the model's."""
    default: Preprocess = Preprocess(mean=IMAGENET[0], std=IMAGENET[1], crop_pct=0.875)
    """The authors' preprocessing, used without a configuration; its size is ignored."""
    input_size: Size | None = None
    """The size of the images that the layout's library feeds the model, if not the model's own."""
    classes: tuple[ClassLabel, ...] = ()
    score: Score | None = None


class Layout(ABC):
    """A checkpoint layout. One that can also be written overrides what is below `find`."""

    name: ClassVar[str]
    config_files: ClassVar[tuple[str, ...]] = ()
    """Configuration files stored next to the weights."""
    library: ClassVar[str | None] = None
    """The Python package that reads the layout, which `--verify` compares with."""
    projections: ClassVar[str] = r"^(module\.|model\.)*(head|classifier|fc)\.(weight|bias)$"
    """A regex for projections of the model's output, and heads beside its backbone, which are
    dropped with a warning."""

    @abstractmethod
    def find(self, store: Store) -> Match | None:
        """Match a file; None if it is not in this layout.

        Raises:
            CheckpointError: it is in this layout but cannot be read.
        """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of output files, "" for a directory; empty: the layout is read-only."""

    def unsupported(self, model: Architecture) -> list[str]:
        """List what the layout cannot express about a model; empty if it can be written."""
        return [f"the {self.name} layout is not written"]

    def warnings(self, info: CheckpointInfo) -> list[str]:
        """List what programs that read the layout compute differently."""
        return []

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        """Return the table for writing a model."""
        raise NotImplementedError

    def computed(self, model: Architecture) -> dict[str, Any]:
        """Return arrays, by our names, that are not stored because readers compute them."""
        return {}

    def extra(self, model: Architecture, dtype: str) -> dict[str, LazyTensor]:
        """Return tensors that readers require but our model lacks."""
        return {}

    def save(
        self, model: Architecture, tensors: Mapping[str, LazyTensor]
    ) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
        """Return a model's tensors in this layout, and a mapping from our names to theirs (() for a
        tensor that readers compute).

        Raises:
            OutputError: a tensor cannot be stored, or is not what readers compute.
        """
        saved: dict[str, LazyTensor] = {}
        their_names: dict[str, tuple[str, ...]] = {}
        for name, array in self.computed(model).items():
            if not (tensors[name].read() == array).all():
                raise OutputError(
                    f"{name} would be computed differently by readers of the {self.name} layout"
                )
            their_names[name] = ()
        for row in table.expand(self.rows(model), model.depth):
            if set(row.ours) <= tensors.keys() - their_names.keys():
                saved |= table.save(row, tensors, getattr(model, "num_heads", 1))
                their_names |= dict.fromkeys(row.ours, row.theirs)
        dtypes = [tensor.dtype for tensor in tensors.values()]
        saved |= self.extra(model, dtypes[0] if dtypes else "float32")
        if unsaved := tensors.keys() - their_names.keys():
            raise OutputError(f"the {self.name} layout cannot store {join_names(sorted(unsaved))}")
        return saved, their_names

    def metadata(self, info: CheckpointInfo) -> Mapping[str, str]:
        """Return the metadata of the output file."""
        return {"format": "pt"}

    def configs(self, info: CheckpointInfo) -> dict[str, dict[str, Any]]:
        """Return the configuration files: name -> contents."""
        return {}

    def resized_config(
        self, name: str, config: ForeignJson, info: CheckpointInfo
    ) -> dict[str, Any] | None:
        """Update a configuration file for the new image size; None for another layout's file."""
        return None


_KEY_BIASES = {"q_bias": "k_bias", "q_proj.bias": "k_proj.bias", "query.bias": "key.bias"}
"""Suffix of a query bias -> suffix of the key bias."""


def with_key_biases(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Add zeros as the key bias wherever queries have a bias and keys have none."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        for query, key in _KEY_BIASES.items():
            if name.endswith(query):
                result.setdefault(name.removesuffix(query) + key, zeros_like(tensor))
    return result


# ---------------------------------------------------------------------------------------------
# Recognition

_AVERAGED = re.compile(r"(^|[._/])(ema|teacher|target_encoder)([._/]|$)")
_OPTIMIZER_STATE = re.compile(r"^(opt|optimizer|opt_state)/(?!target/)|(^|/)(state|mu|nu)/")


def find_prefix(names: Iterable[str], anchor: str, second_anchor: str = "") -> str | None:
    """Find the prefix of the anchors in a file's names; None if they are missing. Averaged weights
    take precedence over the student's, and a model over optimizer state."""
    names = set(names)
    prefixes = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    prefixes = [p for p in prefixes if p + second_anchor in names] if second_anchor else prefixes

    def rank(prefix: str) -> tuple[bool, bool, int, str]:
        is_optimizer, is_averaged = _OPTIMIZER_STATE.search(prefix), _AVERAGED.search(prefix)
        return bool(is_optimizer), not is_averaged, len(prefix), prefix

    return min(prefixes, key=rank, default=None)


def tensors_under(
    store: Store, prefix: str, pattern: str = "", replacement: str = ""
) -> dict[str, LazyTensor]:
    """Return the tensors under a prefix, by the rest of their names, with `pattern` replaced by
    `replacement`."""
    return {
        re.sub(pattern, replacement, name.removeprefix(prefix)): tensor
        for name, tensor in store.tensors.items()
        if name.startswith(prefix)
    }


# ---------------------------------------------------------------------------------------------
# What a layout can express

SIZES = {"width", "depth", "num_heads", "mlp_dim", "patch_size", "image_size", "num_classes"}
SIZES |= {"depths", "width_factor"}
"""Fields of a model and its ResNet that every layout can express, with any value."""


def unsupported_fields(config: Any, **expressible: Collection[Any] | None) -> list[str]:
    """List what a layout cannot express about a ViT or a ResNet, as in "pool=gap". A field that is
    not in `expressible` must have its default, so that a new field, or a new value, is refused
    until a layout defines how it is written.

    Args:
        expressible: field -> values that the layout can express; None: any.
    """
    unsupported = []
    for entry in dataclasses.fields(config):
        name, value = entry.name, getattr(config, entry.name)
        allowed = expressible.get(name, (entry.default,))
        if name in SIZES or allowed is None or value in allowed:
            continue
        if name == "posemb_tokens" and (config.posemb == "none" or not config.num_prefix_tokens):
            continue
        unsupported.append("a ResNet stem" if name == "stem" else format_setting(name, value))
    return unsupported


def unsupported_bit_fields(model: BiTConfig, pool_padding: str) -> list[str]:
    """List what a layout with this padding of the max-pool cannot express about a BiT ResNet."""
    return unsupported_fields(
        model.resnet,
        preact=None,
        padding=("symmetric",),
        pool_padding=(pool_padding,),
        std_eps=None,
        std_eps_in=None,
        norm_eps=None,
    )
