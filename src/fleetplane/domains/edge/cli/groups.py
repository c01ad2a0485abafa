"""`fleetplane edge group`: named sets of daemons."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option, json_line
from fleetplane.domains.edge.cli.edge import PREFIX, client, edge_options


@click.group()
def group() -> None:
    """Groups of daemons: members by selector, and pinned members."""


@group.command("ls")
@format_option
@edge_options
def ls(output: Format, tenant: str, **where: Any) -> None:
    """List the groups of a tenant."""
    with client(where, tenant) as server:
        found = server.call("GET", f"{PREFIX}/groups")["items"]
    rows = [
        [
            Cell(text=one["name"]),
            Cell(text=one["id"]),
            Cell(text=str(one["resolved_member_count"])),
            Cell(text=str(len(one["pinned_members"]))),
            Cell(text=json_line(one["selector"]) if one["selector"] else ""),
        ]
        for one in found
    ]
    columns = ("NAME", "ID", "MEMBERS", "PINNED", "SELECTOR")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no groups"))


@group.command("create")
@click.argument("name")
@click.option(
    "--selector", help="Selector of the members, such as 'os=linux tags=prod'. Default: pinned members only."
)
@click.option(
    "--pin", "pins", multiple=True, metavar="NODE", help="Daemon that is always a member; repeatable."
)
@edge_options
def create(name: str, selector: str | None, pins: tuple[str, ...], tenant: str, **where: Any) -> None:
    """Create a group and print its id."""
    body = {"name": name, "selector": selector, "pinned_members": pins}
    with client(where, tenant) as server:
        click.echo(server.call("POST", f"{PREFIX}/groups", body=body)["id"])


@group.command("set-pinned")
@click.argument("name")
@click.option("--add", "added", multiple=True, metavar="NODE", help="Pin this daemon.")
@click.option("--rm", "removed", multiple=True, metavar="NODE", help="Unpin this daemon.")
@click.option("--members", multiple=True, metavar="NODE", help="Pin exactly these.")
@edge_options
def set_pinned(
    name: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    members: tuple[str, ...],
    tenant: str,
    **where: Any,
) -> None:
    """Change the pinned members of a group."""
    if not (added or removed or members):
        raise click.UsageError("nothing to change: give --add, --rm or --members")
    body: dict[str, object] = {"add_members": added, "remove_members": removed}
    if members:
        body["pinned_members"] = members
    with client(where, tenant) as server:
        server.call("PATCH", f"{PREFIX}/groups/{name}", body=body)


@group.command("rm")
@click.argument("name")
@edge_options
def rm(name: str, tenant: str, **where: Any) -> None:
    """Delete a group; its daemons stay."""
    with client(where, tenant) as server:
        server.call("DELETE", f"{PREFIX}/groups/{name}")
