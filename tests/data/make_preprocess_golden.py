"""Makes tests/golden/preprocess: `python -m data.make_preprocess_golden` in tests/, where the real
timm and transformers are installed."""

from __future__ import annotations

import numpy as np
import timm
import torch
import transformers
from PIL import Image

import peers.torchvision_operators  # noqa: F401
from data.preprocess_cases import GOLDEN, IMAGES, NAMES, TIMM, TRANSFORMERS, Array, parts
from vitcli.config import Preprocess


def timm_pixels(image: Image.Image, preprocess: Preprocess) -> Array:
    transform = timm.data.create_transform(
        (3, *preprocess.size),
        interpolation=preprocess.interpolation,
        mean=preprocess.mean,
        std=preprocess.std,
        crop_pct=preprocess.crop_pct,
        crop_mode=preprocess.crop_mode,
        normalize=False,
    )
    return np.asarray(transform(image), np.float64)


def transformers_pixels(image: Image.Image, preprocess: Preprocess) -> Array:
    processor = transformers.ViTImageProcessor(
        size={"height": preprocess.size[0], "width": preprocess.size[1]}
    )
    normalised = processor(image, return_tensors="pt")["pixel_values"][0].double()
    return np.asarray((normalised * 0.5 + 0.5) * 255)


def main() -> None:
    torch.set_num_threads(1)
    arrays = {}
    for name in NAMES:
        image = Image.open(IMAGES / name).convert("RGB")
        for kind, cases, pixels_of in (
            ("timm", TIMM, timm_pixels),
            ("transformers", TRANSFORMERS, transformers_pixels),
        ):
            for case, preprocess in cases.items():
                for part, values in parts(pixels_of(image, preprocess)).items():
                    kept = values.astype(np.float32)
                    if part != "mean" and kind == "timm":
                        kept = values.astype(np.uint8)
                    arrays[f"{name}|{kind}|{case}|{part}"] = kept
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(GOLDEN, **arrays)


if __name__ == "__main__":
    main()
