"""The benchmarks' tasks with timm, transformers and safetensors, as in their documentation.

python peer.py material DIRECTORY                          write B/16 checkpoints and photographs
python peer.py timm|transformers MODEL IMAGES [DTYPE]      top 5 of a file or of each in a directory
python peer.py timm-resize|safetensors-copy MODEL OUTPUT   load a checkpoint and save it again
"""

import json
import sys
from pathlib import Path

BATCH_SIZE, WORKERS = 8, 2


def write_material(root: Path) -> None:
    """Write two B/16 with 1,000 classes and random weights, saved by timm and by transformers, and
    199 JPEGs of 500 x 400: crops of the photographs in the repository."""
    import numpy as np
    import timm
    import torch
    from PIL import Image
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    (root / "photographs").mkdir(parents=True)
    names = ("astronaut.jpg", "cat.jpg", "coffee.jpg", "rocket.jpg")
    images = [Image.open(Path(__file__).parents[1] / "images" / name) for name in names]
    rng = np.random.default_rng(0)
    for number in range(199):
        image = images[number % len(images)].convert("RGB")
        width, height = (round(side * rng.uniform(0.5, 1.0)) for side in image.size)
        left, top = (
            int(rng.integers(image.width - width + 1)),
            int(rng.integers(image.height - height + 1)),
        )
        crop = image.crop((left, top, left + width, top + height)).resize((500, 400))
        crop.save(root / "photographs" / f"{number:03}.jpg", quality=92)
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", num_classes=1000)
    torch.nn.init.normal_(model.head.weight, std=0.02)
    timm.models.save_for_hf(model, root / "timm-b16", safe_serialization=True)
    ViTForImageClassification(ViTConfig(num_labels=1000)).save_pretrained(root / "transformers-b16")
    ViTImageProcessor().save_pretrained(root / "transformers-b16")


def classify_with_timm(source: Path, images: Path, dtype: str = "float32") -> None:
    """Classify a file as in timm's quick start, or a directory as in its inference.py: dataset,
    loader with worker processes, inference mode."""
    import timm
    import torch
    from PIL import Image
    from timm.data import create_dataset, create_loader, create_transform, resolve_data_config

    model = timm.create_model(f"local-dir:{source}", pretrained=True)
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


def classify_with_transformers(source: Path, images: Path, dtype: str = "float32") -> None:
    """Classify a file or a directory with the pipeline."""
    from transformers import pipeline

    classify = pipeline("image-classification", model=str(source), dtype=dtype)
    files = [images] if images.is_file() else sorted(images.iterdir())
    batch_size = min(BATCH_SIZE, len(files))
    for results in classify([str(p) for p in files], batch_size=batch_size, top_k=5):
        print(json.dumps(results))


def resize_with_timm(source: Path, output: Path) -> None:
    """Load a model at 384 pixels and save it for the Hub: timm's way to resize a checkpoint."""
    import timm

    model = timm.create_model(f"local-dir:{source}", pretrained=True, img_size=384)
    timm.models.save_for_hf(model, output, safe_serialization=True)


def copy_with_safetensors(source: Path, output: Path) -> None:
    """Load and save the tensors."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(source / "model.safetensors"), output / "model.safetensors")


if __name__ == "__main__":
    run = {
        "material": write_material,
        "timm": classify_with_timm,
        "transformers": classify_with_transformers,
        "timm-resize": resize_with_timm,
        "safetensors-copy": copy_with_safetensors,
    }
    task, *args = sys.argv[1:]
    if task != "safetensors-copy":
        from peers import torchvision_operators  # noqa: F401  (before timm and transformers)
    run[task](*map(Path, args[:2]), *args[2:])
