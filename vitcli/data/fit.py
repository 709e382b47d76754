"""A picture cut to a model's size, for evaluation: timm's pixels. Pillow alone, so that pictures
can be decoded while torch is still being imported."""

from __future__ import annotations

import math

from PIL import Image

from vitcli.config import Preprocess, Size
from vitcli.data.pictures import DRAFT_MARGIN, Encoded, load, open_picture

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "lanczos": Image.Resampling.LANCZOS,
}
"""Pillow's filters by the names of `Preprocess.interpolation`."""

LARGEST = 1 << 25
"""Pixels of a picture that is resized whole."""


class Fit:
    """Resize and crop of a model's pre-processing: the pixels of timm's evaluation transform.

    center: the shorter side is resized to size / crop_pct and the centre is cut out; squash: both
    sides are resized; border: the longer side is, and the mean colour fills the rest.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        self.filter = FILTERS[preprocess.interpolation]
        self.scaled: Size = (
            math.floor(preprocess.size[0] / preprocess.crop_pct),
            math.floor(preprocess.size[1] / preprocess.crop_pct),
        )
        self.fill = tuple(round(255 * value) for value in preprocess.mean)

    def __call__(self, picture: Encoded) -> Image.Image:
        """A picture (bytes, path or Pillow's) as 8-bit RGB of the model's size.

        Raises:
            PictureError: it cannot be decoded.
        """
        opened = open_picture(picture)
        height, width = self.resized(opened.size)
        image = load(opened, (DRAFT_MARGIN * height, DRAFT_MARGIN * width))
        # Resized whole, then cropped: resizing the crop alone would save a little time and differ
        # from timm by one level here and there.
        (top, rows), (left, columns) = (
            _centre(whole, part)
            for whole, part in zip((height, width), self.preprocess.size, strict=True)
        )
        if height * width > LARGEST:  # a picture of one line would become gigabytes
            across, down = image.width / width, image.height / height
            box = (left * across, top * down, (left + columns) * across, (top + rows) * down)
            image = image.resize((columns, rows), self.filter, box=box)
        else:
            image = image.resize((width, height), self.filter)
            if (rows, columns) != (height, width):
                image = image.crop((left, top, left + columns, top + rows))
        if (rows, columns) == self.preprocess.size:
            return image
        page = Image.new("RGB", self.preprocess.size[::-1], self.fill)
        page.paste(image, ((page.width - columns) // 2, (page.height - rows) // 2))
        return page

    def resized(self, size: Size) -> Size:
        """The size that a picture of `size` gets before the crop."""
        height, width = size
        to_height, to_width = self.scaled
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


def _centre(whole: int, part: int) -> tuple[int, int]:
    """(start, length) of the middle `part` of `whole`; all of it where it is shorter."""
    if whole <= part:
        return 0, whole
    return round((whole - part) / 2), part
