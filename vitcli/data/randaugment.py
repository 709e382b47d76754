"""RandAugment (arXiv 1909.13719) with the operations and magnitudes of big_vision and AugReg.

Each layer draws one of 16 operations uniformly and always applies it. Per unit of magnitude (10 is
the full range, more is allowed): rotation 3 degrees, shear 0.03, translation 4.5% of the image,
with random signs; color, contrast, brightness and sharpness use a factor of 0.1 + 0.18 per unit;
posterize keeps 0.4 bits, solarize inverts from 25.6 on, solarize-add adds 11 below 128, cutout
paints a square of 3.6% of the image. Fills are gray 128. timm's `rand-m10` has the same operations
except cutout, applies each half of the time, and clips magnitudes at 10.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

_GRAY = (128, 128, 128)
_BILINEAR = Image.Resampling.BILINEAR
_TRANSLATE = 100 / 224

Op = Callable[[Image.Image, float, np.random.Generator], Image.Image]


def randaugment(
    image: Image.Image, layers: int, magnitude: float, rng: np.random.Generator
) -> Image.Image:
    """Apply `layers` random operations, drawn with `rng`, to an RGB image."""
    for _ in range(layers):
        image = OPS[_NAMES[int(rng.integers(len(_NAMES)))]](image, magnitude / 10, rng)
    return image


def _signed(value: float, rng: np.random.Generator) -> float:
    return -value if rng.random() < 0.5 else value


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    """Map each output pixel (x, y) to the input pixel (ax + by + c, dx + ey + f)."""
    return image.transform(
        image.size, Image.Transform.AFFINE, matrix, resample=_BILINEAR, fillcolor=_GRAY
    )


def _cutout(image: Image.Image, level: float, rng: np.random.Generator) -> Image.Image:
    half = 40 / 224 * level
    x, y = rng.random() * image.width, rng.random() * image.height
    box = (
        max(0, math.floor(x - half * image.width)),
        max(0, math.floor(y - half * image.height)),
        min(image.width, math.ceil(x + half * image.width)),
        min(image.height, math.ceil(y + half * image.height)),
    )
    image = image.copy()
    image.paste(_GRAY, box)
    return image


def _solarize_add(image: Image.Image, level: float, _: np.random.Generator) -> Image.Image:
    added = int(110 * level)
    table = [min(255, value + added) if value < 128 else value for value in range(256)]
    return image.point(table * 3)


def _posterize(image: Image.Image, level: float, _: np.random.Generator) -> Image.Image:
    mask = 256 - 2 ** max(0, 8 - int(4 * level))
    return image.point([value & mask for value in range(256)] * 3)


def _enhance(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Op:
    return lambda image, level, rng: enhancer(image).enhance(0.1 + 1.8 * level)


OPS: dict[str, Op] = {
    "autocontrast": lambda image, level, rng: ImageOps.autocontrast(image),
    "equalize": lambda image, level, rng: ImageOps.equalize(image),
    "invert": lambda image, level, rng: ImageOps.invert(image),
    "rotate": lambda image, level, rng: image.rotate(
        _signed(30 * level, rng), resample=_BILINEAR, fillcolor=_GRAY
    ),
    "posterize": _posterize,
    "solarize": lambda image, level, rng: ImageOps.solarize(image, int(256 * level)),
    "solarize_add": _solarize_add,
    "color": _enhance(ImageEnhance.Color),
    "contrast": _enhance(ImageEnhance.Contrast),
    "brightness": _enhance(ImageEnhance.Brightness),
    "sharpness": _enhance(ImageEnhance.Sharpness),
    "shear_x": lambda image, level, rng: _affine(image, (1, _signed(0.3 * level, rng), 0, 0, 1, 0)),
    "shear_y": lambda image, level, rng: _affine(image, (1, 0, 0, _signed(0.3 * level, rng), 1, 0)),
    "translate_x": lambda image, level, rng: _affine(
        image, (1, 0, _signed(_TRANSLATE * level * image.width, rng), 0, 1, 0)
    ),
    "translate_y": lambda image, level, rng: _affine(
        image, (1, 0, 0, 0, 1, _signed(_TRANSLATE * level * image.height, rng))
    ),
    "cutout": _cutout,
}

_NAMES = tuple(OPS)
