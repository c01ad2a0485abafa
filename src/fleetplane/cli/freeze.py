"""`fleetplane freeze`, `unfreeze` and `freezes`: stopping controllers of any domain at any scope.

Over REST: the owner at the server's own socket, anyone else with a token of the role `fleet.operator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place

FREEZES_PATH = "/v1/fleet/freezes"
EVERY_DOMAIN = "*"

domain_option = click.option(
    "--domain",
    "domains",
    multiple=True,
    metavar="DOMAIN",
    help="Whose controllers, such as edge; can be given often. Every domain's when not given.",
)
scope_option = click.option(
    "--scope", default="", help="Where, such as tenant/acme or boards/board/5; everywhere when not given."
)


@click.command()
@domain_option
@scope_option
@click.option("--reason", required=True, help="For whoever wonders why nothing happens.")
@click.option("--for", "seconds", type=DURATION, help="Until it ends by itself; until lifted when not given.")
@rest_options
def freeze(domains: tuple[str, ...], scope: str, reason: str, seconds: float | None, **where: Any) -> None:
    """Stop controllers from acting, at a scope and below it.

    They go on observing: reports are taken and states shown. What people ask for in so many words, such as
    a run or a write to a pin, goes on too. `fleetplane explain` says of what is frozen that it is.
    """
    from datetime import UTC, datetime, timedelta

    body: dict[str, object] = {"scope": scope, "domains": list(domains) or [EVERY_DOMAIN], "reason": reason}
    if seconds is not None:
        body["expires_at"] = (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()
    with connect(Place(**where)) as client:
        made = client.call("POST", FREEZES_PATH, body=body)["freezes"]
    for one in made:
        until = f"until {one['expires_at']}" if one["expires_at"] else "until lifted"
        click.echo(f"{_told(one)} is frozen {until}")


@click.command()
@domain_option
@scope_option
@rest_options
def unfreeze(domains: tuple[str, ...], scope: str, **where: Any) -> None:
    """Let controllers act again, unless a wider freeze holds.

    Ends the freeze of these domains at this very scope; without --domain the one of every domain.
    """
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.kernel.errors import NotFound

    wanted = list(domains) or [EVERY_DOMAIN]
    where_told = _told({"scope": scope, "domains": wanted})
    query = [("scope", scope), *(("domain", domain) for domain in wanted)]
    with connect(Place(**where)) as client:
        try:
            client.call("DELETE", FREEZES_PATH, query=query)
        except NotFound:
            message = f"there is no freeze of {where_told} itself"
            hint = "`fleetplane freezes` lists them"
            raise CommandFailed(Exit.NOT_FOUND, message, hint=hint) from None
    click.echo(f"{where_told} is not frozen any more")


@click.command()
@rest_options
@format_option
def freezes(output: Format, **where: Any) -> None:
    """List freezes, with who set them and why."""
    with connect(Place(**where)) as client:
        found = client.call("GET", FREEZES_PATH)["freezes"]
    rows = [
        [
            Cell(text=",".join(one["domains"])),
            Cell(text=one["scope"] or "everywhere"),
            Cell(text=one["frozen_at"]),
            Cell(text=one["expires_at"] or "-"),
            Cell(text=one["actor"]),
            Cell(text=one["reason"]),
        ]
        for one in found
    ]
    columns = ("DOMAINS", "SCOPE", "SINCE", "ENDS", "BY", "REASON")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="Nothing is frozen."))


def _told(freeze: Mapping[str, Any]) -> str:
    domains = freeze["domains"]
    whose = "every domain" if EVERY_DOMAIN in domains else ", ".join(domains)
    return f"{whose} at {freeze['scope']}" if freeze["scope"] else whose
