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
from vitcli.errors import CheckpointError, ConfigError
from vitcli.typed_json import from_json, parse

if TYPE_CHECKING:
    from vitcli.hub.registry import RegistryEntry

Resized = TypedDict(
    "Resized", {"method": PosembMethod, "from": tuple[int, int], "to": tuple[int, int]}
)
"""How position embeddings were resized, from and to a grid of (rows, columns)."""


class Run(TypedDict, total=False):
    """One run that made a checkpoint."""

    made_by: str
    """Command and versions."""
    command: str
    """As it was typed."""
    data: str
    """Name of the dataset."""
    train_images: int
    parent: str
    """The checkpoint it started from."""
    teacher: str
    """The model whose scores it learnt."""
    seed: int
    steps: int
    seconds: float


class Provenance(Run, total=False):
    """Where a checkpoint comes from. Other keys may hold any JSON."""

    history: list[Run]
    """Earlier runs, oldest first."""
    metrics: dict[str, float | None]
    """Of the stored weights, as in {"val_top1": 0.93}."""
    note: str
    ema: float
    """Decay of the weights' running average."""
    store: Literal["last"]
    """The last weights of the run are stored, not the best on validation."""
    posemb_resize: Resized
    input_size: tuple[int, int]
    """Of the images that transformers gives the model, which interpolates its position embeddings
    for them."""
    given: str
    """What a conversion was given, because the file does not state it: an architecture, heads."""
    average_of: list[str]
    """The models whose mean it is."""
    converted_from: str
    """Name of a layout."""
    timm: dict[str, Any]
    """timm's names of the architecture and of the pre-training, where a release states them."""
    assumed: dict[str, str] | list[str]
    """What the file does not state, and what was assumed. (A list in files of earlier versions.)"""
    left_out: list[str]
    """Tensors behind the output of the original model."""
    took: list[str]
    """What was chosen where a file holds several models."""


RENAMED = {"figures": "metrics", "train_pictures": "train_images", "told": "given"}
"""Keys of provenance in files written by earlier versions, and today's."""


@dataclass(frozen=True)
class CheckpointInfo:
    """All that a checkpoint holds beside its tensors."""

    model: Architecture
    preprocess: Preprocess
    classes: tuple[ClassLabel, ...] = ()
    """In the order of the head's outputs; empty if unknown."""
    score: Score = "softmax"
    """What turns logits into scores: softmax, or sigmoid for models trained on many labels."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """JSON values; see `Provenance`."""

    def prepared(self, fields: Mapping[str, Any]) -> CheckpointInfo:
        """The same model with other values of some fields of its preprocessing.

        Raises:
            ConfigError: a value cannot be, or is a size that the position embeddings do not have.
        """
        old, model = self.preprocess, self.model
        try:
            values = json.loads(json.dumps(dataclasses.asdict(old) | dict(fields)))
            new: Preprocess = from_json(Preprocess, values)
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(f"the preprocessing cannot be changed: {error}") from error
        if new.size != model.image_size and "size" in fields:
            if model.posemb_tables:
                (height, width), wanted = model.image_size, "x".join(map(str, new.size))
                raise ConfigError(
                    f"size={wanted}: the position embeddings are for images of {height} x {width} "
                    "pixels",
                    hint=f"resize them with `vit resize-posemb CHECKPOINT --resolution {wanted}`",
                )
            model = model.at(new.size)
        return dataclasses.replace(self, model=model, preprocess=new)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; `from_dict` reads it back."""
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
        """Raises CheckpointError unless the JSON is what `to_dict` writes."""
        try:
            if data["version"] != 1:
                raise CheckpointError(
                    f"written by a newer version of vit (layout {data['version']!r:.40})",
                    where=where,
                    hint="upgrade vit",
                )
            kind = BiTConfig if "resnet" in data["model"] else ModelConfig
            classes = tuple(ClassLabel(id, name) for id, name in data["classes"])
            if not all(isinstance(word, str) for label in classes for word in label):
                raise ValueError("classes: an id or a name is not a string")
            info = cls(
                model=from_json(kind, data["model"]),
                preprocess=from_json(Preprocess, data["preprocess"]),
                classes=classes,
                score=from_json(Score, data["score"]),
                provenance=_provenance(data["provenance"]),
            )
            if classes and len(classes) != info.model.num_classes:
                raise ValueError(f"{len(classes)} class names for {info.model.num_classes} outputs")
            return info
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
            raise _unreadable(error, where) from error

    def to_metadata(self) -> dict[str, str]:
        """For the header of a safetensors file; "format" is what transformers looks for."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False)
        return {"format": "pt", "vit": text}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], where: object = None
    ) -> CheckpointInfo | None:
        """None if the header holds no description by vit.

        Raises:
            CheckpointError: it holds one that cannot be read.
        """
        if "vit" not in metadata:
            return None
        try:
            data = parse(metadata["vit"])
        except ValueError as error:
            raise _unreadable(error, where) from error
        return cls.from_dict(data, where)


@dataclass(frozen=True)
class Checkpoint:
    """An open file: its description, and its tensors, each read when it is needed."""

    file: Path
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under our names."""
    sources: Mapping[str, tuple[str, ...]]
    """Our name -> the names in the file; none of a tensor that is computed."""
    kind: str
    """Of the file; see `Store`."""
    layout: str = "vit"
    """"vit" (which is timm's), or one of `layouts`."""
    dropped: tuple[str, ...] = ()
    """Names in the file that are not part of the model."""
    entry: RegistryEntry | None = None
    """The released model that it is, if the registry knows it."""


def _without_defaults(config: Any) -> dict[str, Any]:
    """The fields of a model that do not have their default, so that earlier versions of vit read it
    unless it has a part that they do not know."""
    stated = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if value != entry.default:
            nested = dataclasses.is_dataclass(value)
            stated[entry.name] = _without_defaults(value) if nested else value
    return stated


def _unreadable(error: Exception, where: object) -> CheckpointError:
    reason = f"{error} is missing" if isinstance(error, KeyError) else error
    return CheckpointError(
        f"the model description cannot be read: {reason}",
        where=where,
        hint="if a newer version of vit wrote it, upgrade vit; otherwise it is damaged",
    )


def _provenance(stored: Any) -> dict[str, Any]:
    """Provenance under today's keys, checked by type; what is stored keeps its JSON types."""
    renamed = {RENAMED.get(key, key): value for key, value in stored.items()}
    if "history" in renamed:
        runs = renamed["history"]
        renamed["history"] = [{RENAMED.get(k, k): v for k, v in run.items()} for run in runs]
    from_json(Provenance, renamed)
    return renamed


def assumptions(info: CheckpointInfo) -> dict[str, str]:
    """What was assumed of a model: a text by the fact, a field's name such as "num_heads"."""
    found = info.provenance.get("assumed", {})
    return found if isinstance(found, dict) else {text: text for text in found}


def assumptions_text(info: CheckpointInfo) -> str | None:
    """What was assumed of a model, in words."""
    found = ", ".join(assumptions(info).values())
    return f"assuming {found}, which the checkpoint does not specify" if found else None


def unique_names(classes: tuple[ClassLabel, ...]) -> list[str]:
    """Names to show; those that several classes share are followed by the class's id."""
    count = Counter(label.name for label in classes)
    return [
        label.name if count[label.name] == 1 else f"{label.name} ({label.id})" for label in classes
    ]


def ancestry(start: CheckpointInfo, name: str) -> dict[str, Any]:
    """Provenance of a model whose initial weights are those of `start`, called `name`."""
    before = {key: start.provenance[key] for key in Run.__annotations__ if key in start.provenance}
    history = [*start.provenance.get("history", []), *([before] * bool(before))]
    return {"parent": stored_name(name), "history": history}


def stored_name(model: str) -> str:
    """What a checkpoint calls another model: of a path only the last component."""
    return Path(model).name if os.path.exists(os.path.expanduser(model)) else model
