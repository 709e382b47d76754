"""What a layout is: how its files are recognised, read and written.

Each layout is an object in a module of its own, and a line in `catalogue.py`.
"""

from __future__ import annotations

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
from vitcli.layouts.table import Row
from vitcli.words import setting

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and standard deviations in use."""


@dataclass(frozen=True)
class Match:
    """A file that a layout has recognised: its table of names, and what is known about the model
    apart from the shapes of its tensors."""

    rows: tuple[Row, ...]
    tensors: Mapping[str, LazyTensor]
    """The model's tensors under the table's names: without prefix, stacked blocks unstacked."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The file's own names of tensors that have another there."""
    outside: tuple[str, ...] = ()
    """Names of other tensors in the file: of a text tower, an optimizer."""
    droppable: str = r"$^"
    """A pattern of names that may be left out."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of ModelConfig from the configuration, or that the makers take for granted."""
    resnet: dict[str, Any] = field(default_factory=dict)
    """Fields of ResNetConfig, likewise."""
    assumed: frozenset[str] = frozenset()
    """Fields that are assumed although they are in `fields`."""
    known: frozenset[str] = frozenset({"pool"})
    """Facts that are the same in every model of the layout."""
    posemb_tokens: tuple[str, ...] = ()
    """Which tokens may have a position embedding, the likeliest first; (): decided by shapes."""
    info: CheckpointInfo | None = None
    """The whole description, if the configuration contains one."""
    preprocess: Preprocess | None = None
    """From a configuration; its size is replaced by the model's."""
    default: Preprocess = Preprocess(mean=IMAGENET[0], std=IMAGENET[1], crop_pct=0.875)
    """How the makers prepare images, used without a configuration; of any size."""
    input_size: Size | None = None
    """Of the images that the layout's program gives the model, where these are not the model's."""
    classes: tuple[ClassLabel, ...] = ()
    score: Score | None = None


class Layout(ABC):
    """A layout of checkpoints. A layout that is also written overrides what is below `find`."""

    name: ClassVar[str]
    companions: ClassVar[tuple[str, ...]] = ()
    """Configuration files that stand beside the weights."""
    library: ClassVar[str | None] = None
    """The Python package that reads it; `--verify` compares with it."""
    projections: ClassVar[str] = r"$^"
    """A pattern of tensors that follow the model's output and are left out."""

    @abstractmethod
    def find(self, store: Store) -> Match | None:
        """What the file holds; None if it is not in this layout.

        Raises:
            CheckpointError: it is, and cannot be read.
        """

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the files it is written to, "" for a directory; none: it is only read."""

    def refusals(self, model: Architecture) -> list[str]:
        """What the layout cannot express about a model; empty if it can be written."""
        return [f"the layout {self.name} is not written"]

    def warnings(self, info: CheckpointInfo) -> list[str]:
        """What programs that read the layout compute differently."""
        return []

    def rows(self, model: Architecture) -> tuple[Row, ...]:
        """The table by which a model is written."""
        raise NotImplementedError

    def computed(self, model: Architecture) -> dict[str, Any]:
        """Arrays, by our names, that are not stored because readers compute them."""
        return {}

    def extra(self, model: Architecture, dtype: str) -> dict[str, LazyTensor]:
        """Tensors that readers need and our model does not have."""
        return {}

    def save(
        self, model: Architecture, tensors: Mapping[str, LazyTensor]
    ) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
        """A model's tensors in this layout, and their names by ours (none where readers compute a
        tensor).

        Raises:
            OutputError: a tensor has no place, or is not what readers compute.
        """
        saved: dict[str, LazyTensor] = {}
        renamed: dict[str, tuple[str, ...]] = {}
        for name, array in self.computed(model).items():
            if not (tensors[name].read() == array).all():
                raise OutputError(
                    f"{name} would be computed differently by readers of the layout {self.name}"
                )
            renamed[name] = ()
        for row in table.expand(self.rows(model), model.depth):
            if set(row.ours) <= tensors.keys() - renamed.keys():
                saved |= table.save(row, tensors, getattr(model, "num_heads", 1))
                renamed |= dict.fromkeys(row.ours, row.theirs)
        saved |= self.extra(model, next(iter(tensors.values())).dtype)
        if left := tensors.keys() - renamed.keys():
            names = ", ".join(sorted(left))
            raise OutputError(f"the layout {self.name} cannot store {names}")
        return saved, renamed

    def metadata(self, info: CheckpointInfo) -> Mapping[str, str]:
        """Metadata of a safetensors file."""
        return {"format": "pt"}

    def configs(self, info: CheckpointInfo) -> dict[str, dict[str, Any]]:
        """Names and contents of the configuration files."""
        return {}

    def resized_config(
        self, name: str, config: ForeignJson, info: CheckpointInfo
    ) -> dict[str, Any] | None:
        """A companion for the new image size in `info`; None if it belongs to another layout."""
        return None


_KEY_BIASES = {"q_bias": "k_bias", "q_proj.bias": "k_proj.bias", "query.bias": "key.bias"}
"""The ends of a bias of queries, and of that of keys."""


def with_key_biases(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """With the zeros that biases of keys are where queries have one and keys have none."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        for query, key in _KEY_BIASES.items():
            if name.endswith(query):
                found.setdefault(name.removesuffix(query) + key, zeros_like(tensor))
    return found


# ---------------------------------------------------------------------------------------------
# Recognising

_AVERAGED = re.compile(r"(^|[._/])(ema|teacher|target_encoder)([._/]|$)")
_SLOTS = re.compile(r"^(opt|optimizer|opt_state)/(?!target/)|(^|/)(state|mu|nu)/")


def find_prefix(names: Iterable[str], anchor: str, other: str = "") -> str | None:
    """What stands before the anchor (and `other`) in a file's names; None if they are not there.
    An averaged model comes before its student, and a model before an optimizer's state."""
    names = set(names)
    found = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    found = [prefix for prefix in found if prefix + other in names] if other else found

    def rank(prefix: str) -> tuple[bool, bool, int, str]:
        slots, averaged = _SLOTS.search(prefix), _AVERAGED.search(prefix)
        return bool(slots), not averaged, len(prefix), prefix

    return min(found, key=rank, default=None)


def below(
    store: Store, prefix: str, pattern: str = "", by: str = ""
) -> tuple[dict[str, LazyTensor], dict[str, str], tuple[str, ...]]:
    """The tensors under a prefix, by the rest of their names, in which `by` replaces the pattern;
    the file's own names of these; and the names of all others."""
    inside = [name for name in store.tensors if name.startswith(prefix)]
    names = {re.sub(pattern, by, name.removeprefix(prefix)): name for name in inside}
    tensors = {new: store.tensors[old] for new, old in names.items()}
    return tensors, names, tuple(name for name in store.tensors if not name.startswith(prefix))


# ---------------------------------------------------------------------------------------------
# Expressing

SIZES = {"width", "depth", "num_heads", "mlp_dim", "patch_size", "image_size", "num_classes"}
SIZES |= {"depths", "width_factor"}
"""Fields of a model and of its ResNet that every layout can express, whatever their value."""


def refusals(config: Any, **expressible: Collection[Any] | None) -> list[str]:
    """What a layout cannot express of a ViT or a ResNet, as in "pool=gap". A field that is not
    named has to have its default, so that a new field, or a new value, is refused until a layout
    says how it is written.

    Args:
        expressible: values of a field that the layout can express; None: any.
    """
    found = []
    for entry in dataclasses.fields(config):
        name, value = entry.name, getattr(config, entry.name)
        allowed = expressible.get(name, (entry.default,))
        if name in SIZES or allowed is None or value in allowed:
            continue
        if name == "posemb_tokens" and (config.posemb == "none" or not config.num_prefix_tokens):
            continue
        found.append("a ResNet stem" if name == "stem" else setting(name, value))
    return found


def bit_refusals(model: BiTConfig, pool_padding: str) -> list[str]:
    """What of a BiT ResNet a layout of that border around the max-pool cannot express."""
    return refusals(
        model.resnet,
        preact=None,
        padding=("symmetric",),
        pool_padding=(pool_padding,),
        std_eps=None,
        std_eps_in=None,
        norm_eps=None,
    )
