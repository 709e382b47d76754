"""Makes tests/golden/preprocess/big_vision.npz: `python -m data.make_big_vision_golden` in tests/,
where TensorFlow is installed. The operations are those of `resize(S)|central_crop(C)` in
big_vision/pp/ops_image.py, on images that Pillow decoded."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from PIL import Image

from data.preprocess_cases import BIG_VISION, BIG_VISION_GOLDEN, IMAGES, NAMES, Array, parts


def pixels_of(source: Image.Image, resized: int, cropped: int) -> Array:
    image = tf.constant(np.asarray(source))
    image = tf.image.resize(image, (resized, resized), method="bilinear", antialias=False)
    image = tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)
    start = (resized - cropped) // 2
    image = tf.image.crop_to_bounding_box(image, start, start, cropped, cropped)
    return image.numpy().transpose(2, 0, 1).astype(np.float64)


def main() -> None:
    arrays = {}
    for name in NAMES:
        image = Image.open(IMAGES / name).convert("RGB")
        for case, (resized, preprocess) in BIG_VISION.items():
            pixels = pixels_of(image, resized, preprocess.size[0])
            for part, values in parts(pixels).items():
                kept = values.astype(np.float32 if part == "mean" else np.uint8)
                arrays[f"{name}|{case}|{part}"] = kept
    np.savez_compressed(BIG_VISION_GOLDEN, **arrays)


if __name__ == "__main__":
    main()
