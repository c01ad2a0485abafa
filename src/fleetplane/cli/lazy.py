"""Command groups that know their commands' names and help, and import one only to run it; `fleetplane agent`.

`fleetplane --help` must be there before the finger leaves the key; gRPC and SQLAlchemy take longer
to import than everything else together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Literal

import click

if TYPE_CHECKING:
    from fleetplane.domains.declaration import Declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyEntry:
    target: str
    """`module:attribute` of a click command."""
    help: str


class LazyGroup(click.Group):
    """A group by table. The help of a command in the table stands in the table too."""

    entries: ClassVar[Mapping[str, LazyEntry]] = {}

    def table(self) -> Mapping[str, LazyEntry]:
        """The commands that are imported when they run; groups that learn of more add them here."""
        return self.entries

    def own_entry(self, name: str) -> LazyEntry | None:
        """A command that is known without looking at what else is installed."""
        return self.entries.get(name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.table()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.own_entry(cmd_name) or self.table().get(cmd_name)
        if entry is None:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = entry.target.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows, table = [], self.table()
        for name in self.list_commands(ctx):
            if name in table:
                rows.append((name, table[name].help))
            elif (command := super().get_command(ctx, name)) is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=90)))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.own_entry(args[0]) is not None:
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            import difflib

            nearest = difflib.get_close_matches(args[0], known, n=1)
            advice = f"Did you mean {nearest[0]!r}?" if nearest else f"Known: {', '.join(known)}."
            ctx.fail(f"No such command {args[0]!r}. {advice}")
        return super().resolve_command(ctx, args)


class DeclaredGroup(LazyGroup):
    """A group with the commands that installed domains declare, beside its own."""

    kind: ClassVar[Literal["verbs", "agents"]]

    def own_entry(self, name: str) -> LazyEntry | None:
        """Domains of ours are found in our own folder: reading what is installed costs an agent megabytes."""
        if (known := super().own_entry(name)) is not None:
            return known
        from fleetplane.domains import own

        return self._entries(own.declarations()).get(name)

    def table(self) -> Mapping[str, LazyEntry]:
        from fleetplane.domains import discovery

        return {**self._entries(discovery.installed().declarations), **self.entries}

    def _entries(self, declarations: Iterable[Declaration]) -> dict[str, LazyEntry]:
        return {
            verb.name: LazyEntry(target=verb.target, help=verb.help)
            for domain in declarations
            for verb in (domain.verbs if self.kind == "verbs" else domain.agents)
        }


class AgentVerbs(DeclaredGroup):
    kind = "agents"
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "launch": LazyEntry(
            target="fleetplane.cli.upgrades.launch:launch", help="Run an agent that its server can upgrade."
        )
    }


@click.group(cls=AgentVerbs)
def agent() -> None:
    """Run the node side: report on this machine."""
