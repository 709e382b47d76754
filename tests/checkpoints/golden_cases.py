"""The golden cases, computed by the original implementations."""

import gzip
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"
TIMM_VIT = GOLDEN / "timm_vit_default"
TIMM_CASES = sorted(path.parent.name for path in GOLDEN.glob("timm_*/model.safetensors"))
FILES = ("checkpoint*.npz", "model.safetensors", "model.safetensors.gz")


def cases() -> dict[str, Path]:
    """All cases by name: the file of a model, or the directory of any other case."""
    found = {}
    for directory in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        files = [file for pattern in FILES for file in sorted(directory.glob(pattern))]
        for file in files or [directory]:
            name = f"{directory.name}/{file.name}" if len(files) > 1 else directory.name
            found[name] = file
    return found


def unpack(file: Path, directory: Path) -> Path:
    """Return a case's file; a gzipped one is unpacked into `directory`, with its config.json."""
    if file.suffix != ".gz":
        return file
    (directory / "model.safetensors").write_bytes(gzip.decompress(file.read_bytes()))
    shutil.copy(file.parent / "config.json", directory)
    return directory / "model.safetensors"


def images_and_logits(name: str) -> tuple[np.ndarray, np.ndarray]:
    """A case's images (N, 3, H, W), and their logits, or features if it has no head."""
    arrays = np.load(GOLDEN / name / "io.npz")
    images = arrays["input"]
    images = images if images.shape[1] == 3 else images.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images), arrays["logits" if "logits" in arrays else "pre_logits"]


def write_shards(folder: Path) -> Path:
    """Write the golden case `hf_vit` to a new directory as two shards and their index."""
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
