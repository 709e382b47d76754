"""What a model's description keeps of the model that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitcli.checkpoints.native import CheckpointInfo

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
