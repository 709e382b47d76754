"""Transforms from an encoded image to the model's input, for evaluation and training.

Images stay uint8 until they are on the model's device: a quarter of the bytes to transfer. All
random choices in training come from an explicit generator (order.py).
"""

import math

import numpy as np
import torch
from PIL import Image

from vitcli.config import AugmentConfig, Preprocess, Size
from vitcli.data.fit import Fit
from vitcli.data.images import Encoded, load, open_image
from vitcli.data.randaugment import randaugment
from vitcli.devices import to_device

Box = tuple[float, float, float, float]
"""(left, upper, right, lower) in pixels, as in Pillow."""


def to_tensor(image: Image.Image) -> torch.Tensor:
    """Convert an RGB image to uint8 (3, H, W)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def to_float(images: torch.Tensor, preprocess: Preprocess) -> torch.Tensor:
    """Normalize uint8 (..., 3, H, W) to float32, (x / 255 - mean) / std, on the same device."""
    pair = torch.tensor([preprocess.mean, preprocess.std], dtype=torch.float32, device="cpu")
    mean, std = to_device(pair.view(2, 3, 1, 1), images.device)
    return images.to(torch.float32, copy=True).sub_(255 * mean).div_(255 * std)


class EvalTransform:
    """The resize and crop of a model's preprocessing; see `Fit`."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.size = preprocess.size
        self.fit = Fit(preprocess)

    def __call__(self, image: Encoded, rng: np.random.Generator | None = None) -> torch.Tensor:
        """Return uint8 (3, H, W), without random choices. Raises ImageError if the image cannot
        be decoded."""
        return to_tensor(self.fit(image))


class TrainTransform:
    """Inception crop, flip, RandAugment and random erasing, in this order."""

    def __init__(self, size: Size, interpolation: str, augment: AugmentConfig) -> None:
        self.size = size
        self.filter = Image.Resampling[interpolation.upper()]
        self.augment = augment

    def __call__(self, encoded: Encoded, rng: np.random.Generator) -> torch.Tensor:
        """Return uint8 (3, H, W), with all random choices from `rng`. Raises ImageError if the
        image cannot be decoded."""
        opened = open_image(encoded)
        height, width = opened.size
        box = inception_box((height, width), self.augment, rng)
        # The size of the whole image at which the crop is twice its target size.
        min_size = (
            math.ceil(2 * self.size[0] * height / (box[3] - box[1])),
            math.ceil(2 * self.size[1] * width / (box[2] - box[0])),
        )
        image = load(opened, min_size)
        if image.size != (width, height):  # decoded at reduced scale
            sx, sy = image.width / width, image.height / height
            box = (box[0] * sx, box[1] * sy, box[2] * sx, box[3] * sy)
        image = image.resize(self.size[::-1], self.filter, box=box)
        if self.augment.flip and rng.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.augment.randaugment is not None:
            image = randaugment(image, *self.augment.randaugment, rng)
        pixels = to_tensor(image)
        if self.augment.erasing:
            erase(pixels, self.augment.erasing, rng)
        return pixels


def inception_box(size: Size, augment: AugmentConfig, rng: np.random.Generator) -> Box:
    """The random crop of "Going deeper with convolutions" (arXiv 1409.4842, section 6): draws area
    and aspect ratio (log-uniform), then the position. After ten that do not fit, the largest center
    crop with an allowed ratio, as in torchvision's RandomResizedCrop."""
    height, width = size
    if augment.crop_area == (1, 1):
        return 0, 0, width, height
    low, high = (math.log(ratio) for ratio in augment.crop_ratio)
    for _ in range(10):
        smallest, largest = augment.crop_area
        area = height * width * (smallest + (largest - smallest) * rng.random())
        ratio = math.exp(low + (high - low) * rng.random())
        columns, rows = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < columns <= width and 0 < rows <= height:
            left = int(rng.random() * (width - columns + 1))
            top = int(rng.random() * (height - rows + 1))
            return left, top, left + columns, top + rows
    ratio = min(max(width / height, augment.crop_ratio[0]), augment.crop_ratio[1])
    columns, rows = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, top = (width - columns) // 2, (height - rows) // 2
    return left, top, left + max(1, columns), top + max(1, rows)


def erase(pixels: torch.Tensor, probability: float, rng: np.random.Generator) -> None:
    """Apply random erasing in place (arXiv 1708.04896, variant R): with the given probability, fill
    a rectangle of 2% to 40% of the image with random pixels. pixels: uint8 (3, H, W)."""
    if rng.random() >= probability:
        return
    _, height, width = pixels.shape
    for _ in range(10):
        area = height * width * (0.02 + 0.38 * rng.random())
        ratio = math.exp(math.log(0.3) * (1 - 2 * rng.random()))  # 0.3 to 1 / 0.3
        rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < rows < height and 0 < columns < width:
            top = int(rng.random() * (height - rows + 1))
            left = int(rng.random() * (width - columns + 1))
            noise = rng.integers(0, 256, (3, rows, columns), np.uint8)
            pixels[:, top : top + rows, left : left + columns] = torch.from_numpy(noise)
            return


# ---------------------------------------------------------------------------------------------
# Mixing, for a whole batch


def mix(
    images: torch.Tensor,
    targets: torch.Tensor,
    augment: AugmentConfig,
    rng: np.random.Generator,
    lead: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply mixup or cutmix to a batch, mixing each image with the previous one.

    mixup (arXiv 1710.09412) as in big_vision: one weight per batch from Beta(alpha, alpha), at
    least 0.5. cutmix (arXiv 1905.04899): one box per batch, whose area within the image determines
    the weight. If both are enabled, one is chosen with equal probability.

    Args:
        images: float (B, 3, H, W).
        targets: float (B, K), the labels as distributions.
        rng: `batch_rng(seed, step)`.
        lead: 1 if image 0 only precedes this part of the batch, and is omitted from the result; 0
            if the batch is complete.
    """
    if not augment.mixup and not augment.cutmix:
        return images[lead:], targets[lead:]
    previous, previous_targets = images.roll(1, 0)[lead:], targets.roll(1, 0)[lead:]
    images, targets = images[lead:], targets[lead:]
    if augment.mixup and (not augment.cutmix or rng.random() < 0.5):
        weight = rng.beta(augment.mixup, augment.mixup)
        weight = max(weight, 1 - weight)
        images = images.lerp(previous, 1 - weight)
    else:
        height, width = images.shape[-2:]
        side = math.sqrt(1 - rng.beta(augment.cutmix, augment.cutmix))
        center = rng.random() * height, rng.random() * width
        top = max(0, round(center[0] - side * height / 2))
        left = max(0, round(center[1] - side * width / 2))
        bottom = min(height, round(center[0] + side * height / 2))
        right = min(width, round(center[1] + side * width / 2))
        weight = 1 - (bottom - top) * (right - left) / (height * width)
        images = images.clone()
        images[:, :, top:bottom, left:right] = previous[:, :, top:bottom, left:right]
    return images, targets.lerp(previous_targets, 1 - weight)
