"""`fleetplane whoami` and `can-i`: who one is to a server, and what one may do there, and why."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.exits import Exit
from fleetplane.cli.output import Cell, PrintedTable, emit_table, flat, say
from fleetplane.cli.resources.get import connected
from fleetplane.cli.resources.kinds import Kinds, scope_of, scope_options
from fleetplane.cli.resources.show import OutputForm, emit_data, form_option


@click.command()
@form_option
@rest_options
def whoami(output: OutputForm, **where: Any) -> None:
    """Show who you are to the server, with every role and what gave it."""
    from fleetplane.client import requests

    with connected(where) as fleet:
        told = requests.mapping(fleet.call(requests.whoami()))
        server = str(fleet.endpoint)
    if not output.is_table:
        emit_data(output, {"kind": "whoami", "metadata": {"name": told.get("name")}, **told})
        return
    say(f"{told.get('name')} at {server}")
    rows = [
        [
            Cell(text=str(one.get("role"))),
            Cell(text=str(one.get("scope"))),
            Cell(text=str(one.get("origin") or "-")),
        ]
        for one in told.get("roles") or ()
    ]
    emit_table(PrintedTable(columns=("ROLE", "SCOPE", "GIVEN BY"), rows=rows, empty="no roles"))


@click.command("can-i")
@click.argument("verb")
@click.argument("kind")
@click.argument("name", default="")
@scope_options
@form_option
@rest_options
def can_i(
    verb: str,
    kind: str,
    name: str,
    scope: str,
    tenant: str,
    all_scopes: bool,
    output: OutputForm,
    **where: Any,
) -> None:
    """Ask whether you may do something with a kind, or with one object. Exits 0 if so, 3 if not.

    VERB is get, list, watch, put, patch, delete or an action of the kind, such as scale.
    """
    from fleetplane.client import requests

    with connected(where) as fleet:
        plural = str(Kinds(fleet).named(kind)["plural"])
        place = scope_of(fleet, scope, tenant, all_scopes)
        if name:
            place = fleet.resource(plural).get(name, scope=place).metadata.scope
        told = requests.mapping(fleet.call(requests.can_i(verb, plural, place)))
    allowed = told.get("allowed") is True
    if output.is_table:
        click.echo("yes" if allowed else "no")
        because = ", ".join(f"{one.get('role')} at {one.get('scope')}" for one in told.get("because") or ())
        say(flat(f"{told.get('permission')} at {told.get('scope')}{': ' + because if because else ''}"))
    else:
        emit_data(output, {"kind": "answer", "metadata": {"name": verb}, **told})
    if not allowed:
        raise click.exceptions.Exit(Exit.CONDITION_NOT_MET)
