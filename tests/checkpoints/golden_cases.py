"""The golden cases of timm: checkpoints and what the real timm computed with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass(frozen=True)
class Case:
    """One folder of tests/golden/."""

    folder: Path
    said: dict[str, Any]
    """case.json: tolerances of the arrays, the number of parameters, the larger resolution."""

    @property
    def arrays(self) -> Any:
        return np.load(self.folder / "io.npz")

    @property
    def hires_px(self) -> int | None:
        px: int | None = self.said["hires_px"]
        return px

    def tolerance(self, array: str) -> float:
        # Position embeddings are not in the manifest: they are one product of small matrices.
        return float(self.said["tolerance"].get(array, 1e-6))


def _cases(file: str) -> dict[str, Case]:
    return {
        folder.name: Case(folder, json.loads((folder / "case.json").read_text()))
        for folder in sorted(GOLDEN.glob("timm_*"))
        if (folder / "case.json").is_file() and (folder / file).is_file()
    }


CASES = _cases("model.safetensors")
PACKED = _cases("model.safetensors.gz")
"""A hybrid and a BiT ResNet, to be unpacked first."""
