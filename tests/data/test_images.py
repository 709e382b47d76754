"""Decoding images of every kind to upright 8-bit RGB, or a clear error."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from data.preprocess_cases import IMAGES, NAMES
from vitcli.data.fit import DRAFT_MARGIN
from vitcli.data.images import decode, open_image
from vitcli.errors import ImageError

RED, GREEN, BLUE = (220, 30, 20), (20, 200, 40), (10, 40, 210)


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def quadrants() -> Image.Image:
    """48 x 32 pixels, each quadrant in a different color."""
    image = Image.new("RGB", (48, 32), "white")
    for color, place in ((RED, (0, 0)), (GREEN, (24, 0)), (BLUE, (0, 16))):
        image.paste(color, (*place, place[0] + 24, place[1] + 16))
    return image


def photograph() -> Image.Image:
    with Image.open(IMAGES / "cat.jpg") as image:
        return image.convert("RGB").resize((120, 80))


def pixels(image: Image.Image | bytes) -> np.ndarray:
    return np.asarray(decode(image) if isinstance(image, bytes) else image).astype(int)


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


# ---------------------------------------------------------------------------------------------
# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(orientation, format):
    upright = quadrants()
    # As a camera stores it: the inverse of the transform that the tag asks a viewer to apply.
    tagged = upright.copy()
    tagged.getexif()[0x0112] = {6: 8, 8: 6}.get(orientation, orientation)
    stored = ImageOps.exif_transpose(tagged)
    quality = {"quality": 95} if format != "PNG" else {}
    got = decode(encode(stored, format, exif=exif(orientation), **quality))
    assert got.size == upright.size
    assert np.abs(pixels(got) - pixels(upright))[::7, ::5].max() <= 24  # JPEG is lossy


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_orientation_in_xmp_is_applied(format):
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", xmp.decode())
    options = {"pnginfo": text} if format == "PNG" else {"xmp": xmp}
    assert decode(encode(quadrants(), format, **options)).size == (32, 48)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_ignored():
    damaged = b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\0\x01"
    assert decode(encode(quadrants(), "JPEG", exif=damaged)).size == (48, 32)


def test_exif_after_the_pixels_of_a_png_is_applied():
    data = encode(quadrants(), "PNG", exif=exif(6))
    start = data.index(b"eXIf") - 4
    length = struct.unpack(">I", data[start : start + 4])[0] + 12
    block = data[start : start + length]
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + length : end] + block + data[end:]
    assert decode(moved).size == (32, 48)
    assert open_image(moved).size == open_image(data).size == (48, 32)


# ---------------------------------------------------------------------------------------------
# Modes


def test_grayscale_bilevel_palette_and_animated_images():
    gray, bits = photograph().convert("L"), photograph().convert("1")
    assert np.array_equal(pixels(encode(gray, "PNG")), pixels(gray.convert("RGB")))
    assert decode(encode(gray, "JPEG")).mode == "RGB"
    assert np.array_equal(pixels(encode(bits, "PNG"))[..., 0], pixels(bits) * 255)
    assert np.array_equal(pixels(encode(quadrants().quantize(8), "GIF")), pixels(quadrants()))
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, BLUE)]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(pixels(data)[4, 4]) == RED  # the first frame


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_alpha_is_composited_on_white(format):
    alpha = Image.new("L", (48, 32), 255)
    alpha.paste(0, (0, 0, 24, 16))
    alpha.paste(128, (24, 0, 48, 16))
    image = quadrants()
    image.putalpha(alpha)
    got = pixels(encode(image, format, **({"lossless": True} if format == "WEBP" else {})))
    half = np.round(np.array(GREEN) * 128 / 255 + 255 * 127 / 255)
    assert (got[4, 4] == 255).all() and tuple(got[24, 4]) == BLUE
    assert np.abs(got[4, 30] - half).max() <= 1


def test_other_transparency_is_composited_on_white():
    palette = quadrants().quantize(8)
    got = pixels(encode(palette, "PNG", transparency=palette.getpixel((0, 0))))
    assert (got[0, 0] == 255).all() and tuple(got[0, 30]) == GREEN
    gray = quadrants().convert("L")
    alpha = gray.copy()
    alpha.paste(0, (0, 0, 24, 16))
    assert (pixels(encode(Image.merge("LA", (gray, alpha)), "PNG"))[4, 4] == 255).all()
    assert (pixels(encode(quadrants(), "PNG", transparency=RED))[4, 4] == 255).all()
    silhouette = pixels((IMAGES / "horse-silhouette.png").read_bytes())
    assert silhouette.min() == 0 and (silhouette[0, 0] == 255).all()


def test_high_bit_depths_keep_their_brightness():
    ramp = np.linspace(0, 65535, 64 * 8).astype(np.uint16).reshape(8, 64)
    for format in ("PNG", "TIFF"):
        got = pixels(encode(Image.fromarray(ramp), format))[..., 0]
        assert np.array_equal(got, np.round(ramp / 257).astype(int))
    got = pixels(b"P5 64 8 65535\n" + ramp.astype(">u2").tobytes())[..., 0]
    assert np.abs(got - ramp / 257).max() <= 0.51
    floats = np.linspace(0, 1, 64, dtype=np.float32)[None]
    got = pixels(encode(Image.fromarray(floats), "TIFF"))[0, :, 0]
    assert np.array_equal(got, np.floor(floats[0] * 255 + 0.5))
    for kind in (np.float32, np.int32):  # 12 bits, in a file of 32
        got = pixels(encode(Image.fromarray((ramp >> 4).astype(kind)), "TIFF"))[..., 0]
        assert np.array_equal(got, np.round((ramp >> 4) / 257).astype(int))
        with pytest.raises(ImageError, match="go up to 131,070"):
            decode(encode(Image.fromarray(ramp.astype(kind) * 2), "TIFF"))


def test_cmyk_with_and_without_adobe_inversion():
    cmyk = quadrants().convert("CMYK")
    adobe = encode(cmyk, "JPEG", quality=95)
    # The same values stored without inversion: inverted here, as Pillow inverts them on saving.
    data = encode(Image.fromarray(255 - np.asarray(cmyk), "CMYK"), "JPEG", quality=95)
    start = data.index(b"\xff\xee")
    length = struct.unpack(">H", data[start + 2 : start + 4])[0] + 2
    unmarked = data[:start] + data[start + length :]
    assert b"Adobe" in adobe and b"Adobe" not in unmarked
    for image in (adobe, unmarked):
        assert np.abs(pixels(image) - pixels(quadrants()))[::7, ::5].max() <= 24
    assert np.array_equal(pixels(encode(cmyk, "TIFF")), pixels(quadrants()))


def test_heic(monkeypatch):
    heif = pytest.importorskip("pillow_heif", reason="the extra heif is not installed")
    heif.register_heif_opener()
    image = decode(encode(photograph(), "HEIF", exif=exif(6)))
    assert (image.mode, image.size) == ("RGB", (80, 120))
    upright = pixels(photograph().transpose(Image.Transpose.ROTATE_270))
    assert np.abs(pixels(image) - upright).mean() < 12  # a lossy format


def test_heic_error_names_the_missing_extra(monkeypatch):
    monkeypatch.setattr("vitcli.data.images.HAS_HEIF", False)
    with pytest.raises(ImageError) as caught:
        decode(b"\0\0\0\x18ftypheic" + bytes(100))
    assert "pip install pillow-heif" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------
# Decoding at reduced scale


@pytest.mark.parametrize("name", NAMES)
def test_reduced_scale_looks_the_same(name):
    full, reduced = decode(IMAGES / name), decode(IMAGES / name, (DRAFT_MARGIN * 32,) * 2)
    assert min(reduced.size) >= DRAFT_MARGIN * 32 and reduced.size[0] < full.size[0]
    one, other = (
        np.asarray(image.resize((32, 32), Image.Resampling.BICUBIC)).astype(float)
        for image in (full, reduced)
    )
    assert np.abs(one - other).mean() < 1.5
    assert 10 * np.log10(255**2 / ((one - other) ** 2).mean()) > 38


def test_reduced_scale_respects_orientation_and_keeps_input():
    data = encode(photograph().resize((1600, 400)), "JPEG", exif=exif(6))
    assert decode(data, (800, 200)).size == (200, 800)  # 400 x 1600 upright, halved
    with Image.open(IMAGES / "cat.jpg") as image:
        decode(image, (64, 64))
        assert image.size == (451, 300)


# ---------------------------------------------------------------------------------------------
# Bad input


def decompression_bomb() -> bytes:
    """A PNG whose header says 60,000 x 60,000 pixels, with little data."""

    def block(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = block(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))
    data = block(b"IDAT", zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + header + data + block(b"IEND", b"")


JPEG = (IMAGES / "cat.jpg").read_bytes()
PNG = encode(photograph(), "PNG")
BAD = {
    "empty": b"",
    "text": b"not an image at all\n",
    "bomb": decompression_bomb(),
    "half": JPEG[: len(JPEG) // 2],
    "stub": JPEG[:150],
    "half-png": PNG[: len(PNG) // 2],
    "stub-png": PNG[:20],
    "hole": PNG[:60] + bytes(40) + PNG[100:],
    "program": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "heic": b"\0\0\0\x18ftypheic" + bytes(100),
}


@pytest.mark.parametrize("name", [*BAD, "missing", "directory"])
def test_bad_input_gives_a_one_line_error(name, tmp_path):
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
