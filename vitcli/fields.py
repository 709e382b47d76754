"""Fields of configurations: the values that each allows, and the command-line option that sets it.

A field declares its option together with its type and default:

    steps: int | None = option(None, "--steps N", "Number of optimizer steps.", min=1)

`vitcli/cli/parameters.py` builds the options of a command from such fields. `check_fields` enforces
the same choices and limits for all other sources (JSON, Python).
"""

import contextlib
import dataclasses
import functools
import operator
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from vitcli.errors import ConfigError
from vitcli.typed_json import from_json
from vitcli.weight_files import PROGRAMS, SUFFIXES
from vitcli.words import join_or

Size = tuple[int, int]
"""(height, width)."""
NOT_DIRECTORIES = (*SUFFIXES, *PROGRAMS, ".json", ".csv", ".txt", ".png", ".jpg", ".pdf", ".svg")
"""Suffixes that no directory should have; others, as in "vit_base.augreg", are allowed."""
LARGEST_INT, LARGEST_FLOAT = 1e18, 1e38
"""The largest numbers allowed: in an int64 and a float32."""
LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Limits of a number: {name: (words for messages, comparison that must hold)}."""


class Requirement(NamedTuple):
    """A condition on the other options, without which an option has no effect."""

    message: str
    """The error, after the option's name, if the condition is false: "requires --optimizer sgd"."""
    holds: Callable[[Any], bool]
    """Whether the options of a command, given as attributes, satisfy the condition."""


@dataclass(frozen=True)
class Option:
    """The value of "option" in the metadata of a field; see `option`."""

    names: tuple[str, ...]
    metavar: str | None
    help: str | dict[str, str]
    group: str | None
    parse: Callable[[str], Any] | None = None
    task: str | None = None
    on_resume: bool = False
    requires: Requirement | None = None

    def help_of(self, task: str) -> str:
        """Return the help text for a command."""
        return self.help if isinstance(self.help, str) else self.help.get(task, self.help[""])


def option(
    default: Any,
    usage: str,
    help: str | dict[str, str],
    group: str | None = None,
    *,
    parse: Callable[[str], Any] | None = None,
    task: str | None = None,
    on_resume: bool = False,
    requires: Requirement | None = None,
    **limits: float,
) -> Any:
    """Return a dataclass field that is also a command-line option.

    Args:
        default: default value of the field; `...` if it is required.
        usage: names and metavar, as in "--batch-size -b N"; additional long names are deprecated
            aliases, hidden from `--help`. A metavar alone, as in "IMAGES", declares an argument.
        help: help text, including the default if it differs from the field's; "" hides the option.
            If commands differ, {task: help}, with "" as the key for the others.
        group: heading in `--help` for this option and those after it in the class.
        parse: converts the text of the option to a value; None: by the field's type (`from_text`).
        task: the only command that has the option; None: all that use the dataclass.
        on_resume: whether a resumed run may have another value.
        requires: condition without which the option has no effect and is refused.
        limits: any of min and max (inclusive), above and below (exclusive), for a number or for
            each number of a tuple.
    """
    parts = usage.split(" ")
    names = tuple(part for part in parts if part.startswith("-"))
    metavar = " ".join(parts[len(names) :]) or None
    declaration = Option(names, metavar, help, group, parse, task, on_resume, requires)
    default_args: dict[str, Any] = {"default": default}
    if default is ...:
        default_args = {}
    elif default in ({}, []):
        default_args = {"default_factory": type(default)}
    return dataclasses.field(**default_args, metadata={"option": declaration, "limits": limits})


def limited(default: Any = ..., **limits: float) -> Any:
    """Return a dataclass field that is not an option, with limits as in `option`."""
    default_args = {} if default is ... else {"default": default}
    return dataclasses.field(**default_args, metadata={"limits": limits})


@functools.cache
def field_types(config_type: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass, by name."""
    return get_type_hints(config_type)


def check_fields(config: Any) -> None:
    """Convert the fields of a dataclass to their types, such as lists from JSON to tuples. Raises
    ConfigError for a value of another type, or outside the limits."""
    config_type: Any = type(config)
    hints = field_types(config_type)
    for field in dataclasses.fields(config):
        try:
            value = from_json(hints[field.name], getattr(config, field.name))
            check_limits(field, value)
        except ValueError as error:
            raise ConfigError(f"{field.name}: {error}") from error
        object.__setattr__(config, field.name, value)


def check_choice(name: str, choices: Any, value: object) -> None:
    """Raise ConfigError if an argument is not one of a Literal's choices."""
    try:
        from_json(choices, value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def check_positive(**arguments: int | None) -> None:
    """Raise ConfigError if an argument is not a positive whole number; None is allowed."""
    for name, value in arguments.items():
        if value is not None and not (hasattr(value, "__index__") and value >= 1):
            raise ConfigError(f"{name}: must be a positive whole number, not {value!r}")


def check_limits(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise ValueError if a number, or one in a tuple, is NaN, too large or outside the limits."""
    limits = field.metadata.get("limits", {})
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, int | float):
            continue
        if not all(LIMITS[key][1](number, limit) for key, limit in limits.items()):
            expected = " and ".join(f"{LIMITS[key][0]} {limits[key]:.15g}" for key in limits)
            actual = f"{number:.15g}" if isinstance(number, float) else number
            raise ValueError(f"must be {expected}, not {actual}")
        largest = LARGEST_FLOAT if isinstance(number, float) else LARGEST_INT
        if not abs(number) <= largest:  # or NaN
            raise ValueError(f"must be at most {largest:g}, not {number}")


def from_text(hint: Any, text: str) -> Any:
    """Parse text as the annotated type: a number, bool, string, Literal, or a comma-separated tuple
    of them.

    Raises:
        ValueError: the text is not of that type.
    """
    for value in ([_parse_scalar(part) for part in text.split(",")], _parse_scalar(text), text):
        with contextlib.suppress(ValueError, OverflowError):
            return from_json(hint, value)
    raise ValueError(f"expected {describe_type(hint)}, not '{text}'")


def _parse_scalar(text: str) -> int | float | bool | str:
    """Parse text as a JSON number or bool if possible."""
    if text in ("true", "false"):
        return text == "true"
    for number_type in (int, float):
        with contextlib.suppress(ValueError):
            return number_type(text)
    return text


def describe_type(hint: Any) -> str:
    """Describe a type for an error message."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(describe_type(arg) for arg in args if arg is not types.NoneType)
    if origin is tuple:
        items = "one or more numbers" if ... in args else f"{len(args)} values"
        return f"{items} separated by commas"
    if origin is Literal:
        return join_or(map(str, args))
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def parse_size(text: str, expected: str = "a size such as 384 or 192x320 (height x width)") -> Size:
    """Parse "384" or "192x320" as (height, width).

    Args:
        expected: the expected value, for the error message.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"'{text}' is not {expected}")
    return int(parts[0]), int(parts[-1])


def as_size(size: int | Size | None) -> Size | None:
    """Return (height, width) for a size that may be one number for both sides.

    Raises:
        ConfigError: it is neither a positive whole number nor a pair of them.
    """
    if size is None:
        return None
    try:
        sides = size if isinstance(size, (tuple, list)) else (size, size)
        height, width = map(operator.index, sides)
        if min(height, width) < 1:
            raise ValueError
    except (TypeError, ValueError):
        what = f"resolution: must be a positive whole number or (height, width), not {size!r}"
        raise ConfigError(what) from None
    return height, width


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Parse comma-separated sizes, without duplicates."""
    return tuple(dict.fromkeys(map(parse_size, text.split(","))))


parse_grid = functools.partial(parse_size, expected="a grid such as 24 or 10x20 (rows x columns)")


def parse_output(text: str) -> str:
    """Validate the path of an output and return it unchanged."""
    if text == "-":
        raise ValueError("cannot write to stdout ('-')")
    return text


def parse_directory(text: str, expected: str = "a directory") -> str:
    """Validate the path of an output directory and return it unchanged.

    Args:
        expected: the expected value, for the error message.
    """
    parse_output(text)
    if text.lower().endswith(NOT_DIRECTORIES) and not os.path.isdir(text):
        raise ValueError(f"expected {expected}, not '{text}'")
    return text


def parse_device(text: str) -> str:
    """Validate "auto", "cpu", "mps", "cuda" or "cuda:1" and return it unchanged."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise ValueError(f"expected auto, cpu, cuda, cuda:N or mps, not '{text}'")
    return text


def key_value(config_type: Any, **fixed: str) -> Callable[[str], tuple[str, Any]]:
    """Return a parser of "depth=6" as ("depth", 6), a field of a dataclass and its value.

    Args:
        fixed: fields that cannot be set this way, each with what sets it instead.
    """

    def parse(text: str) -> tuple[str, Any]:
        hints = {k: hint for k, hint in field_types(config_type).items() if k not in fixed}
        key, separator, value = text.partition("=")
        if separator and key in fixed:
            raise ValueError(f"{key} is set by {fixed[key]}")
        if not separator or key not in hints:
            problem = f"unknown field '{key}'" if separator else f"'{text}' is not KEY=VALUE"
            raise ValueError(f"{problem}; fields are {', '.join(hints)}")
        hint, field = hints[key], next(f for f in dataclasses.fields(config_type) if f.name == key)
        if get_origin(hint) is tuple and hint != Size:
            with contextlib.suppress(ValueError):  # one number for all channels
                value = ",".join([str(float(value))] * len(get_args(hint)))
        try:
            parsed = parse_size(value) if hint == Size else from_text(hint, value)
            check_limits(field, parsed)
            return key, parsed
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    return parse
