"""RandAugment's operations against formulas on pixels, and its draws."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

import vitcli.data.randaugment as module
from data.preprocess_cases import IMAGES
from vitcli.data.order import sample_rng
from vitcli.data.randaugment import OPS, randaugment


@pytest.fixture(scope="module")
def cat() -> Image.Image:
    with Image.open(IMAGES / "cat.jpg") as image:
        return image.resize((90, 60))


def apply(name: str, image: Image.Image, magnitude: float) -> np.ndarray:
    return np.asarray(OPS[name](image, magnitude / 10, sample_rng(0, 0, 0))).astype(float)


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat((pixels @ [0.299, 0.587, 0.114])[..., None], 3, 2)


@pytest.mark.parametrize("magnitude", [3, 10, 15])
def test_colour_operations_are_their_formulas(cat: Image.Image, magnitude: float) -> None:
    pixels = np.asarray(cat).astype(float)
    factor = 0.1 + 0.18 * magnitude
    smooth = pixels.copy()
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    for channel in range(3):
        inner = ndimage.convolve(pixels[..., channel], kernel)
        smooth[1:-1, 1:-1, channel] = inner[1:-1, 1:-1]
    degenerate = {
        "brightness": 0 * pixels,
        "color": grey(pixels),
        "contrast": np.full_like(pixels, round(grey(pixels).mean())),
        "sharpness": smooth,
    }
    for name, other in degenerate.items():
        expected = np.clip(other + factor * (pixels - other), 0, 255)
        assert np.abs(apply(name, cat, magnitude) - expected).max() <= 0.51 + max(1, factor), name


@pytest.mark.parametrize(("magnitude", "bits"), [(2, 0), (3, 1), (10, 4), (15, 6), (25, 8)])
def test_posterize_keeps_bits(cat: Image.Image, magnitude: float, bits: int) -> None:
    mask = 256 - 2 ** (8 - bits)
    assert np.array_equal(apply("posterize", cat, magnitude), np.asarray(cat) & mask)


@pytest.mark.parametrize(("magnitude", "threshold"), [(3, 76), (10, 256)])
def test_solarize_inverts_what_is_bright(cat: Image.Image, magnitude: int, threshold: int) -> None:
    pixels = np.asarray(cat).astype(int)
    expected = np.where(pixels < threshold, pixels, 255 - pixels)
    assert np.array_equal(apply("solarize", cat, magnitude), expected)


def test_solarize_add_raises_what_is_dark(cat: Image.Image) -> None:
    pixels = np.asarray(cat).astype(int)
    expected = np.where(pixels < 128, np.minimum(255, pixels + 77), pixels)
    assert np.array_equal(apply("solarize_add", cat, 7), expected)


def test_invert_and_autocontrast(cat: Image.Image) -> None:
    pixels = np.asarray(cat).astype(float)
    assert np.array_equal(apply("invert", cat, 5), 255 - pixels)
    low, high = pixels.min((0, 1)), pixels.max((0, 1))
    expected = (pixels - low) * 255 / (high - low)
    assert np.abs(apply("autocontrast", cat, 5) - expected).max() <= 1


def test_equalize_spreads_the_levels(cat: Image.Image) -> None:
    for channel in apply("equalize", cat, 5).transpose(2, 0, 1):
        assert abs(np.median(channel) - 127) < 10
        assert channel.max() == 255


@pytest.mark.parametrize(
    ("name", "row", "column"),
    [("translate_x", (1, 0, -27), (0, 1, 0)), ("translate_y", (1, 0, 0), (0, 1, -18))],
)
def test_translation_is_relative_and_fills_with_grey(
    name: str, row: tuple[int, int, int], column: tuple[int, int, int]
) -> None:
    # 30% of the image: magnitude 6.72 of 10 is 30 / 44.64.
    white = Image.new("RGB", (90, 60), "white")
    got = apply(name, white, 6.72)
    expected = 27 * 60 if name == "translate_x" else 18 * 90
    assert (got == 128).all(-1).sum() == expected
    assert (got == 255).all(-1).sum() == 90 * 60 - expected


def test_rotation_and_shear_against_scipy(cat: Image.Image) -> None:
    pixels = np.asarray(cat).astype(float)
    centre = (np.array(pixels.shape[:2]) - 1) / 2
    angle = np.deg2rad(30)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    shear = np.array([[1, 0], [0.3, 1]])  # x is taken from x + 0.3 y
    for name, matrix, origin in (("rotate", turn, centre), ("shear_x", shear, [-0.5, -0.5])):
        candidates = []
        for sign in (1, -1):
            linear = matrix.copy()
            linear[~np.eye(2, dtype=bool)] *= sign
            offset = origin - linear @ np.array(origin)
            candidates.append(
                np.stack(
                    [
                        ndimage.affine_transform(pixels[..., c], linear, offset, order=1, cval=128)
                        for c in range(3)
                    ],
                    -1,
                )
            )
        got = apply(name, cat, 10)
        inside = [np.abs(got - other)[8:-8, 8:-8] for other in candidates]
        best = min(inside, key=lambda difference: float(np.median(difference)))
        assert np.quantile(best, 0.9) <= 2, name  # but for the edge of the fill


def test_cutout_paints_a_grey_square_somewhere(cat: Image.Image) -> None:
    white = Image.new("RGB", (112, 112), "white")
    sizes = []
    for i in range(300):
        got = np.asarray(OPS["cutout"](white, 1.0, sample_rng(0, 0, i)))
        sizes.append((got == 128).all(-1).sum())
    assert 40**2 <= max(sizes) <= 42**2  # 40 of 224 pixels on each side of its centre
    assert min(sizes) >= 19**2  # a corner cuts it to a quarter


def test_signs_are_drawn_evenly() -> None:
    ramp = Image.fromarray(np.tile(np.arange(0, 250, 5, dtype=np.uint8), (50, 1))).convert("RGB")
    left = 0
    for i in range(200):
        got = np.asarray(OPS["translate_x"](ramp, 0.5, sample_rng(0, 0, i)))
        left += bool((got[:, 0] == 128).all())
    assert 75 < left < 125


def test_each_layer_draws_one_operation_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    for name in OPS:
        monkeypatch.setitem(
            module.OPS, name, lambda image, level, rng, name=name: drawn.append(name) or image
        )
    image = Image.new("RGB", (4, 4))
    for i in range(800):
        randaugment(image, 2, 10, sample_rng(0, 0, i))
    counts = Counter(drawn)
    assert sum(counts.values()) == 1600
    assert len(counts) == 16
    assert min(counts.values()) > 60
    assert max(counts.values()) < 145


def test_every_operation_takes_any_magnitude_and_size() -> None:
    for name, operation in OPS.items():
        for size in ((1, 1), (2, 7), (40, 30)):
            for magnitude in (0, 5, 10, 15, 30):
                image = operation(
                    Image.new("RGB", size, (1, 200, 90)), magnitude / 10, sample_rng(0, 0, 0)
                )
                assert (image.size, image.mode) == (size, "RGB"), name
