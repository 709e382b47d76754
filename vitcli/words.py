"""Counts and lists in messages."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """1 and "image" as "1 image", 1200 as "1,200 images"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
