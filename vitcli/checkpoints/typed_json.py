"""From JSON back to dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def from_json(hint: Any, value: Any) -> Any:
    """A JSON value as the annotated type: a dataclass, tuple, Literal, number, string, bool, or a
    table as it is.

    Raises:
        ValueError: it is not of that type.
        ConfigError: a dataclass refuses it.
    """
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.60} is not a table")
        if not set(value) <= set(hints):
            raise ValueError(f"unknown fields {sorted(set(value) - set(hints))}")
        return hint(**{name: _field(name, hints[name], item) for name, item in value.items()})
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{value!r:.60} is not one of {', '.join(map(str, args))}")
    if origin is tuple and isinstance(value, list) and args[1:] == (...,):
        return tuple(from_json(args[0], item) for item in value)
    if origin is tuple and isinstance(value, list) and len(value) == len(args):
        return tuple(from_json(arg, item) for arg, item in zip(args, value, strict=True))
    if origin in (types.UnionType, Union):
        *others, last = (arg for arg in args if arg is not type(None))
        if value is None and type(None) in args:
            return None
        for arg in others:
            with contextlib.suppress(ValueError):
                return from_json(arg, value)
        return from_json(last, value)
    if origin is dict and isinstance(value, dict):
        return value
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    wanted = f"{len(args)} values" if origin is tuple else getattr(hint, "__name__", hint)
    raise ValueError(f"{value!r:.60} is not {wanted}")


def _field(name: str, hint: Any, value: Any) -> Any:
    """A field of a dataclass; what is wrong with it is told with its name."""
    try:
        return from_json(hint, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
