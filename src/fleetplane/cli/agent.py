"""`fleetplane agent`: the node side as a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

from fleetplane.cli.lazy import DeclaredGroup, LazyEntry


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
