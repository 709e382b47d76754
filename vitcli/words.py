"""Counts, sizes, lists, settings, paths and URLs in messages; suggestions for mistyped names."""

import os
import re
import shlex
from collections.abc import Iterable, Sequence

UNITS = {1e18: "exaFLOPs", 1e15: "PFLOPs", 1e12: "TFLOPs", 1e9: "GFLOPs", 1e6: "MFLOPs"}

URL_USER = re.compile(r"(?<=://)[^/?#\s]*@")
"""The user name and password in a URL."""


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: "1 image", "1,200 images"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_size(size: tuple[int, int]) -> str:
    """Format a size as "224" or "192x320" (height x width)."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def format_flops(flops: float) -> str:
    """Format FLOPs: "35.13 GFLOPs"; the paper gives training costs in exaFLOPs."""
    unit = next((unit for unit in UNITS if flops >= unit), 1e6)
    return f"{flops / unit:,.4g} {UNITS[unit]}"


def join_or(names: Iterable[str]) -> str:
    """Join choices: "a, b or c"."""
    return _join(names, "or")


def join_numbers(values: Iterable[float]) -> str:
    """Join numbers: "0.003, 0.01 and 0.03"."""
    return _join((f"{value:g}" for value in values), "and")


def _join(words: Iterable[str], conjunction: str) -> str:
    *initial, last = words
    return f"{', '.join(initial)} {conjunction} {last}" if initial else last


def format_setting(name: str, value: object) -> str:
    """Format a field and its value as in `--set` and `--preprocess`: "layer_scale=true"."""
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def collapse_names(names: Sequence[str]) -> str:
    """Collapse names into one by brace expansion: "block/{query,key,value}/kernel"."""
    if len(names) < 2:
        return "".join(names)
    start = os.path.commonprefix(names)
    end = os.path.commonprefix([name[len(start) :][::-1] for name in names])[::-1]
    middles = [name[len(start) : len(name) - len(end)] for name in names]
    return f"{start}{{{','.join(middles)}}}{end}"


def quote(path: str) -> str:
    """Quote a path for the shell, if necessary: on Windows, for spaces, not for backslashes."""
    if os.name == "nt":
        return f'"{path}"' if " " in path else path
    return shlex.quote(path)


def public_url(text: str) -> str:
    """Return a URL, or several separated by `::`, without user name, password and query, such as a
    signature that grants access. Other text is returned unchanged."""
    return re.sub(r"[?#;]((?!::).)*", "", URL_USER.sub("", text)) if "://" in text else text


def nearest(name: str, choices: list[str]) -> list[str]:
    """The three choices most similar to a mistyped name, ignoring case and separators: those that
    start with it, shortest first, or else the closest matches."""
    import difflib

    normalized = {re.sub(r"[\W_]", "", choice.lower()): choice for choice in choices}
    query = re.sub(r"[\W_]", "", name.lower())
    completions = sorted((key for key in normalized if query and key.startswith(query)), key=len)
    found = completions or difflib.get_close_matches(query, normalized)
    return [normalized[key] for key in found[:3]]


def did_you_mean(name: str, choices: list[str]) -> str | None:
    """A hint with the choices most similar to a mistyped name, if any."""
    suggestions = nearest(name, choices)
    return f"did you mean {join_or(suggestions)}?" if suggestions else None
