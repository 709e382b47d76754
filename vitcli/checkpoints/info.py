"""What a checkpoint holds beside its tensors: the model, how images are prepared, the classes, and
where it comes from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitcli.checkpoints.typed_json import from_json
from vitcli.config import Architecture, BiTConfig, ClassLabel, ModelConfig, Preprocess, Score
from vitcli.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class CheckpointInfo:
    """All that a checkpoint holds beside its tensors."""

    model: Architecture
    preprocess: Preprocess
    classes: tuple[ClassLabel, ...] = ()
    """In the order of the head's outputs; empty where nobody knows them."""
    score: Score = "softmax"
    """What turns logits into scores: softmax, or sigmoid for models trained on many labels."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """What made it: command, data, parent, figures, versions, how position embeddings were
    resized. JSON values."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON; `from_dict` reads it back."""
        return {
            "version": 1,
            "model": dataclasses.asdict(self.model),
            "preprocess": dataclasses.asdict(self.preprocess),
            "classes": [list(label) for label in self.classes],
            "score": self.score,
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, data: Any, where: object = None) -> CheckpointInfo:
        """Raises CheckpointError where the JSON is not what `to_dict` writes."""
        try:
            if data["version"] != 1:
                raise CheckpointError(
                    f"was written by a newer vit (layout {data['version']!r})",
                    where=where,
                    hint="pip install --upgrade vitcli",
                )
            info = cls(
                model=from_json(
                    BiTConfig if "resnet" in data["model"] else ModelConfig, data["model"]
                ),
                preprocess=from_json(Preprocess, data["preprocess"]),
                classes=tuple(ClassLabel(str(id), str(name)) for id, name in data["classes"]),
                score=from_json(Score, data["score"]),
                provenance=dict(data["provenance"]),
            )
            if info.classes and len(info.classes) != info.model.num_classes:
                raise ValueError(
                    f"{len(info.classes)} classes for {info.model.num_classes} outputs"
                )
            return info
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CheckpointError(
                f"its description of the model is damaged: {reason}", where=where
            ) from error

    def to_metadata(self) -> dict[str, str]:
        """For the header of a safetensors file; "format" is what transformers looks for."""
        text = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False)
        return {"format": "pt", "vit": text}

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, str], where: object = None
    ) -> CheckpointInfo | None:
        """None where the header holds no description of ours.

        Raises:
            CheckpointError: it holds one that cannot be read.
        """
        if "vit" not in metadata:
            return None
        try:
            data = json.loads(metadata["vit"])
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"its description of the model is damaged: {error}", where=where
            ) from error
        return cls.from_dict(data, where)


ANCESTRY = ("made_by", "command", "data", "train_images", "parent", "seed", "steps", "seconds")
"""What is kept of each run."""


def ancestry(start: CheckpointInfo, name: str) -> dict[str, Any]:
    """Provenance of a model whose initial weights are those of `start`, called `name`."""
    before = {key: start.provenance[key] for key in ANCESTRY if key in start.provenance}
    history = [*start.provenance.get("history", []), *([before] * bool(before))]
    return {"parent": public_name(name), "history": history}


def public_name(model: str) -> str:
    """A registry name or a Hub id as it is; a path by its last part."""
    return Path(model).name if Path(model).exists() else model
