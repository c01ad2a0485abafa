"""`fleetplane agent`: the node side as a process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

from fleetplane.cli.lazy import DeclaredGroup, Entry


class Agents(DeclaredGroup):
    kind = "agents"
    entries: ClassVar[Mapping[str, Entry]] = {
        "launch": Entry(
            target="fleetplane.cli.upgrades.launch:launch", help="Run an agent that its server can upgrade."
        )
    }


@click.group(cls=Agents)
def agent() -> None:
    """Run the node side: report on this machine."""
