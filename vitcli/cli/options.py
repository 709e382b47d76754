"""Options that several commands share, each written once, and options made from the fields of a
configuration (`vitcli/fields.py`)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_origin

import typer

from vitcli.cli.rows import FORMATS
from vitcli.config import TASK_DEFAULTS, PosembMethod
from vitcli.errors import ConfigError
from vitcli.fields import (
    Option,
    Size,
    check_value,
    field_types,
    from_text,
    parse_device,
    parse_size,
)


def _remember_debug(ctx: typer.Context, wanted: bool) -> bool:
    """The error boundary (cli/main.py) looks it up."""
    ctx.meta["debug"] = wanted
    return wanted


def complete_model(incomplete: str) -> list[str]:
    """Names for the shell: those that ship and those of the registry."""
    from vitcli.hub import registry

    known = [*registry.aliases(), *registry.shipped(), *registry.entries()]
    return [name for name in dict.fromkeys(known) if name.startswith(incomplete)]


def parse_resolution(text: str) -> Size:
    """ "384" or "192x320" as (height, width)."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def spare(read: Iterable[str | None], written: str | None, option: str) -> None:
    """Refuses to write text over a file that the command reads, or over any image."""
    if written and os.path.isfile(written):
        from vitcli.data.files import is_image

        target = os.path.realpath(written)
        if any(target == os.path.realpath(name) for name in read if name):
            raise typer.BadParameter(
                f"'{written}' is an input and would be overwritten", param_hint=option
            )
        if is_image(target):
            raise typer.BadParameter(
                f"'{written}' is an image and would be overwritten", param_hint=option
            )


def _check_device(name: str) -> str:
    try:
        return parse_device(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def drawable(path: str | None) -> str | None:
    """Refuses, before the work, an image of a kind that cannot be drawn."""
    if path is not None and not path.lower().endswith((".png", ".pdf", ".svg")):
        raise typer.BadParameter(f"'{path}' does not end in .png, .pdf or .svg")
    return path


Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME|PATH|REPO",
        help="Model name (see `vit models`), run directory, checkpoint file, or Hub repo "
        "(org/name[@revision]); ./x is always a path. The names default and default-pretrained "
        "stand for the models that ship with vit.",
        autocompletion=complete_model,
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        metavar="FILE",
        help="File with the names of the dataset's classes, one per line, in index order.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        "-b",
        min=1,
        metavar="N",
        help="Images per batch.  [default: depends on the device]",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda[:N]|mps",
        help="Device to run on.",
        callback=_check_device,
    ),
]
Precision = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option(
        "--precision", help="Precision; auto is bf16 if the hardware supports it, else fp32."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the results to FILE instead of stdout, in the format of its suffix: "
        f"{', '.join(FORMATS)} or .txt.",
    ),
]
PosembResize = Annotated[
    PosembMethod,
    typer.Option("--posemb-method", help="Interpolation method for position embeddings."),
]
OldGrid = Annotated[
    str | None,
    typer.Option(
        "--old-grid",
        metavar="RxC",
        help="Rows and columns of the stored position embeddings, if the file does not specify "
        "them.",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Do not use the network.")]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Accept Hub repos that only have pickled weights; no code in them is run.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would be done without doing it.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Print the traceback if the command fails.", callback=_remember_debug
    ),
]


# ---------------------------------------------------------------------------------------------
# Options made from fields


class _Place(NamedTuple):
    """An option and the field that it sets."""

    path: tuple[str, ...]
    """Names of fields from the configuration down, as ("augment", "mixup")."""
    field: dataclasses.Field[Any]
    hint: Any
    option: Option
    group: str | None
    default: Any


def _places(
    config: Any, task: str, defaults: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[_Place]:
    hints, group = field_types(config), None
    for field in dataclasses.fields(config):
        hint, declared = hints[field.name], field.metadata.get("option")
        default = defaults.get(field.name, field.default)
        if dataclasses.is_dataclass(hint):
            inner = default if isinstance(default, dict) else {}
            yield from _places(hint, task, inner, (*path, field.name))
        elif declared is not None:
            group = declared.group or group
            if declared.task in (None, task):
                yield _Place((*path, field.name), field, hint, declared, group, default)


def from_fields(
    config: Any, task: str = "", without: Iterable[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command an option for each field of a dataclass that declares one, before its own
    parameters. What was given on the command line reaches the command as `given`: {field: value},
    with a dict for a field that is a dataclass.

    Args:
        config: the dataclass; fields of dataclasses in it become options as well.
        task: the command's entry in TASK_DEFAULTS.
        without: the command's own parameters that it goes without.
    """
    places = list(_places(config, task, TASK_DEFAULTS.get(task, {})))
    names = [place.option.names[0].partition("/")[0][2:].replace("-", "_") for place in places]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            given: dict[str, Any] = {}
            for name, place in zip(names, places, strict=True):
                value = values.pop(name)
                if value is not None and value != []:
                    inner = given
                    for step in place.path[:-1]:
                        inner = inner.setdefault(step, {})
                    inner[place.path[-1]] = dict(value) if isinstance(value, list) else value
            command(given=given, **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        made = [
            inspect.Parameter(name, keyword, default=None, annotation=_annotation(place))
            for name, place in zip(names, places, strict=True)
        ]
        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=keyword) for p in own if p.name not in {"given", *without}]
        run.__signature__ = inspect.Signature([*made, *kept])  # type: ignore[attr-defined]
        return run

    return decorate


def _annotation(place: _Place) -> Any:
    """The annotation of an option that is None unless it is given."""
    field, hint, declared = place.field, place.hint, place.option
    settings: dict[str, Any] = {
        "help": declared.help + _shown_default(place),
        "metavar": declared.metavar,
        "rich_help_panel": place.group,
    }

    def parse(text: str) -> Any:
        if not text:
            raise typer.BadParameter("the value is empty")
        try:
            value = from_text(hint, text) if declared.parse is None else declared.parse(text)
            check_value(field, hint, value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    kind: Any = list[str] if get_origin(hint) is dict else str
    if hint is bool or (get_origin(hint) is Literal and declared.parse is None):
        kind = hint
    else:
        settings["parser"] = parse
    if "--model" in declared.names:
        settings["autocompletion"] = complete_model
    return Annotated[kind | None, typer.Option(*declared.names, **settings)]


def _shown_default(place: _Place) -> str:
    """A field's default as one would type it, unless it is None or a plain flag."""
    value, (on, _, off) = place.default, place.option.names[0].replace("--", "").partition("/")
    if value is dataclasses.MISSING or value is None or (isinstance(value, bool) and not off):
        return ""
    if isinstance(value, bool):
        text = on if value else off
    else:
        parts = value if isinstance(value, tuple) else (value,)
        text = ",".join(f"{p:g}" if isinstance(p, float) else str(p) for p in parts)
    return f"  [default: {text}]"


def given_options(config: Any, task: str, given: Mapping[str, Any]) -> list[Option]:
    """The options that were given, by their declarations."""

    def holds(values: Any, path: tuple[str, ...]) -> bool:
        return not path or (path[0] in values and holds(values[path[0]], path[1:]))

    return [place.option for place in _places(config, task, {}) if holds(given, place.path)]


def replaced(config: Any, changes: Mapping[str, Any]) -> Any:
    """A dataclass with other values, given as `from_fields` gives them; of a class, an object.

    Raises:
        BadParameter: the values contradict each other.
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
        raise typer.BadParameter(str(error)) from error
