"""Resize and crop images for evaluation, matching the pixels of timm or of the authors' code.
Does not import torch, so that images can be decoded while it is being imported."""

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitcli.config import Preprocess, Size
from vitcli.data.images import Encoded, load, open_image

DRAFT_MARGIN = 4
"""A JPEG decoded at reduced scale stays at least this many times larger than its target. Mean
difference from full decoding after the resize, on 59 photographs: 0.7 of 255 levels at 4 (PSNR at
least 39 dB), 1.5 at 2 (31 dB)."""

MAX_PIXELS = 1 << 25
"""Maximum pixels of a resized image before the crop; above that, only the crop is resized."""


class Fit:
    """The resize and crop of a model's preprocessing, with the pixels of timm's eval transform.

    Crop modes: center resizes the shorter side to size / crop_pct and crops the center; squash
    resizes both sides; border resizes the longer side and pads with the mean color.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        self.filter = Image.Resampling[preprocess.interpolation.upper()]
        self.scaled_size: Size = (
            math.floor(preprocess.size[0] / preprocess.crop_pct),
            math.floor(preprocess.size[1] / preprocess.crop_pct),
        )
        self.fill = tuple(round(255 * value) for value in preprocess.mean)

    def __call__(self, encoded: Encoded) -> Image.Image:
        """Return 8-bit RGB of the model's input size. Raises ImageError if decoding fails."""
        opened = open_image(encoded)
        height, width = self.resized_size(opened.size)
        antialias = self.preprocess.antialias
        # Without antialiasing, the sampled pixels depend on the image size: decode at full size.
        reduce = antialias and self.preprocess.interpolation != "nearest"
        image = load(opened, (DRAFT_MARGIN * height, DRAFT_MARGIN * width) if reduce else None)
        # Resize, then crop: resizing only the crop would save little time, and some pixels would
        # differ from timm's by one level.
        (top, rows), (left, columns) = map(self._center_crop, (height, width), self.preprocess.size)
        if not antialias:
            image = _interpolate(image, (height, width), (top, left), (rows, columns))
        elif height * width > MAX_PIXELS:  # a one-pixel-high image would become gigabytes
            sx, sy = image.width / width, image.height / height
            box = (left * sx, top * sy, (left + columns) * sx, (top + rows) * sy)
            image = image.resize((columns, rows), self.filter, box=box)
        else:
            image = image.resize((width, height), self.filter)
            if (rows, columns) != (height, width):
                image = image.crop((left, top, left + columns, top + rows))
        if (rows, columns) == self.preprocess.size:
            return image
        canvas = Image.new("RGB", self.preprocess.size[::-1], self.fill)
        canvas.paste(image, ((canvas.width - columns) // 2, (canvas.height - rows) // 2))
        return canvas

    def resized_size(self, size: Size) -> Size:
        """The size to which an image of `size` is resized before the crop."""
        height, width = size
        to_height, to_width = self.scaled_size
        if self.preprocess.crop_mode == "squash":
            return to_height, to_width
        if self.preprocess.crop_mode == "center" and to_height == to_width:
            # torchvision's rule for a square: the longer side is rounded down.
            if height <= width:
                return to_height, int(to_height * width / height)
            return int(to_width * height / width), to_width
        ratios = height / to_height, width / to_width
        ratio = max(ratios) if self.preprocess.crop_mode == "border" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _center_crop(self, length: int, size: int) -> tuple[int, int]:
        """(start, length) of the central `size` of `length`; all of it if it is shorter."""
        if length <= size:
            return 0, length
        margin = (length - size) / 2
        half_even = self.preprocess.crop_rounding == "even"
        return round(margin) if half_even else math.floor(margin), size


def _interpolate(image: Image.Image, size: Size, start: Size, crop: Size) -> Image.Image:
    """The crop at `start` (row, column) of `image` resized to `size` without antialiasing, with the
    float32 operations of tf.image.resize, truncated to 8 bits as in big_vision (pp/ops_image.py).
    Pillow's own transform differs in the last bit of 1% of the pixels."""
    pixels = np.asarray(image)
    (tops, bottoms, y_weights), (lefts, rights, x_weights) = (
        _linear_weights(*axis) for axis in zip(pixels.shape[:2], size, start, crop, strict=True)
    )
    x_weights = x_weights[:, None]

    def interpolate_rows(rows: npt.NDArray[np.intp]) -> npt.NDArray[np.float32]:
        left, right = (pixels[np.ix_(rows, c)].astype(np.float32) for c in (lefts, rights))
        interpolated: npt.NDArray[np.float32] = left + (right - left) * x_weights
        return interpolated

    upper, lower = interpolate_rows(tops), interpolate_rows(bottoms)
    return Image.fromarray((upper + (lower - upper) * y_weights[:, None, None]).astype(np.uint8))


def _linear_weights(
    length: int, size: int, start: int, count: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """Resizing one axis of `length` pixels to `size`: for `count` outputs from `start`, the input
    indices before and after each, and the latter's weight. Pixel centers are at half-integers."""
    half = np.float32(0.5)
    positions = np.arange(start, start + count, dtype=np.float32)
    positions = (positions + half) * (np.float32(length) / np.float32(size)) - half
    lower = np.floor(positions)
    upper = np.minimum(np.ceil(positions), length - 1)
    return np.maximum(lower, 0).astype(np.intp), upper.astype(np.intp), positions - lower
