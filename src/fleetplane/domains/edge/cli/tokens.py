"""`fleetplane edge token` and its kin: who may enrol, and who may come back."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.domains.edge.cli.edge import PREFIX, client, edge_options, node_of

STYLES = {"open": "green", "redeemed": "dim", "expired": "dim", "revoked": "yellow"}


@click.command("token")
@click.option("--name", default="", help="Name of the new daemon.")
@click.option("--ttl", type=DURATION, help="Lifetime of the token; at most 15 minutes.")
@click.option(
    "--node", default="", help="Existing node that the token is for, by id or name. Default: a new node."
)
@click.option("--replace", is_flag=True, help="Allow another machine to replace --node.")
@format_option
@edge_options
def token(
    name: str, ttl: float | None, node: str, replace: bool, output: Format, tenant: str, **where: Any
) -> None:
    """Make a token with which one daemon enrols, once.

    It is for a node that does not exist yet, unless --node names one. A node that exists is given to
    another key only with --replace, and one that was revoked only after `readmit`.
    """
    if replace and not node:
        raise click.UsageError("--replace needs --node")
    with client(where, tenant) as server:
        body = {"name": name, "ttl_seconds": ttl}
        if node:
            body |= {"node_id": node_of(server, node), "replace": replace}
        made = server.call("POST", f"{PREFIX}/enrollment-tokens", body=body)
    if output is not Format.TABLE:
        emit(output, made, PrintedTable(columns=(), rows=(), empty=""))
        return
    click.echo(made["token"])
    click.echo(
        f"Good once, until {made['expires_at']}. On the machine:\n  fleetplane agent edge enroll TOKEN",
        err=True,
    )


@click.command("tokens")
@format_option
@edge_options
def tokens(output: Format, tenant: str, **where: Any) -> None:
    """List enrolment tokens, without their text."""
    found: list[dict[str, Any]] = []
    with client(where, tenant) as server:
        cursor: str | None = ""
        while cursor is not None:
            query = [("limit", "200"), *([("cursor", cursor)] if cursor else [])]
            page = server.call("GET", f"{PREFIX}/enrollment-tokens", query=query)
            found += page["items"]
            cursor = page["next_cursor"]
    rows = [
        [
            Cell(text=one["token_id"]),
            Cell(text=one["state"], style=STYLES.get(one["state"], "")),
            Cell(text=one["issued_to"]),
            Cell(text=_meant(one)),
            Cell(text=one["issued_by"]),
            Cell(text=one["expires_at"]),
            Cell(text=one["redeemed_by"] or ""),
        ]
        for one in found
    ]
    columns = ("TOKEN", "STATE", "NAME", "FOR", "ISSUED BY", "EXPIRES", "NODE")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no tokens"))


def _meant(one: dict[str, Any]) -> str:
    if one["node_id"] is None:
        return "a new node"
    return f"{one['node_id']}{' (replace)' if one['replace'] else ''}"


@click.command("withdraw")
@click.argument("token_id")
@edge_options
def withdraw(token_id: str, tenant: str, **where: Any) -> None:
    """Revoke an unused enrolment token; TOKEN_ID is as `tokens` shows it."""
    with client(where, tenant) as server:
        server.call("DELETE", f"{PREFIX}/enrollment-tokens/{token_id}")


@click.command("readmit")
@click.argument("node")
@edge_options
def readmit(node: str, tenant: str, **where: Any) -> None:
    """Allow a revoked daemon to enrol again. Its former key and token stay revoked."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/readmit")
    hint = f"fleetplane edge token --tenant {tenant} --node {told['node_id']}"
    click.echo(f"{told['name']} may enrol again. A token for it:\n  {hint}", err=True)
