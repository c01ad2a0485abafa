"""`fleetplane lamps` and `fleetplane agent lamp`."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.clients.rest_client import Place, connect, rest_options


@click.group()
def lamps() -> None:
    """Lamps, and whether they are lit."""


@lamps.command("list")
@rest_options
def list_lamps(**where: Any) -> None:
    """List every lamp."""
    with connect(Place(**where)) as server:
        for lamp in server.call("GET", "/v1/lamps")["items"]:
            click.echo(f"{lamp['name']}  {'lit' if lamp['lit'] else 'dark'}")


@click.command()
@click.option("--address", required=True, metavar="HOST:PORT", help="The listener `lamps` of a server.")
@click.option("--name", required=True, help="Of the lamp.")
@click.option("--lit/--dark", default=True, show_default=True)
def lamp(*, address: str, name: str, lit: bool) -> None:
    """Report a lamp of this machine."""
    import asyncio

    from fleetplane_lamps.agent import LampAgentSettings, run_lamp_agent

    asyncio.run(run_lamp_agent(LampAgentSettings(address=address, name=name, lit=lit)))
