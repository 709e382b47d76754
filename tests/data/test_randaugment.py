"""RandAugment's pixel operations and random draws."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

import vitcli.data.randaugment as module
from data.preprocess_cases import IMAGES
from vitcli.data.order import sample_rng
from vitcli.data.randaugment import OPS, randaugment

BILINEAR = Image.Resampling.BILINEAR


@pytest.fixture(scope="module")
def cat():
    with Image.open(IMAGES / "cat.jpg") as image:
        return image.resize((90, 60))


def apply(name: str, image: Image.Image, magnitude: float, seed: int = 0) -> np.ndarray:
    return np.asarray(OPS[name](image, magnitude / 10, sample_rng(seed, 0, 0))).astype(int)


def test_levels_match_the_authors_code(cat):
    pixels = np.asarray(cat).astype(int)
    for magnitude, bits in ((2, 0), (3, 1), (10, 4), (15, 6), (25, 8)):
        expected = pixels & (256 - 2 ** (8 - bits))
        assert np.array_equal(apply("posterize", cat, magnitude), expected)
    for magnitude, threshold in ((3, 76), (10, 256)):
        expected = np.where(pixels < threshold, pixels, 255 - pixels)
        assert np.array_equal(apply("solarize", cat, magnitude), expected)
    brighter = np.where(pixels < 128, np.minimum(255, pixels + 77), pixels)
    assert np.array_equal(apply("solarize_add", cat, 7), brighter)
    assert np.array_equal(apply("invert", cat, 5), 255 - pixels)
    for magnitude, factor in ((3, 0.64), (10, 1.9), (15, 2.8)):
        expected = np.clip(factor * pixels, 0, 255)
        assert np.abs(apply("brightness", cat, magnitude) - expected).max() <= 1
        mean = round((pixels @ [0.299, 0.587, 0.114]).mean())
        expected = np.clip(mean + factor * (pixels - mean), 0, 255)
        assert np.abs(apply("contrast", cat, magnitude) - expected).max() <= factor + 1


def test_geometric_ops_scale_with_size_and_fill_with_gray():
    white = Image.new("RGB", (90, 60), "white")
    # 30% of the image: magnitude 6.72 of 10 is 30 / 44.64.
    for name, filled in (("translate_x", 27 * 60), ("translate_y", 18 * 90)):
        got = apply(name, white, 6.72)
        assert (got == 128).all(-1).sum() == filled
        assert (got == 255).all(-1).sum() == 90 * 60 - filled
    for name, side in (("shear_x", 60), ("shear_y", 90)):  # per magnitude, 0.03 of the other side
        for magnitude in (5, 10):
            sheared = (apply(name, white, magnitude) == 128).all(-1).sum()
            assert sheared == pytest.approx(0.03 * magnitude * side**2 / 2, rel=0.05)
    ramp = Image.linear_gradient("L").convert("RGB")
    for magnitude in (5, 10):
        rotated = [
            np.asarray(ramp.rotate(sign * 3 * magnitude, BILINEAR, fillcolor=(128, 128, 128)))
            for sign in (-1, 1)
        ]
        assert any(np.array_equal(apply("rotate", ramp, magnitude), one) for one in rotated)
    white = Image.new("RGB", (112, 112), "white")
    sizes = [(apply("cutout", white, 10, seed) == 128).all(-1).sum() for seed in range(300)]
    assert 40**2 <= max(sizes) <= 42**2  # 40 of 224 pixels on each side of its center
    assert min(sizes) >= 19**2  # in a corner, a quarter of it remains


def test_signs_are_drawn_uniformly():
    white = Image.new("RGB", (50, 50), "white")
    left = sum((apply("translate_x", white, 5, i)[:, 0] == 128).all() for i in range(200))
    assert 75 < left < 125


def test_each_layer_draws_one_operation_uniformly(monkeypatch):
    drawn: list[tuple[str, float]] = []
    for name in OPS:
        monkeypatch.setitem(
            module.OPS,
            name,
            lambda image, level, rng, name=name: drawn.append((name, level)) or image,
        )
    for i in range(800):
        randaugment(Image.new("RGB", (4, 4)), 2, 7, sample_rng(0, 0, i))
    assert {level for _, level in drawn} == {0.7}
    counts = Counter(name for name, _ in drawn)
    assert (sum(counts.values()), len(counts)) == (1600, 16)
    assert min(counts.values()) > 60 and max(counts.values()) < 145


@pytest.mark.parametrize("name", OPS)
def test_operations_accept_any_magnitude_and_size(name):
    for size in ((1, 1), (2, 7), (40, 30)):
        for magnitude in (0, 5, 10, 15, 30):
            image = Image.new("RGB", size, (1, 200, 90))
            result = OPS[name](image, magnitude / 10, sample_rng(0, 0, 0))
            assert (result.size, result.mode) == (size, "RGB")
