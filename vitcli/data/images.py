"""Decode images of any supported format to upright 8-bit RGB."""

import contextlib
import importlib
import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops

from vitcli.config import Size
from vitcli.data.files import HAS_HEIF, read_file
from vitcli.errors import ImageError

# "JPEG" includes MPO. Some of Pillow's other formats run programs: EPS runs Ghostscript.
_FORMATS = (
    "JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "AVIF", "JPEG2000", "ICO",
)  # fmt: skip
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF")
"""Magic bytes of common formats."""
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_CONVERT_HINT = "convert it to 8- or 16-bit gray, or 8-bit RGB"
_HEIF_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"}

_HIGH_BIT_DEPTHS = frozenset({"I;16", "I;16L", "I;16B", "I;16N", "I", "F"})
_ORIENTATION = 0x0112
_MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Pillow's limit (179 million), against small files that decompress to huge images."""

# Pillow warns on stderr about large images (from half that limit) and damaged metadata: noise when
# classifying a directory. The caller's own filters take precedence.
warnings.filterwarnings("ignore", module=r"PIL\.", append=True)

Encoded = bytes | str | Path | Image.Image
"""An image's bytes, its path, or an open Pillow image."""


@dataclass(frozen=True)
class Opened:
    """An opened image whose pixels are not decoded yet."""

    image: Image.Image
    where: str | None
    """Its path, for error messages."""
    owned: bool
    """Whether it was opened here, so that it may be modified (`draft` changes the size)."""
    orientation: int
    """EXIF orientation, 1 (upright) to 8."""

    @property
    def size(self) -> Size:
        """(height, width) of the upright image."""
        width, height = self.image.size
        return (width, height) if self.orientation >= 5 else (height, width)


def decode(image: Encoded, min_size: Size | None = None) -> Image.Image:
    """Decode an image to upright 8-bit RGB.

    Applies EXIF orientation, composites transparency on white, keeps the upper 8 bits of 16-bit
    grayscale, and takes the first frame of an animation.

    Args:
        image: encoded bytes, a path, or an open Pillow image.
        min_size: (height, width). A JPEG is decoded at the smallest scale, down to 1/8, that is not
            smaller, which is as much faster.

    Raises:
        ImageError: missing, empty, not an image, truncated, damaged, or too large to decode.
    """
    return load(open_image(image), min_size)


def open_image(encoded: Encoded) -> Opened:
    """Open an image and read its header; `load` decodes the pixels."""
    if isinstance(encoded, Image.Image):
        if 0 in encoded.size:  # an empty crop
            raise ImageError("the image has no pixels")
        _load_late_exif(encoded, None)
        return Opened(encoded, None, False, _orientation(encoded))
    where = None
    if not isinstance(encoded, (bytes, str, os.PathLike)):
        type_name = type(encoded).__name__
        hint = "pass a path, the bytes of a file, or a Pillow image (Image.fromarray of an array)"
        raise ImageError(f"not an image, but of type {type_name}", where=None, hint=hint)
    if not isinstance(encoded, bytes):
        where, encoded = str(encoded), read_file(encoded)
    if not encoded:
        raise ImageError("the file is empty", where=where)
    formats: tuple[str, ...] = _FORMATS
    if encoded[4:8] == b"ftyp" and encoded[8:12] in _HEIF_BRANDS:
        if not HAS_HEIF:
            hint = "pip install pillow-heif, or with pipx: pipx inject vitcli pillow-heif"
            raise ImageError("HEIC images need pillow-heif", where=where, hint=hint)
        importlib.import_module("pillow_heif").register_heif_opener()
        formats = ("HEIF",)
    try:
        image = Image.open(io.BytesIO(encoded), formats=formats)
    except Image.DecompressionBombError:
        raise _too_large_error(where) from None
    except Warning as error:  # an error by the caller's filters
        raise ImageError(str(error), where=where) from error
    except Exception as error:  # Pillow may raise anything for a damaged header
        what = "not an image, or an unsupported format"
        if encoded.startswith(_TIFF_MAGIC):
            what = "an unsupported kind of TIFF, or damaged"
            raise ImageError(what, where=where, hint=_CONVERT_HINT) from error
        if encoded.startswith(_MAGIC):
            what = "the image is damaged or truncated"
        raise ImageError(what, where=where) from error
    if b"eXIf" in encoded:
        _load_late_exif(image, where)
    return Opened(image, where, True, _orientation(image))


def _load_late_exif(image: Image.Image, where: str | None) -> None:
    """Decode a PNG without EXIF in its header now: EXIF may follow the pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        with _wrap_decoding_errors(where):
            image.load()


@contextlib.contextmanager
def _wrap_decoding_errors(where: str | None) -> Iterator[None]:
    """Convert exceptions raised by Pillow to ImageError."""
    try:
        yield
    except Image.DecompressionBombError:
        raise _too_large_error(where) from None
    except MemoryError as error:
        raise ImageError("not enough memory to decode it", where=where) from error
    except ImageError as error:
        raise ImageError(error.what, where=where, hint=error.hint) from error
    except AssertionError as error:  # `assert self.fp is not None` in Pillow
        raise ImageError("cannot be decoded: its file is closed", where=where) from error
    except Exception as error:  # Pillow may raise anything for damaged pixels
        reason = str(error).partition("\n")[0] or "the data ends early"
        raise ImageError(f"cannot be decoded: {reason}", where=where) from error


def _too_large_error(where: object) -> ImageError:
    what = f"too many pixels to decode safely (more than {_MAX_PIXELS / 1e6:.0f} million)"
    return ImageError(what, where=where, hint="shrink the image first")


def load(opened: Opened, min_size: Size | None = None) -> Image.Image:
    """Decode an open image as `decode` does."""
    image, transpose = opened.image, _TRANSPOSES.get(opened.orientation)
    with _wrap_decoding_errors(opened.where):
        if min_size is not None and opened.owned and image.format in ("JPEG", "MPO"):
            width, height = min_size if opened.orientation >= 5 else min_size[::-1]
            image.draft(image.mode, (width, height))
        image.load()
        rgb = to_rgb(image)
        return rgb if transpose is None else rgb.transpose(transpose)


_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the transpose that makes the image upright."""


_ORIENTATION_KEYS = {"exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"}


def _orientation(image: Image.Image) -> int:
    """The orientation, 1 (upright) to 8, from EXIF or XMP. Pillow itself rotates TIFFs."""
    if image.format == "TIFF" or not _ORIENTATION_KEYS & image.info.keys():
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # pixels can be read despite a damaged EXIF block
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image of any Pillow mode to 8-bit RGB."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode in _HIGH_BIT_DEPTHS:
        values = np.asarray(image).astype(np.float32)  # changed in place, as it may take 700 MB
        np.nan_to_num(values, copy=False)
        highest, white = values.max(initial=0), 65535
        if highest > white:
            what = f"its values go up to {highest:,.6g}, which 16 bits cannot hold"
            raise ImageError(what, hint=_CONVERT_HINT)
        if mode == "F":
            white = 1 if highest <= 1 else 255 if highest <= 255 else white
        values *= 255
        values /= white
        values += 0.5
        np.clip(values, 0, 255, out=values)
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if mode == "CMYK" and image.format in ("JPEG", "MPO") and "adobe" not in image.info:
        # Pillow inverts all CMYK JPEGs, but only those with an Adobe marker are stored inverted.
        return ImageChops.invert(image).convert("RGB")
    if "A" in mode or "a" in mode or "transparency" in image.info:
        # Pillow can convert premultiplied gray ("La") only to "LA".
        rgba = (image.convert("LA") if mode == "La" else image).convert("RGBA")
        canvas = Image.new("RGB", image.size, "white")
        canvas.paste(rgba, mask=rgba.getchannel("A"))
        return canvas
    return image.convert("RGB")
