"""What all commands have in common: options in groups, so that a newcomer finds what matters in
`--help`, and no empty words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter


class GroupedCommand(TyperCommand):
    """A command whose options are listed under the headings of a table, in the table's order."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """{heading: names of parameters}; what is in none comes last."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Refuses what is empty: a variable of the shell that is not set, not the folder here."""
        rest = super().parse_args(ctx, args)
        for parameter in self.get_params(ctx):
            value = ctx.params.get(parameter.name or "")
            if value == "" or (isinstance(value, (list, tuple)) and "" in value):
                raise typer.BadParameter("it is empty", ctx, cast(Any, parameter))
        return rest

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        if not self.groups:
            super().format_options(ctx, formatter)
            return
        records = {p.name: r for p in self.get_params(ctx) if (r := p.get_help_record(ctx))}
        for heading, names in self.groups.items():
            listed = [records.pop(name) for name in names if name in records]
            with formatter.section(heading):
                formatter.write_dl(listed)
        with formatter.section("Other options"):
            formatter.write_dl(list(records.values()))
