"""What the help of all commands has in common: options under headings."""

from __future__ import annotations

from typing import Any, cast

from typer.core import TyperCommand

OTHERS = "Other options"
"""The last heading."""


class GroupedCommand(TyperCommand):
    """A command whose options are listed under the headings that they declare (Typer's
    `rich_help_panel`), in order of appearance; those without one come first."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in cast(list[Any], self.get_params(ctx)):
            names = parameter.opts
            # Of several long names the first is the option's; the others are former ones.
            long = [name for name in names if name.startswith("--")]
            parameter.opts = [name for name in names if name not in long[1:]]
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                heading = OTHERS if parameter.name == "help" else parameter.rich_help_panel
                heading = heading or ("Arguments" if is_argument else "Options")
                sections.setdefault(heading, []).append(record)
            parameter.opts = names
        sections[OTHERS] = sections.pop(OTHERS)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
