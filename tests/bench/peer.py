"""What timm, transformers and safetensors do for the benchmarks, each as its documentation shows.

python peer.py timm|transformers MODEL IMAGES [DTYPE]    top 5 of a file, or of a directory's
python peer.py timm-resize|safetensors-copy MODEL OUTPUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BATCH_SIZE, WORKERS = 8, 2


def classify_with_timm(folder: Path, images: Path, dtype: str = "float32") -> None:
    """A file by timm's quick start, a directory by its inference.py: dataset, loader with worker
    processes, inference mode."""
    from peers import torchvision_operators  # noqa: F401  (first, see there)

    # isort: split

    import timm
    import torch
    from PIL import Image
    from timm.data import create_dataset, create_loader, create_transform, resolve_data_config

    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    model = model.eval().to(getattr(torch, dtype))
    data = resolve_data_config({}, model=model)
    if images.is_file():
        image = create_transform(**data)(Image.open(images).convert("RGB"))
        batches = [(image.unsqueeze(0), None)]
    else:
        batches = create_loader(
            create_dataset(root=str(images), name=""),
            batch_size=BATCH_SIZE,
            use_prefetcher=True,
            num_workers=WORKERS,
            device=torch.device("cpu"),
            img_dtype=getattr(torch, dtype),
            **data,
        )
    with torch.inference_mode():
        for batch, _ in batches:
            scores, classes = model(batch).float().softmax(-1).topk(5)
            for row in zip(scores.tolist(), classes.tolist(), strict=True):
                print(json.dumps(row))


def classify_with_transformers(folder: Path, images: Path, dtype: str = "float32") -> None:
    """With the pipeline."""
    from peers import torchvision_operators  # noqa: F401  (first, see there)

    # isort: split

    from transformers import pipeline

    classify = pipeline("image-classification", model=str(folder), dtype=dtype)
    files = [images] if images.is_file() else sorted(images.iterdir())
    batch_size = min(BATCH_SIZE, len(files))
    for answer in classify([str(p) for p in files], batch_size=batch_size, top_k=5):
        print(json.dumps(answer))


def resize_with_timm(folder: Path, output: Path) -> None:
    """A model at 384 pixels, saved for the Hub: timm's way to resize a checkpoint."""
    from peers import torchvision_operators  # noqa: F401  (first, see there)

    # isort: split

    import timm

    model = timm.create_model(f"local-dir:{folder}", pretrained=True, img_size=384)
    timm.models.save_for_hf(model, output, safe_serialization=True)


def copy_with_safetensors(folder: Path, output: Path) -> None:
    """The tensors, loaded and saved."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(folder / "model.safetensors"), output / "model.safetensors")


if __name__ == "__main__":
    run = {
        "timm": classify_with_timm,
        "transformers": classify_with_transformers,
        "timm-resize": resize_with_timm,
        "safetensors-copy": copy_with_safetensors,
    }
    run[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
