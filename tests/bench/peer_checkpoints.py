"""What else reads and writes a checkpoint: timm at another size, and safetensors as it is.

`python peer_checkpoints.py timm|safetensors MODEL_FOLDER OUTPUT`
"""

from __future__ import annotations

import sys
from pathlib import Path


def through_timm(source: Path, output: Path) -> None:
    """A model of timm's at 384 pixels, saved for the Hub: its way to resize a checkpoint."""
    from peers import torchvision_operators  # noqa: F401  (first, see there)

    # isort: split

    import timm

    model = timm.create_model(f"local-dir:{source}", pretrained=True, img_size=384)
    timm.models.save_for_hf(model, output, safe_serialization=True)


def through_safetensors(source: Path, output: Path) -> None:
    """The tensors, loaded and saved."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(source / "model.safetensors"), output / "model.safetensors")


if __name__ == "__main__":
    kind, source, output = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    {"timm": through_timm, "safetensors": through_safetensors}[kind](source, output)
