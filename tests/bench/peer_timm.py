"""Classifies with timm, as its documentation and its inference script do.

`python peer_timm.py MODEL_FOLDER IMAGES`: one file goes the way of the quick start, a folder the
way of `inference.py`: timm's data set, loader with worker processes, inference mode.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from peers import torchvision_operators  # noqa: F401  (first, see there)

# isort: split

import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader, create_transform, resolve_data_config


def classify_file(model: torch.nn.Module, image: Path) -> torch.Tensor:
    """Logits (1, K) of one image."""
    transform = create_transform(**resolve_data_config({}, model=model))
    return model(transform(Image.open(image).convert("RGB")).unsqueeze(0))


def classify_folder(
    model: torch.nn.Module, folder: Path, dtype: torch.dtype, batch_size: int, workers: int
) -> Iterator[torch.Tensor]:
    """Logits (B, K) of each batch of a folder's images."""
    loader = create_loader(
        create_dataset(root=str(folder), name=""),
        batch_size=batch_size,
        use_prefetcher=True,
        num_workers=workers,
        device=torch.device("cpu"),
        img_dtype=dtype,
        **resolve_data_config({}, model=model),
    )
    for images, _ in loader:
        yield model(images)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()

    dtype = getattr(torch, arguments.dtype)
    model = timm.create_model(f"local-dir:{arguments.model}", pretrained=True)
    model = model.eval().to(dtype)
    with torch.inference_mode():
        if arguments.images.is_file():
            batches = iter([classify_file(model, arguments.images)])
        else:
            batches = classify_folder(
                model, arguments.images, dtype, arguments.batch_size, arguments.workers
            )
        for logits in batches:
            scores, classes = logits.float().softmax(-1).topk(5)
            for row in zip(scores.tolist(), classes.tolist(), strict=True):
                print(json.dumps(row))


if __name__ == "__main__":
    main()
