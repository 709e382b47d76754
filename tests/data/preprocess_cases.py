"""Evaluation transforms and images whose results in the real timm, transformers and TensorFlow are
in tests/golden/preprocess/, and the pixels of them that are stored.

timm: `create_transform(..., normalize=False)`; transformers: `ViTImageProcessor(size=...)`, scaled
back to 0 ... 255; TensorFlow: the operations of `resize(S)|central_crop(C)` in
big_vision/pp/ops_image.py, on images decoded by Pillow.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitcli.config import Preprocess

IMAGES = Path(__file__).parents[1] / "images"

NAMES = ("astronaut.jpg", "cat.jpg", "coffee.jpg", "rocket.jpg")

TIMM = {
    "center 0.9 bicubic 224": Preprocess((224, 224), crop_pct=0.9),
    "center 0.95 bicubic 224": Preprocess((224, 224), crop_pct=0.95),
    "center 0.875 bilinear 160": Preprocess((160, 160), crop_pct=0.875, interpolation="bilinear"),
    "center 1.0 bicubic 384": Preprocess((384, 384)),
    "center 1.0 lanczos 64": Preprocess((64, 64), interpolation="lanczos"),
    "center 0.9 bicubic 192x320": Preprocess((192, 320), crop_pct=0.9),
    "squash 1.0 bilinear 224": Preprocess((224, 224), crop_mode="squash", interpolation="bilinear"),
    "squash 0.9 bicubic 128": Preprocess((128, 128), crop_mode="squash", crop_pct=0.9),
    "border 1.0 bicubic 224": Preprocess(
        (224, 224), crop_mode="border", mean=(0.485, 0.456, 0.406)
    ),
    "border 0.9 bicubic 160": Preprocess((160, 160), crop_mode="border", crop_pct=0.9),
    "border 1.0 bilinear 96x160": Preprocess(
        (96, 160), crop_mode="border", interpolation="bilinear"
    ),
}

TRANSFORMERS = {"vit 224": Preprocess((224, 224), crop_mode="squash", interpolation="bilinear")}


def _squashed(size: int) -> Preprocess:
    return Preprocess(
        (size, size),
        interpolation="bilinear",
        antialias=False,
        crop_mode="squash",
        crop_pct=224 / 256,
        crop_rounding="down",
    )


BIG_VISION = {
    "resize(256)|central_crop(224)": _squashed(224),
    "resize(585)|central_crop(512)": _squashed(512),
    "resize(36)|central_crop(32)": _squashed(32),
}
CASES = {
    **{f"timm|{case}": (preprocess, 0.0) for case, preprocess in TIMM.items()},
    **{f"transformers|{case}": (preprocess, 1.001) for case, preprocess in TRANSFORMERS.items()},
    **{case: (preprocess, 0.0) for case, preprocess in BIG_VISION.items()},
}
"""Preprocessing of the model, and the tolerance in levels of a pixel."""

Array = npt.NDArray[np.float64]


def parts(pixels: Array) -> dict[str, Array]:
    """The stored parts of pixels (3, H, W): corners, center and the mean of each channel."""
    top, left = (pixels.shape[1] - 12) // 2, (pixels.shape[2] - 12) // 2
    return {
        "topleft": pixels[:, :12, :12],
        "topright": pixels[:, :12, -12:],
        "centre": pixels[:, top : top + 12, left : left + 12],
        "bottomright": pixels[:, -12:, -12:],
        "mean": pixels.mean((1, 2)),
    }
