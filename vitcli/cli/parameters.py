"""Build commands from dataclasses, with an option or argument for each field that declares one
(`vitcli/fields.py`), and format their help, with options under headings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

import typer
from typer.core import TyperCommand

from vitcli.cli import output
from vitcli.config import DATA, TASK_DEFAULTS
from vitcli.errors import ConfigError
from vitcli.fields import Option, check_value, field_types, from_text
from vitcli.machine import is_launched

OTHERS = "Other options"
"""The last heading of `--help`."""
MODELS = ("NAME|PATH|REPO", "MODEL", "SRC", "CHECKPOINT", "NAME")
"""Metavars of model names, for shell completion."""


class UsageError(typer.BadParameter):
    """Conflicting or missing options, as opposed to an invalid value of one option."""

    def format_message(self) -> str:
        return self.message


class GroupedCommand(TyperCommand):
    """A command whose help lists options under the headings that they declare (Typer's
    `rich_help_panel`), in order of appearance, after data options and those without a heading."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.former: dict[str, str] = {}
        """{deprecated name: current name}; the first long name of an option is the current one."""
        for parameter in self.params:
            present, *former = [n for n in parameter.opts if n.startswith("--")] or [""]
            parameter.opts = [name for name in parameter.opts if name not in former]
            self.former |= dict.fromkeys(former, present)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for place, word in enumerate(args):
            name, equals, value = word.partition("=")
            if name == "--":
                break
            if present := self.former.get(name):
                if not (ctx.resilient_parsing or is_launched()):  # the launcher already warned
                    output.warning(f"{name} is deprecated: use {present}")
                args[place] = present + equals + value
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], DATA: [], "Options": []}
        for parameter in cast(list[Any], self.get_params(ctx)):
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                heading = OTHERS if parameter.name == "help" else parameter.rich_help_panel
                heading = heading or ("Arguments" if is_argument else "Options")
                name = parameter.metavar if is_argument else record[0]  # without a Python type
                sections.setdefault(heading, []).append((name, record[1]))
        sections[OTHERS] = sections.pop(OTHERS)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of an included or registered model."""
    from vitcli.hub import registry

    return [name for name in dict.fromkeys(registry.names()) if name.startswith(incomplete)]


class _BoundOption(NamedTuple):
    """An option and the field it sets."""

    path: tuple[str, ...]
    """Field names from the configuration down, such as ("augment", "mixup")."""
    field: dataclasses.Field[Any]
    hint: Any
    option: Option
    help: str
    group: str | None
    default: Any


def _bound_options(
    config: Any, task: str, defaults: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[_BoundOption]:
    hints, group, owner = field_types(config), None, None
    for field in dataclasses.fields(config):
        hint, declared = hints[field.name], field.metadata.get("option")
        default = defaults.get(field.name, field.default)
        if dataclasses.is_dataclass(hint):
            inner = default if isinstance(default, dict) else {}
            yield from _bound_options(hint, task, inner, (*path, field.name))
        elif declared is not None:
            by = next(k for k in config.__mro__ if field.name in inspect.get_annotations(k))
            group, owner = declared.group or (group if by is owner else None), by
            if declared.task in (None, task):
                help = declared.help_of(task)
                yield _BoundOption((*path, field.name), field, hint, declared, help, group, default)


def command(kind: Any, config: Any = None, task: str = "") -> Callable[[Any], Callable[..., None]]:
    """Turn a function into a command: Typer sees an option or argument for each field of a
    dataclass that declares one, and the function is called with an instance of it.

    Args:
        kind: the dataclass, with the fields of `CommonOptions`.
        config: a configuration whose fields, including those of nested dataclasses, also become
            options. Those given on the command line are the function's second argument:
            {field: value}, with a dict for a nested dataclass.
        task: the key of the command in TASK_DEFAULTS.
    """
    own = list(_bound_options(kind, task, {}))
    others = list(_bound_options(config, task, TASK_DEFAULTS.get(task, {}))) if config else []

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            args = apply_changes(kind, _given(own, values))
            output.quiet, output.debug = args.quiet, args.debug
            function(args, _given(others, values)) if config else function(args)

        parameters = [
            inspect.Parameter(
                "_".join(place.path),
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if _is_required(place, own) else None,
                annotation=_annotation(place, _is_required(place, own)),
            )
            for place in (*others, *own)
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _given(places: Iterable[_BoundOption], values: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for path, _, hint, *_ in places:
        value = values.get("_".join(path))
        if value is not None and value != []:
            inner = given
            for step in path[:-1]:
                inner = inner.setdefault(step, {})
            inner[path[-1]] = dict(value) if get_origin(hint) is dict else value
    return given


def _is_required(place: _BoundOption, own: list[_BoundOption]) -> bool:
    """Whether Typer requires it. Required options of a configuration are left to the command."""
    field, missing = place.field, dataclasses.MISSING
    return place in own and field.default is missing and field.default_factory is missing


def _annotation(place: _BoundOption, required: bool) -> Any:
    """Return the Typer annotation of an argument, or of an option that is None unless given."""
    field, hint, declared = place.field, place.hint, place.option
    settings: dict[str, Any] = {
        "help": place.help + _shown_default(place),
        "metavar": declared.metavar,
        "rich_help_panel": place.group,
        "hidden": not place.help,
    }

    def parse(text: str) -> Any:
        if not text:
            raise typer.BadParameter("the value is empty")
        try:
            value = from_text(item, text) if declared.parse is None else declared.parse(text)
            check_value(field, hint, value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    several = get_origin(hint) in (dict, list)
    item = get_args(hint)[-1] if several else hint
    kind: Any = list[str] if several else str
    if hint is bool:
        kind = bool
    else:
        settings["parser"] = parse
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    if choices := [choice for part in literals for choice in get_args(part)]:
        settings["metavar"] = settings["metavar"] or "|".join(choices)
        settings["autocompletion"] = lambda: choices
    if declared.metavar in MODELS:
        settings["autocompletion"] = complete_model
    if declared.names:
        parameter: Any = typer.Option(*declared.names, **settings)
    else:
        parameter = typer.Argument(**settings, show_default=False)
    return Annotated[kind if required else kind | None, parameter]


def _shown_default(place: _BoundOption) -> str:
    """Format a default as typed on the command line; empty for None and for a plain flag."""
    value = place.default
    if value in (dataclasses.MISSING, None, ()):
        return ""
    if isinstance(value, bool):
        on, _, off = place.option.names[0].replace("--", "").partition("/")
        if not off:
            return ""
        text = on if value else off
    else:
        parts = value if isinstance(value, tuple) else (value,)
        text = ",".join(f"{p:g}" if isinstance(p, float) else str(p) for p in parts)
    return f"  [default: {text}]"


def given_options(config: Any, task: str, given: Mapping[str, Any]) -> Iterator[tuple[Option, Any]]:
    """Yield the given options with their values."""
    for place in _bound_options(config, task, {}):
        value: Any = given
        for step in place.path:
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            yield place.option, value


def check_effects(
    config: Any, task: str, given: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Raise UsageError if a given option has no effect in combination with the others. The number 0
    turns an option off and is always accepted.

    Args:
        values: the values of all options, given or not.
    """
    for declared, value in given_options(config, task, given):
        requirement, is_off = declared.requires, value == 0 and value is not False
        if requirement and not is_off and not requirement.holds(SimpleNamespace(**values)):
            raise UsageError(f"{declared.names[0]} {requirement.message}")


def apply_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass, or an instance of a class, with `changes` as from `command`.

    Raises:
        UsageError: the values conflict.
    """

    def replace(config: Any, changes: Mapping[str, Any]) -> Any:
        is_class = isinstance(config, type)
        kind: Any = config if is_class else type(config)
        hints, fields = field_types(kind), dict(changes)
        for name, value in changes.items():
            if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
                fields[name] = replace(getattr(config, name, hints[name]), value)
        return config(**fields) if is_class else dataclasses.replace(config, **fields)

    try:
        return replace(config, changes)
    except ConfigError as error:
        raise UsageError(str(error)) from error
