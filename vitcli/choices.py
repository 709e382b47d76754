"""Fields that take one of a few words: checked, for Python does not."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitcli.errors import ConfigError


@functools.cache
def _choices(kind: Any) -> dict[str, tuple[Any, ...]]:
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def check_choices(config: object) -> None:
    """Raises ConfigError where a Literal field of a dataclass has another value."""
    kind: Any = type(config)
    for name, allowed in _choices(kind).items():
        value = getattr(config, name)
        if value not in allowed:
            words = ", ".join(map(str, allowed))
            raise ConfigError(f"{name} cannot be '{value}'", hint=f"take one of {words}")


def check_range(config: object, low: float, high: float, *names: str) -> None:
    """Raises ConfigError where a field is not a number in [low, high]; None is left alone."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            above = f" to {high:g}" if math.isfinite(high) else " on"
            raise ConfigError(f"{name} must be a number from {low:g}{above}, not {value}")
