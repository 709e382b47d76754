"""Counts and sizes in messages."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 and "image" as "1 image", 1200 as "1,200 images"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size_text(size: tuple[int, int]) -> str:
    """ "224", or "192x320" (height x width)."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"
