"""Counts, sizes, costs and choices in messages."""

from collections.abc import Iterable

UNITS = {1e18: "exaFLOPs", 1e15: "PFLOPs", 1e12: "TFLOPs", 1e9: "GFLOPs", 1e6: "MFLOPs"}


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 and "image" as "1 image", 1200 as "1,200 images"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size_text(size: tuple[int, int]) -> str:
    """ "224", or "192x320" (height x width)."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def flops_text(flops: float) -> str:
    """Floating-point operations, "35.13 GFLOPs"; training costs are in the paper's exaFLOPs."""
    unit = next((unit for unit in UNITS if flops >= unit), 1e6)
    return f"{flops / unit:,.4g} {UNITS[unit]}"


def either(names: Iterable[str]) -> str:
    """Choices: "a, b or c"."""
    return _joined(names, "or")


def numbers(values: Iterable[float]) -> str:
    """ "0.003, 0.01 and 0.03"."""
    return _joined((f"{value:g}" for value in values), "and")


def _joined(words: Iterable[str], conjunction: str) -> str:
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


def setting(name: str, value: object) -> str:
    """A field and its value, as in `--set` and `--preprocess`: "layer_scale=true"."""
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"
