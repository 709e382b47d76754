"""Images of every kind become upright 8-bit RGB, or an error that says why not."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from data.preprocess_cases import IMAGES, NAMES
from vitcli.data.images import decode
from vitcli.errors import ImageError

RED, GREEN, BLUE = (220, 30, 20), (20, 200, 40), (10, 40, 210)


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def corners() -> Image.Image:
    """48 x 32, every quarter another colour."""
    image = Image.new("RGB", (48, 32), "white")
    for colour, place in ((RED, (0, 0)), (GREEN, (24, 0)), (BLUE, (0, 16))):
        image.paste(colour, (*place, place[0] + 24, place[1] + 16))
    return image


def photograph() -> Image.Image:
    with Image.open(IMAGES / "cat.jpg") as image:
        return image.convert("RGB").resize((120, 80))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_honoured(orientation: int, format: str) -> None:
    upright = corners()
    # What a camera stores: the inverse of what the viewer is told to do.
    inverse = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
    stored = ImageOps.exif_transpose(tagged(upright, inverse))
    assert stored is not None
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(
        stored, format, exif=exif.tobytes(), **({"quality": 95} if format != "PNG" else {})
    )
    got = decode(data)
    assert got.size == upright.size
    assert np.abs(pixels(got) - pixels(upright))[::7, ::5].max() <= 24  # JPEG's loss


def tagged(image: Image.Image, orientation: int) -> Image.Image:
    image = image.copy()
    image.getexif()[0x0112] = orientation
    return image


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def test_exif_behind_the_pixels_of_a_png_is_honoured() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(corners(), "PNG", exif=exif.tobytes())
    start = data.index(b"eXIf") - 4
    length = struct.unpack(">I", data[start : start + 4])[0] + 12
    block = data[start : start + length]
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + block + data[end:]
    assert decode(moved).size == (32, 48)


def test_a_damaged_exif_block_does_not_hide_the_image() -> None:
    data = encode(corners(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0\x01")
    assert decode(data).size == (48, 32)


def test_greyscale() -> None:
    grey = photograph().convert("L")
    assert np.array_equal(pixels(decode(encode(grey, "PNG"))), pixels(grey.convert("RGB")))
    assert decode(encode(grey, "JPEG")).mode == "RGB"


def test_black_and_white_bits() -> None:
    bits = photograph().convert("1")
    assert np.array_equal(pixels(decode(encode(bits, "PNG")))[..., 0], pixels(bits) * 255)


def test_palette() -> None:
    palette = corners().quantize(8)
    assert np.array_equal(pixels(decode(encode(palette, "GIF"))), pixels(corners()))


def test_palette_with_a_transparent_entry_shows_white() -> None:
    palette = corners().quantize(8)
    index = palette.getpixel((0, 0))
    got = pixels(decode(encode(palette, "PNG", transparency=index)))
    assert (got[0, 0] == 255).all()
    assert tuple(got[0, 30]) == GREEN


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_alpha_is_put_on_white(format: str) -> None:
    alpha = Image.new("L", (48, 32), 255)
    alpha.paste(0, (0, 0, 24, 16))
    alpha.paste(128, (24, 0, 48, 16))
    image = corners()
    image.putalpha(alpha)
    got = pixels(decode(encode(image, format, **({"lossless": True} if format == "WEBP" else {}))))
    assert (got[4, 4] == 255).all()
    half = np.round(np.array(GREEN) * 128 / 255 + 255 * 127 / 255)
    assert np.abs(got[4, 30] - half).max() <= 1
    assert tuple(got[24, 4]) == BLUE


def test_alpha_of_greyscale_and_a_transparent_colour() -> None:
    grey = corners().convert("L")
    alpha = grey.copy()
    alpha.paste(0, (0, 0, 24, 16))
    both = Image.merge("LA", (grey, alpha))
    assert (pixels(decode(encode(both, "PNG")))[4, 4] == 255).all()
    keyed = encode(corners(), "PNG", transparency=RED)
    assert (pixels(decode(keyed))[4, 4] == 255).all()


@pytest.mark.parametrize("name", ["horse-silhouette.png"])
def test_a_silhouette_is_black_on_white(name: str) -> None:
    got = pixels(decode(IMAGES / name))
    assert got.min() == 0
    assert (got[0, 0] == 255).all()


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_brightness(format: str) -> None:
    ramp = np.linspace(0, 65535, 64 * 8).astype(np.uint16).reshape(8, 64)
    got = pixels(decode(encode(Image.fromarray(ramp), format)))[..., 0]
    assert np.array_equal(got, np.round(ramp / 257).astype(int))


def test_sixteen_bits_of_a_pgm() -> None:
    ramp = np.linspace(0, 65535, 64).astype(">u2")
    data = b"P5 64 1 65535\n" + ramp.tobytes()
    got = pixels(decode(data))[0, :, 0]
    assert np.abs(got - ramp / 257).max() <= 0.51


def test_float_tiff() -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32)[None]
    got = pixels(decode(encode(Image.fromarray(ramp), "TIFF")))[0, :, 0]
    assert np.array_equal(got, np.floor(ramp[0] * 255 + 0.5))


def test_cmyk_as_adobe_writes_it() -> None:
    cmyk = corners().convert("CMYK")
    data = encode(cmyk, "JPEG", quality=95)
    assert b"Adobe" in data
    assert np.abs(pixels(decode(data)) - pixels(corners()))[::7, ::5].max() <= 24


def test_cmyk_without_adobes_mark_is_not_inverted() -> None:
    # The same values stored upright: inverted once more before Pillow inverts them.
    cmyk = Image.fromarray(255 - np.asarray(corners().convert("CMYK")), "CMYK")
    data = encode(cmyk, "JPEG", quality=95)
    start = data.index(b"\xff\xee")
    length = struct.unpack(">H", data[start + 2 : start + 4])[0] + 2
    unmarked = data[:start] + data[start + length :]
    assert b"Adobe" not in unmarked
    assert np.abs(pixels(decode(unmarked)) - pixels(corners()))[::7, ::5].max() <= 24


def test_cmyk_tiff() -> None:
    data = encode(corners().convert("CMYK"), "TIFF")
    assert np.array_equal(pixels(decode(data)), pixels(corners()))


def test_the_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(pixels(decode(data))[4, 4]) == RED


def test_heic() -> None:
    heif = pytest.importorskip("pillow_heif", reason="the extra heif is not installed")
    heif.register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = 6
    image = decode(encode(photograph(), "HEIF", exif=exif.tobytes()))
    assert (image.mode, image.size) == ("RGB", (80, 120))
    upright = pixels(photograph().transpose(Image.Transpose.ROTATE_270))
    assert np.abs(pixels(image) - upright).mean() < 12  # a lossy format


def test_heic_without_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitcli.data.images.HAS_HEIF", False)
    with pytest.raises(ImageError) as caught:
        decode(b"\0\0\0\x18ftypheic" + bytes(100))
    assert "vitcli[heif]" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------
# Reduced scale


@pytest.mark.parametrize("name", NAMES)
def test_reduced_scale_changes_nothing_visible(name: str) -> None:
    target = (32, 32)
    full = decode(IMAGES / name)
    reduced = decode(IMAGES / name, target)
    assert reduced.size[0] < full.size[0]
    assert min(reduced.size) >= 4 * 32
    one, other = (
        np.asarray(image.resize(target, Image.Resampling.BICUBIC)).astype(float)
        for image in (full, reduced)
    )
    assert np.abs(one - other).mean() < 1.5
    assert 10 * np.log10(255**2 / ((one - other) ** 2).mean()) > 38


def test_reduced_scale_follows_the_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(photograph().resize((1600, 400)), "JPEG", exif=exif.tobytes())
    assert decode(data, (200, 50)).size == (200, 800)  # upright 400 x 1600, half of it


def test_a_callers_image_keeps_its_size() -> None:
    with Image.open(IMAGES / "cat.jpg") as image:
        decode(image, (16, 16))
        assert image.size == (451, 300)


# ---------------------------------------------------------------------------------------------
# Bad input


def bomb() -> bytes:
    """The header of a PNG of 60,000 x 60,000 pixels, and a little data."""

    def block(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + block(b"IHDR", header) + block(b"IDAT", data) + block(b"IEND", b"")
    )


JPEG = (IMAGES / "cat.jpg").read_bytes()
PNG = encode(photograph(), "PNG")


PROGRAM = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
BAD = {
    "empty": b"",
    "text": b"not an image at all\n",
    "bomb": bomb(),
    "half": JPEG[: len(JPEG) // 2],
    "stub": JPEG[:150],
    "half-png": PNG[: len(PNG) // 2],
    "stub-png": PNG[:20],
    "hole": PNG[:60] + bytes(40) + PNG[100:],
    "program": PROGRAM,
    "heic": b"\0\0\0\x18ftypheic" + bytes(100),
}


@pytest.mark.parametrize("name", [*BAD, "missing", "directory"])
def test_bad_input_is_one_clear_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "x.jpg"
    if name == "directory":
        file.mkdir()
    elif name in BAD:
        file.write_bytes(BAD[name])
        with pytest.raises(ImageError):
            decode(BAD[name])
    with pytest.raises(ImageError) as caught:
        decode(file)
    assert "\n" not in caught.value.what and caught.value.where == str(file)


def test_large_and_odd_images_are_read_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "large.png").write_bytes(encode(Image.new("1", (12_000, 8_000)), "PNG"))
    odd = encode(corners(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0\x01")
    (tmp_path / "odd.jpg").write_bytes(odd)
    code = (
        "from vitcli.data.images import decode, open_image\n"
        "print(open_image('large.png').size, decode('odd.jpg').size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "(8000, 12000) (48, 32)\n"
    assert done.stderr == ""


@pytest.mark.parametrize("start", [JPEG, PNG], ids=["jpeg", "png"])
def test_damage_raises_nothing_but_image_errors(start: bytes) -> None:
    rng = np.random.default_rng(0)
    for _ in range(150):
        data = bytearray(start[:4000])
        for place in rng.integers(0, 600, rng.integers(1, 8)):
            data[place] = rng.integers(0, 256)
        try:
            assert decode(bytes(data)).mode == "RGB"
        except ImageError as error:
            assert "\n" not in error.what
