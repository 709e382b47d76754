"""What all commands have in common: options under headings in `--help`, and no empty values."""

from __future__ import annotations

from typing import Any, cast

import typer
from typer.core import TyperCommand


class GroupedCommand(TyperCommand):
    """A command whose options are listed under the headings that they declare (Typer's
    `rich_help_panel`), in order of appearance; those without one come last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses empty values: an unset variable of the shell, not the current directory."""
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name or "")
            if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                raise typer.BadParameter("the value is empty", ctx, cast(Any, parameter))
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in cast(list[Any], self.get_params(ctx)):
            names = parameter.opts
            # Of several long names the first is the option's; the others are former ones.
            long = [name for name in names if name.startswith("--")]
            parameter.opts = [name for name in names if name not in long[1:]]
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                heading = parameter.rich_help_panel or ("Arguments" if is_argument else "")
                sections.setdefault(heading, []).append(record)
            parameter.opts = names
        others = sections.pop("", [])
        title = "Other options" if set(sections) - {"Arguments"} else "Options"
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)
        with formatter.section(title):
            formatter.write_dl(others)
