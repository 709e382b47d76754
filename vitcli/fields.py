"""Fields of configurations: what each may hold, and the command-line option that sets it.

A field declares its option where it stands, with its type and default:

    steps: int | None = option(None, "--steps N", "Number of optimizer steps.", min=1)

`vitcli/cli/parameters.py` makes the options of a command from such fields. `check_fields` holds
every other source (JSON, Python) to the same choices and limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import os
import re
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from vitcli.errors import ConfigError
from vitcli.typed_json import from_json
from vitcli.weight_files import SUFFIXES

Size = tuple[int, int]
"""(height, width)."""
NOT_DIRECTORIES = (*SUFFIXES, ".onnx", ".json", ".csv", ".txt", ".png", ".jpg", ".pdf", ".svg")
"""Suffixes that a directory is not given on purpose; others, as in "vit_base.augreg", may be."""
LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "min": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "max": ("at most", operator.le),
    "below": ("below", operator.lt),
}
"""Limits of a number: their words, and the comparison that must hold."""


class Requirement(NamedTuple):
    """What an option needs of the others to have an effect."""

    words: str
    """What an error says of the option without it: "requires --optimizer sgd"."""
    holds: Callable[[Any], bool]
    """Whether the options of a command, as attributes, satisfy it."""


@dataclass(frozen=True)
class Option:
    """What the metadata of a field holds as "option"; `option` describes it."""

    names: tuple[str, ...]
    metavar: str | None
    help: str | dict[str, str]
    group: str | None
    parse: Callable[[str], Any] | None = None
    task: str | None = None
    on_resume: bool = False
    requires: Requirement | None = None

    def help_of(self, task: str) -> str:
        """The help of a command."""
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
    """A dataclass field that is a command-line option.

    Args:
        default: the field's default; `...` for a field that must be given.
        usage: the names and the placeholder of the value, as in "--batch-size -b N"; further long
            names are former ones, which `--help` does not show. A placeholder alone, as in
            "IMAGES", makes an argument.
        help: with the default if the field's value does not say it; "" hides the option. Where
            commands differ, {task: help}, with "" for the others.
        group: the heading in `--help` of this option and of those after it in the class.
        parse: makes a value of a word; None: by the field's type (`from_text`).
        task: the only command that has the option; None: all that use the dataclass.
        on_resume: whether a resumed run may be given another value.
        requires: without it the option has no effect, and is refused where it is given.
        limits: any of min and max (included), above and below (excluded), for a number and for
            each number of a tuple.
    """
    words = usage.split(" ")
    names = tuple(word for word in words if word.startswith("-"))
    metavar = " ".join(words[len(names) :]) or None
    declared = Option(names, metavar, help, group, parse, task, on_resume, requires)
    start: dict[str, Any] = {"default": default}
    if default is ...:
        start = {}
    elif default in ({}, []):
        start = {"default_factory": type(default)}
    return dataclasses.field(**start, metadata={"option": declared, "limits": limits})


def limited(default: Any = ..., **limits: float) -> Any:
    """A dataclass field that is no option, with limits as of `option`."""
    start = {} if default is ... else {"default": default}
    return dataclasses.field(**start, metadata={"limits": limits})


@functools.cache
def field_types(kind: Any) -> dict[str, Any]:
    """{name: type} of a dataclass's fields."""
    return get_type_hints(kind)


def check_fields(config: Any) -> None:
    """Raises ConfigError where a field of a dataclass has a value outside its type's choices or
    its limits."""
    kind: Any = type(config)
    hints = field_types(kind)
    for field in dataclasses.fields(config):
        try:
            check_value(field, hints[field.name], getattr(config, field.name))
        except ValueError as error:
            raise ConfigError(f"{field.name}: {error}") from error


def check_choice(name: str, kind: Any, value: object) -> None:
    """Raises ConfigError where an argument is none of a Literal's choices."""
    try:
        _require_choice(kind, value)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _require_choice(kind: Any, value: object) -> None:
    if value not in get_args(kind):
        raise ValueError(f"'{value}' is not one of {', '.join(map(str, get_args(kind)))}")


def check_positive(**arguments: int | None) -> None:
    """Raises ConfigError where an argument is below 1; None is allowed."""
    for name, value in arguments.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is not at least 1")


def check_value(field: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Raises ValueError where a value is none of a Literal's choices, not finite or outside the
    limits."""
    if get_origin(hint) is Literal:
        _require_choice(hint, value)
    limits = field.metadata.get("limits", {})
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"must be a finite number, not {number}")
        if not isinstance(number, int | float):
            continue
        if not all(LIMITS[key][1](number, limit) for key, limit in limits.items()):
            wanted = " and ".join(f"{LIMITS[key][0]} {limits[key]}" for key in limits)
            shown = f"{number:.15g}" if isinstance(number, float) else number
            raise ValueError(f"must be {wanted}, not {shown}")


def from_text(hint: Any, text: str) -> Any:
    """A word as the annotated type: a number, bool, string, Literal, or a tuple of them with
    commas.

    Raises:
        ValueError: it is not of that type.
    """
    for value in ([_scalar(part) for part in text.split(",")], _scalar(text), text):
        with contextlib.suppress(ValueError, OverflowError):
            return from_json(hint, value)
    raise ValueError(f"'{text}' is not {words_of(hint)}")


def _scalar(text: str) -> int | float | bool | str:
    """What a word may mean in JSON."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def words_of(hint: Any) -> str:
    """A type as an error message names it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(words_of(arg) for arg in args if arg is not types.NoneType)
    if origin is tuple:
        count = "one or more numbers" if ... in args else f"{len(args)} values"
        return f"{count} separated by commas"
    if origin is Literal:
        return f"{'one of ' if args[1:] else ''}{', '.join(map(str, args))}"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, str(hint))


def parse_size(text: str, what: str = "a size such as 384 or 192x320 (height x width)") -> Size:
    """ "384" or "192x320" as (height, width).

    Args:
        what: how an error describes such a value.
    """
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"'{text}' is not {what}")
    return int(parts[0]), int(parts[-1])


def parse_sizes(text: str) -> tuple[Size, ...]:
    """Sizes separated by commas, each once."""
    return tuple(dict.fromkeys(map(parse_size, text.split(","))))


parse_grid = functools.partial(parse_size, what="a grid such as 24 or 10x20 (rows x columns)")


def parse_output(text: str) -> str:
    """The path of an output, unchanged."""
    if text == "-":
        raise ValueError("cannot write to stdout ('-')")
    return text


def parse_directory(text: str, wanted: str = "a directory") -> str:
    """The path of an output directory, unchanged.

    Args:
        wanted: what an error asks for.
    """
    parse_output(text)
    if text.lower().endswith(NOT_DIRECTORIES) and not os.path.isdir(text):
        raise ValueError(f"expected {wanted}, not '{text}'")
    return text


def parse_device(text: str) -> str:
    """ "auto", "cpu", "mps", "cuda" or "cuda:1", unchanged."""
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", text):
        raise ValueError(f"'{text}' is not auto, cpu, cuda, cuda:N or mps")
    return text


def key_value(kind: Any, **fixed: str) -> Callable[[str], tuple[str, Any]]:
    """A parser of "depth=6" as ("depth", 6), a field of a dataclass and its value.

    Args:
        fixed: fields that cannot be given, each with what sets it.
    """

    def parse(text: str) -> tuple[str, Any]:
        hints = {k: hint for k, hint in field_types(kind).items() if k not in fixed}
        key, separator, value = text.partition("=")
        if separator and key in fixed:
            raise ValueError(f"{key} is set by {fixed[key]}")
        if not separator or key not in hints:
            wrong = f"unknown field '{key}'" if separator else f"'{text}' is not KEY=VALUE"
            raise ValueError(f"{wrong}; fields are {', '.join(hints)}")
        hint, field = hints[key], next(f for f in dataclasses.fields(kind) if f.name == key)
        if get_origin(hint) is tuple and hint != Size:
            with contextlib.suppress(ValueError):  # one number for the three channels
                value = ",".join([str(float(value))] * len(get_args(hint)))
        try:
            found = parse_size(value) if hint == Size else from_text(hint, value)
            check_value(field, hint, found)
            return key, found
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error

    return parse
