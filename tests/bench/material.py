"""Writes what the benchmarks run on: a B/16 in both peers' layouts, and photographs.

Runs in the peers' Python, so that timm and transformers write their own directories:
`python material.py DIRECTORY`. The weights are random, which takes no less time, and the
photographs are cut from those that ship in the repository.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = Path(__file__).parents[1] / "images"
PHOTOGRAPHS = ["astronaut.jpg", "cat.jpg", "coffee.jpg", "rocket.jpg"]
COUNT = 199
SIZE = (500, 400)


def write_photographs(folder: Path) -> None:
    """COUNT different JPEGs of 500x400: crops of a half to all of a photograph's sides."""
    folder.mkdir(parents=True)
    originals = [Image.open(IMAGES / name).convert("RGB") for name in PHOTOGRAPHS]
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        photograph = originals[number % len(originals)]
        part = rng.uniform(0.5, 1.0)
        width, height = round(photograph.width * part), round(photograph.height * part)
        left = int(rng.integers(photograph.width - width + 1))
        top = int(rng.integers(photograph.height - height + 1))
        crop = photograph.crop((left, top, left + width, top + height))
        crop.resize(SIZE, Image.Resampling.BICUBIC).save(folder / f"{number:03}.jpg", quality=92)


def write_timm(folder: Path) -> None:
    """A B/16 with 1,000 classes as timm saves it for the Hub."""
    import timm
    import torch

    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", num_classes=1000)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    timm.models.save_for_hf(model, folder, safe_serialization=True)


def write_transformers(folder: Path) -> None:
    """A B/16 with 1,000 classes as transformers saves it."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)


def main() -> None:
    root = Path(sys.argv[1])
    write_photographs(root / "photographs")
    from peers import torchvision_operators  # noqa: F401  (first, see there)

    write_timm(root / "timm-b16")
    write_transformers(root / "transformers-b16")


if __name__ == "__main__":
    main()
