"""Validation of external JSON: `parse` reads plain values, `from_json` converts them to types.

Standard library only: pydantic takes longer to import than `vit info` takes to run.
"""

import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MAX_DEPTH = 40
"""Maximum nesting depth of arrays and objects; a configuration has about five levels."""


def parse(text: str | bytes) -> Any:
    """Parse JSON whose numbers are finite and fit in 64 bits and whose strings are valid Unicode.

    Raises:
        ValueError: it is not JSON, has invalid numbers or strings, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_int=_int64, parse_float=_finite, parse_constant=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be encoded
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth([value], 0)
    return value


def non_finite_to_none(value: Any) -> Any:
    """Replace numbers that JSON does not have (NaN, infinity) with None, for writing."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: non_finite_to_none(item) for key, item in value.items()}
    return (
        [non_finite_to_none(item) for item in value] if isinstance(value, (list, tuple)) else value
    )


def _int64(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits:.20}... is too large a number")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{digits:.20} is not a finite number")
    return number


def _check_depth(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list)):
            _check_depth(item, depth + 1)


_ACCEPTED: dict[Any, Any] = {float: Real, int: Integral, str: (str, os.PathLike)}
"""Types that are converted to a plain one, such as numpy's."""


def from_json(hint: Any, value: Any) -> Any:
    """Convert a JSON value to the annotated type: a dataclass, TypedDict (with unknown keys
    allowed), tuple, list, dict, Literal, number, string or bool. A value of that type is returned.

    Raises:
        ValueError: it is not of that type.
        ConfigError: a dataclass rejects it.
    """
    if hint is Any or type(value) is hint:
        return value
    origin, args = get_origin(hint), get_args(hint)
    is_array = isinstance(value, (list, tuple))
    if typing.is_typeddict(hint) and isinstance(value, dict):
        hints = get_type_hints(hint)
        return {k: _convert(k, hints[k], v) if k in hints else v for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        if not isinstance(value, dict):
            raise ValueError(f"{value!r:.60} is not an object")
        if not set(value) <= set(hints):
            raise ValueError(f"unknown fields {sorted(set(value) - set(hints))}")
        no_default = dataclasses.MISSING
        for field in dataclasses.fields(hint):
            if field.name not in value and field.default is field.default_factory is no_default:
                raise ValueError(f"no field '{field.name}'")
        return hint(**{name: _convert(name, hints[name], item) for name, item in value.items()})
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{value!r:.60} is not one of {', '.join(map(str, args))}")
    if is_array and (origin is list or (origin is tuple and args[1:] == (...,))):
        return origin(from_json(args[0], item) for item in value)
    if origin is tuple and is_array and len(value) == len(args):
        return tuple(from_json(arg, item) for arg, item in zip(args, value, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return {key: from_json(args[1], item) for key, item in value.items()}
    if origin in (types.UnionType, Union):
        *alternatives, last = (arg for arg in args if arg is not type(None))
        if value is None and type(None) in args:
            return None
        for arg in alternatives:
            with contextlib.suppress(ValueError):
                return from_json(arg, value)
        return from_json(last, value)
    if isinstance(value, _ACCEPTED.get(hint, ())) and not isinstance(value, bool):
        return hint(value)
    expected = f"{len(args)} numbers" if origin is tuple else getattr(hint, "__name__", hint)
    raise ValueError(f"{value!r:.60} is not {expected}")


def _convert(name: str, hint: Any, value: Any) -> Any:
    """Convert the value of a field; errors name the field."""
    try:
        return from_json(hint, value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
