"""Build commands from dataclasses, with an option or argument for each field that declares one
(`vitcli/fields.py`), and format their help, with options under headings."""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

import typer
from typer.core import TyperCommand

from vitcli.cli import output
from vitcli.config import DATA, TASK_DEFAULTS
from vitcli.fields import Option, check_limits, field_types, from_text
from vitcli.machine import is_launched

OTHER = "Other options"
"""The last heading of `--help`."""
MODELS = ("NAME|PATH|REPO", "MODEL", "SRC", "CHECKPOINT", "NAME")
"""Metavars of model names, for shell completion."""
PATHS = re.compile("PATH|FILE|DIR|IMAGES|MODEL|SRC|DST|OUT|CHECKPOINT")
"""What the metavars of options that take a path contain."""
_UNBROKEN = re.compile(r"-|\[[^]]{,20}\]")
"""Where a line of help is not broken: at hyphens, as of options, and in short defaults."""
_UNBREAKABLE = {ord(" "): "\xa0", ord("-"): "\u2011"}
_BREAKABLE = {ord(value): chr(key) for key, value in _UNBREAKABLE.items()}


class UsageError(typer.BadParameter):
    """Conflicting or missing options, as opposed to an invalid value of one option."""

    def format_message(self) -> str:
        return self.message


class GroupedCommand(TyperCommand):
    """A command whose help lists options under the headings that they declare (Typer's
    `rich_help_panel`), in order of appearance, after data options and those without a heading."""

    allow_extra_args = True  # reported by `parse_args`

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.renamed: dict[str, str] = {}
        """{deprecated name: current name}; the first long name of an option is the current one."""
        for parameter in self.params:
            current, *former = [n for n in parameter.opts if n.startswith("--")] or [""]
            parameter.opts = [name for name in parameter.opts if name not in former]
            self.renamed |= dict.fromkeys(former, current)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        params, names = cast(list[Any], self.params), list[str]()
        is_strict = not ctx.resilient_parsing
        has_one_dataset = any("--data" in p.opts and not p.multiple for p in params)
        for index, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            if name == "--":
                break
            if name == "--data" and name in names and has_one_dataset and is_strict:
                hint = "to use several datasets, list their images in a CSV file"
                raise UsageError(f"--data is given more than once\nhint: {hint}", ctx)
            names.append(name)
            if current := self.renamed.get(name):
                if is_strict and not is_launched():  # the launcher already warned
                    output.warning(f"{name} is deprecated: use {current}")
                args[index] = current + equals + value
        rest = super().parse_args(ctx, args)
        if rest and is_strict:
            hint = (
                "a value follows its option, as in --data ./flowers; separate several values by "
                "commas, and quote spaces"
            )
            raise UsageError(f"unexpected argument '{rest[0]}'\nhint: {hint}", ctx)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).translate(_BREAKABLE)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], DATA: [], "Options": []}
        for parameter in cast(list[Any], self.get_params(ctx)):
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                heading = OTHER if parameter.name == "help" else parameter.rich_help_panel
                heading = heading or ("Arguments" if is_argument else "Options")
                name = parameter.metavar if is_argument else record[0]  # without a Python type
                text = _UNBROKEN.sub(lambda found: found[0].translate(_UNBREAKABLE), record[1])
                sections.setdefault(heading, []).append((name, text))
        sections[OTHER] = sections.pop(OTHER)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of an included or registered model."""
    from vitcli.hub import registry

    return [name for name in dict.fromkeys(registry.names()) if name.startswith(incomplete)]


class BoundOption(NamedTuple):
    """An option and the field it sets."""

    name: str
    """The field names from the configuration down, such as "augment.mixup"."""
    field: dataclasses.Field[Any]
    hint: Any
    option: Option
    help: str
    group: str | None
    default: Any


def _bound_options(config: Any, task: str, prefix: str = "") -> Iterator[BoundOption]:
    hints, group, owner = field_types(config), None, None
    for field in dataclasses.fields(config):
        name, hint, option = prefix + field.name, hints[field.name], field.metadata.get("option")
        if dataclasses.is_dataclass(hint):
            yield from _bound_options(hint, task, f"{name}.")
        elif option is not None:
            base = next(cls for cls in config.__mro__ if field.name in inspect.get_annotations(cls))
            group, owner = option.group or (group if base is owner else None), base
            if option.task in (None, task):
                default = TASK_DEFAULTS.get(task, {}).get(name, field.default)
                help = option.help_of(task)
                yield BoundOption(name, field, hint, option, help, group, default)


def command(cls: Any, config: Any = None, task: str = "") -> Callable[[Any], Callable[..., None]]:
    """Turn a function into a command: Typer sees an option or argument for each field of a
    dataclass that declares one, and the function is called with an instance of it.

    Args:
        cls: the dataclass, with the fields of `CommonOptions`.
        config: a configuration whose fields, including those of nested dataclasses, also become
            options. Those given on the command line are the function's second argument, by field:
            {"augment.mixup": 0.2}; that of `--set depth=6` is "overrides.depth".
        task: the key of the command in TASK_DEFAULTS.
    """
    options = list(_bound_options(cls, task))
    extra = list(_bound_options(config, task)) if config else []

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**values: Any) -> None:
            given = _collect_given(options, values)
            args = apply_changes(cls, given)
            output.quiet, output.debug = args.quiet, args.debug
            check_effects(cls, task, given, vars(args))
            function(args, _collect_given(extra, values)) if config else function(args)

        # Required options of a configuration are left to the command.
        parameters = [_parameter(bound, required=False) for bound in extra]
        for bound in options:
            defaults = bound.field.default, bound.field.default_factory
            required = all(default is dataclasses.MISSING for default in defaults)
            parameters.append(_parameter(bound, required))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _collect_given(options: Iterable[BoundOption], values: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for bound in options:
        value = values.get(bound.name.replace(".", "_"))
        if get_origin(bound.hint) is dict:
            given |= {f"{bound.name}.{key}": item for key, item in value or ()}
        elif value is not None and value != []:
            given[bound.name] = value
    return given


def _parameter(bound: BoundOption, required: bool) -> inspect.Parameter:
    """Return the parameter in which Typer sees an argument, or an option that is None unless
    given."""
    field, hint, option = bound.field, bound.hint, bound.option
    settings: dict[str, Any] = {
        "help": bound.help + _format_default(bound),
        "metavar": option.metavar,
        "rich_help_panel": bound.group,
        "hidden": not bound.help,
    }

    def parse(text: str) -> Any:
        if not text:
            raise typer.BadParameter("the value is empty")
        if PATHS.search(option.metavar or ""):
            at = text[: text.startswith("@~")]  # of a list of images
            text = at + os.path.expanduser(text[len(at) :])
        try:
            value = from_text(item, text) if option.parse is None else option.parse(text)
            check_limits(field, value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    is_repeated = get_origin(hint) in (dict, list)
    item = get_args(hint)[-1] if is_repeated else hint
    value_type: Any = list[str] if is_repeated else str
    if hint is bool:
        value_type = bool
    else:
        settings["parser"] = parse
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    if choices := [choice for part in literals for choice in get_args(part)]:
        settings["metavar"] = settings["metavar"] or "|".join(choices)
        settings["autocompletion"] = lambda: choices
    if option.metavar in MODELS:
        settings["autocompletion"] = complete_model
    if option.names:
        parameter: Any = typer.Option(*option.names, **settings)
    else:
        settings["metavar"] += "..." if is_repeated else ""
        parameter = typer.Argument(**settings, show_default=False)
    return inspect.Parameter(
        bound.name.replace(".", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[value_type if required else value_type | None, parameter],
    )


def _format_default(bound: BoundOption) -> str:
    """Format a default as typed on the command line; empty for None and for a plain flag."""
    value = bound.default
    if value in (dataclasses.MISSING, None, ()):
        return ""
    if isinstance(value, bool):
        on, _, off = bound.option.names[0].replace("--", "").partition("/")
        if not off:
            return ""
        text = on if value else off
    else:
        items = value if isinstance(value, tuple) else (value,)
        text = ",".join(f"{p:g}" if isinstance(p, float) else str(p) for p in items)
    return f"  [default: {text}]"


def given_options(
    config: Any, task: str, given: Mapping[str, Any]
) -> Iterator[tuple[BoundOption, Any]]:
    """Yield the given options with their values; None for KEY=VALUE."""
    names = {*given, *(name.rpartition(".")[0] for name in given)}
    for bound in _bound_options(config, task):
        if bound.name in names:
            yield bound, given.get(bound.name)


def check_effects(
    config: Any, task: str, given: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """Raise UsageError if a given option has no effect in combination with the others. If 0 is the
    least number that an option accepts, it turns the option off and is always accepted.

    Args:
        values: the values of all options, given or not.
    """
    for bound, value in given_options(config, task, given):
        is_off = value == bound.field.metadata["limits"].get("min") == 0
        requirement = bound.option.requires
        if requirement and not is_off and not requirement.holds(SimpleNamespace(**values)):
            raise UsageError(f"{bound.option.names[0]} {requirement.message}")


def apply_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass, or an instance of a class, with `changes` as from `command`.

    Raises:
        ConfigError: the values conflict.
    """
    is_class = isinstance(config, type)
    cls: Any = config if is_class else type(config)
    hints = field_types(cls)
    fields: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
        else:
            fields[name] = value
    for name, values in nested.items():
        old = getattr(config, name, None)
        if get_origin(hints[name]) is dict:
            fields[name] = {**(old or {}), **values}
        else:
            fields[name] = apply_changes(old or hints[name], values)
    return config(**fields) if is_class else dataclasses.replace(config, **fields)
