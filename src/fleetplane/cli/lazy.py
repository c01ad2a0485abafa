"""Command groups that know their commands' names and help, and import one only to run it.

`fleetplane --help` must be there before the finger leaves the key; gRPC and SQLAlchemy take longer
to import than everything else together.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    target: str
    """`module:attribute` of a click command."""
    help: str


class LazyGroup(click.Group):
    """A group by table. The help of a command in the table stands in the table too."""

    entries: ClassVar[Mapping[str, Entry]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.entries})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.entries.get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            if name in self.entries:
                rows.append((name, self.entries[name].help))
            elif (command := super().get_command(ctx, name)) is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=90)))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            nearest = difflib.get_close_matches(args[0], known, n=1)
            advice = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)
