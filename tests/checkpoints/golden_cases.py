"""A golden case as a sharded checkpoint."""

import json
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"


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
