"""The description of a checkpoint: its model, preprocessing, classes and provenance."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import (
    Architecture,
    BiTConfig,
    ClassLabel,
    ModelConfig,
    PosembMethod,
    Preprocess,
    Score,
)
from vitcli.errors import CheckpointError, ConfigError, warn
from vitcli.typed_json import from_json, parse

if TYPE_CHECKING:
    from vitcli.hub.registry import RegistryEntry

Resized = TypedDict(
    "Resized", {"method": PosembMethod, "from": tuple[int, int], "to": tuple[int, int]}
)
"""A resize of position embeddings, between grids of (rows, columns)."""


class Run(TypedDict, total=False):
    """A run that produced a checkpoint."""

    made_by: str
    """Command and versions."""
    command: str
    """The command line as typed."""
    data: str
    """Name of the dataset."""
    dataset: str
    """Its repo, if it is on the Hub."""
    train_images: int
    parent: str
    """The checkpoint it started from."""
    teacher: str
    """The model that it was distilled from."""
    seed: int
    steps: int
    seconds: float


class Provenance(Run, total=False):
    """Where a checkpoint comes from. Other keys may hold any JSON."""

    history: list[Run]
    """Earlier runs, oldest first."""
    metrics: dict[str, float | None]
    """Metrics of the stored weights, such as {"val_top1": 0.93}."""
    note: str
    ema: float
    """Decay of the moving average of the weights."""
    store: Literal["last"]
    """Present if the weights are the run's last, not the best on the validation split."""
    posemb_resize: Resized
    input_size: tuple[int, int]
    """Size of the images that transformers passes to the model, which interpolates its position
    embeddings to match."""
    given: str
    """What the user of a conversion specified and the file does not: architecture, heads."""
    average_of: list[str]
    """The models whose weights were averaged."""
    converted_from: str
    """Name of the source's layout."""
    timm: dict[str, Any]
    """timm's names for the architecture and the pre-training, if a release states them."""
    assumed: dict[str, str]
    """What was assumed because the file does not state it: field name, such as "num_heads" -> text.
    """
    left_out: list[str]
    """Tensors that follow our output in the original model, such as projections, or a head beside
    a backbone."""
    took: list[str]
    """Which weights were chosen from a file with several models."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Everything in a checkpoint besides its tensors.

    Raises:
        ConfigError: the sizes of `preprocess` and a ViT differ.
    """

    model: Architecture
    preprocess: Preprocess
    classes: tuple[ClassLabel, ...] = ()
    """In the order of the head's outputs; empty if unknown."""
    score: Score = "softmax"
    """The function from logits to scores: softmax, or sigmoid for multi-label models."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """JSON values; see `Provenance`."""

    def __post_init__(self) -> None:
        size, image_size = self.preprocess.size, self.model.image_size
        if size != image_size and isinstance(self.model, ModelConfig):
            raise ConfigError(f"preprocess.size {size} is not the model's image_size {image_size}")

    def with_preprocess(self, fields: Mapping[str, Any]) -> CheckpointInfo:
        """Return a copy with some preprocessing fields replaced.

        Raises:
            ConfigError: a value is invalid, or a size that does not fit the position embeddings.
        """
        old, model = self.preprocess, self.model
        try:
            new: Preprocess = from_json(Preprocess, dataclasses.asdict(old) | dict(fields))
        except (ValueError, ConfigError) as error:
            raise ConfigError(f"the preprocessing cannot be changed: {error}") from error
        if new.size != model.image_size and "size" in fields:
            if model.posemb_tables:
                (height, width), size = model.image_size, "x".join(map(str, new.size))
                raise ConfigError(
                    f"size={size}: the position embeddings are for images of {height} x {width} "
                    "pixels",
                    hint=f"resize them with `vit resize-posemb CHECKPOINT --resolution {size}`",
                )
            model = model.with_image_size(new.size)
        return dataclasses.replace(self, model=model, preprocess=new)

    def require_head(self, where: object, hint: str) -> None:
        """Raise ConfigError if the model has no classification head."""
        if not self.model.num_classes:
            raise ConfigError("the model has no classification head", where=where, hint=hint)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values that `from_dict` reads."""
        return {
            "version": 1,
            "model": _without_defaults(self.model),
            "preprocess": dataclasses.asdict(self.preprocess),
            "classes": [list(label) for label in self.classes],
            "score": self.score,
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: Any, where: object = None) -> CheckpointInfo:
        """Parse what `to_dict` returns, or its JSON. Raises CheckpointError if it is invalid."""
        try:
            data = parse(data) if isinstance(data, str) else data
            if data["version"] != 1:
                raise CheckpointError(
                    f"written by a newer version of vit (layout {data['version']!r:.40})",
                    where=where,
                    hint="upgrade vit",
                )
            model_class = BiTConfig if "resnet" in data["model"] else ModelConfig
            classes = tuple(ClassLabel(id, name) for id, name in data["classes"])
            if not all(isinstance(word, str) for label in classes for word in label):
                raise ValueError("classes: an id or a name is not a string")
            from_json(Provenance, data["provenance"])  # checks the types; values stay as they are
            info = cls(
                model=from_json(model_class, data["model"]),
                preprocess=from_json(Preprocess, data["preprocess"]),
                classes=classes,
                score=from_json(Score, data["score"]),
                provenance=data["provenance"],
            )
            if classes and len(classes) != info.model.num_classes:
                raise ValueError(f"{len(classes)} class names for {info.model.num_classes} outputs")
            return info
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"the model description cannot be read: {reason}",
                where=where,
                hint="if a newer version of vit wrote it, upgrade vit; otherwise it is damaged",
            ) from error

    def to_metadata(self) -> dict[str, str]:
        """Metadata for the header of a safetensors file; transformers requires "format"."""
        description = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False)
        return {"format": "pt", "vit": description}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], where: object = None
    ) -> CheckpointInfo | None:
        """Parse the metadata of a safetensors header; None if it has no description by vit.

        Raises:
            CheckpointError: the description cannot be read.
        """
        return cls.from_dict(metadata["vit"], where) if "vit" in metadata else None


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its description, and its tensors, which are read on demand."""

    file: Path
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """By our names."""
    kind: str
    """The kind of file; see `Store.kind`."""
    layout: str = "vit"
    """"vit" (timm's names), or one of `layouts`."""
    dropped: tuple[str, ...] = ()
    """Names of tensors in the file that are not part of the model."""
    entry: RegistryEntry | None = None
    """The registry entry, if this is a released model."""


def _without_defaults(config: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, so that an earlier version of vit can read the
    model unless it has a feature that the version does not support."""
    values = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if value != entry.default:
            nested = dataclasses.is_dataclass(value)
            values[entry.name] = _without_defaults(value) if nested else value
    return values


def assumptions_text(info: CheckpointInfo) -> str | None:
    """A message about what was assumed about a model; None if nothing was."""
    assumed = ", ".join(info.provenance.get("assumed", {}).values())
    return f"assuming {assumed}, which the checkpoint does not specify" if assumed else None


def warn_of_assumptions(info: CheckpointInfo, name: object) -> None:
    """Warn of what was assumed about the model `name`, if anything."""
    if assumed := assumptions_text(info):
        warn(assumed, name)


def warn_of_left_out(info: CheckpointInfo, name: object) -> None:
    """Warn if outputs of the original model `name` went through a projection or a head, which ours
    lacks."""
    if left_out := info.provenance.get("left_out"):
        warn(f"not part of the model, so left out: {', '.join(left_out)}", name)


def resize_text(resize: Mapping[str, Any]) -> str:
    """How position embeddings were resized: "from 8 x 8 to 10 x 10 (bilinear)"."""
    grids = [f"{key} {{}} x {{}} ".format(*resize[key]) for key in ("from", "to") if key in resize]
    return f"{''.join(grids)}({resize['method']})"


def unique_names(classes: tuple[ClassLabel, ...]) -> list[str]:
    """Names to display; a name shared by several classes is followed by the class id."""
    counts = Counter(label.name for label in classes)
    return [
        label.name if counts[label.name] == 1 else f"{label.name} ({label.id})" for label in classes
    ]


def ancestry(start: CheckpointInfo, name: str) -> dict[str, Any]:
    """Provenance of a model that was initialized from `start`, which is called `name`."""
    run = {key: start.provenance[key] for key in Run.__annotations__ if key in start.provenance}
    history = [*start.provenance.get("history", []), *([run] * bool(run))]
    return {"parent": stored_name(name), "history": history}


def stored_name(model: str) -> str:
    """The name of a model in another's provenance: the last component of a path, else `model`."""
    return Path(model).name if os.path.exists(os.path.expanduser(model)) else model
