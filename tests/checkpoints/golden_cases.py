"""The golden cases of timm: checkpoints and what the real timm computed with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

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


def sharded(folder: Path) -> Path:
    """Transformers' golden ViT in two files and their index, in a new folder."""
    shutil.copytree(GOLDEN / "hf_vit", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    for k, file in enumerate(files):
        part = {name: tensors[name] for name in list(tensors)[k::2]}
        save_file(part, folder / file, {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    names = {name: files[k % 2] for k, name in enumerate(tensors)}
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
