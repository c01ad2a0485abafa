"""`fleetplane edge`: daemons behind NAT, their groups, and runs across them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place
from fleetplane.domains.edge.cli.exits import edge_exits, exit_codes_option

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "/v1/edge"
STYLES = {"Connected": "green", "Draining": "yellow", "Unhealthy": "red", "Revoked": "dim"}

tenant_option = click.option(
    "--tenant",
    default="default",
    show_default=True,
    envvar="AEGIS_EFFECTIVE_TENANT",
    show_envvar=True,
    help="Tenant to act for.",
)


def edge_options(command: F) -> F:
    """Which server, as whom, for which tenant; and how it ends."""
    return rest_options(tenant_option(edge_exits(command)))


def client(where: Mapping[str, Any], tenant: str) -> RestClient:
    return connect(
        Place(**where),
        headers={"x-tenant-id": tenant, "x-aegis-shapes": "documented"},
    )


def node_of(server: RestClient, given: str) -> str:
    """The id of a daemon that is given by its id or its name."""
    try:
        return str(uuid.UUID(given))
    except ValueError:
        found = server.call("POST", f"{PREFIX}/fleet/preview", body={"target": f"@{given}"})
        return str([*found["resolved"], *found["skipped"]][0]["node_id"])


class EdgeVerbs(LazyGroup):
    entries: ClassVar[Mapping[str, LazyEntry]] = {
        "config": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:config",
            help="What daemons should be configured with.",
        ),
        "group": LazyEntry(target="fleetplane.domains.edge.cli.groups:group", help="Named sets of daemons."),
        "run": LazyEntry(
            target="fleetplane.domains.edge.cli.runs:run", help="Run a tool on daemons, and watch it."
        ),
        "runs": LazyEntry(
            target="fleetplane.domains.edge.cli.runs:runs", help="Runs so far, or one in detail."
        ),
        "cancel": LazyEntry(target="fleetplane.domains.edge.cli.runs:cancel", help="Take a run back."),
        "preview": LazyEntry(
            target="fleetplane.domains.edge.cli.runs:preview", help="Whom a target means just now."
        ),
        "token": LazyEntry(
            target="fleetplane.domains.edge.cli.tokens:token",
            help="Make a token with which one daemon enrols.",
        ),
        "tokens": LazyEntry(
            target="fleetplane.domains.edge.cli.tokens:tokens", help="Enrollment tokens so far."
        ),
        "withdraw": LazyEntry(
            target="fleetplane.domains.edge.cli.tokens:withdraw", help="Refuse a token that was not used yet."
        ),
        "readmit": LazyEntry(
            target="fleetplane.domains.edge.cli.tokens:readmit", help="Let a revoked daemon enrol again."
        ),
        "worker": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:worker",
            help="Nodes of the cluster that can be dialled.",
        ),
        "revoke-tenant": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:revoke_tenant", help="Revoke all daemons of a tenant."
        ),
        "rotate": LazyEntry(
            target="fleetplane.domains.edge.cli.runs:rotate",
            help="Have daemons replace their keys, in waves.",
        ),
    }


@click.group(cls=EdgeVerbs)
@exit_codes_option
def edge() -> None:
    """Daemons on machines that nobody can dial: enrol them, sort them, run things on them.

    A target is @NODE, group:NAME, all, or a selector such as 'os=linux tags=prod'. NODE is a daemon's
    id or its name.

    Exit codes are those of every verb: 3 fewer targets than --require-min, 7 some daemons failed or the run
    was halted, 8 nobody reachable, 124 out of time. With --exit-codes documented: 3 not allowed, 4 conflict,
    5 nobody reachable, 6 halted, 7 cancelled, 8 out of time, 9 too few targets.
    """


@edge.command("ls")
@click.option("--tag", "tags", multiple=True, help="Only with this tag; can be given often.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@click.option("--connected/--disconnected", default=None, help="Only those with, or without, a stream.")
@format_option
@edge_options
def ls(
    tags: tuple[str, ...],
    labels: tuple[str, ...],
    connected: bool | None,
    output: Format,
    tenant: str,
    **where: Any,
) -> None:
    """List the daemons of a tenant."""
    query: list[tuple[str, str]] = [("limit", "200"), *(("tag", tag) for tag in tags)]
    query += [("label", label) for label in labels]
    if connected is not None:
        query.append(("connected", "true" if connected else "false"))
    found: list[dict[str, Any]] = []
    with client(where, tenant) as server:
        cursor: str | None = ""
        while cursor is not None:
            asked = [*query, *([("cursor", cursor)] if cursor else [])]
            page = server.call("GET", f"{PREFIX}/hosts", query=asked)
            found += page["items"]
            cursor = page["next_cursor"]
    rows = [
        [
            Cell(text=host["node_id"]),
            Cell(text=host["name"]),
            Cell(text=host["status"], style=STYLES.get(host["status"], "")),
            Cell(text=f"{host['os']}/{host['arch']}" if host["os"] else ""),
            Cell(text=",".join(host["tags"])),
            Cell(text=host["last_heartbeat_at"] or "never"),
        ]
        for host in found
    ]
    columns = ("NODE", "NAME", "STATUS", "SYSTEM", "TAGS", "HEARD")
    emit(
        output,
        found,
        PrintedTable(columns=columns, rows=rows, empty="no daemons; `fleetplane edge token` invites one"),
    )


@edge.group("tag")
def tag() -> None:
    """Tags of daemons, for selectors."""


@tag.command("add")
@click.argument("node")
@click.argument("tags", nargs=-1, required=True)
@edge_options
def tag_add(node: str, tags: tuple[str, ...], tenant: str, **where: Any) -> None:
    """Add tags to a daemon."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/tags", body={"add": tags})
    click.echo(",".join(told["tags"]))


@tag.command("rm")
@click.argument("node")
@click.argument("tags", nargs=-1, required=True)
@edge_options
def tag_rm(node: str, tags: tuple[str, ...], tenant: str, **where: Any) -> None:
    """Remove tags from a daemon."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/tags", body={"remove": tags})
    click.echo(",".join(told["tags"]))


@edge.command("rename")
@click.argument("node")
@click.argument("name")
@edge_options
def rename(node: str, name: str, tenant: str, **where: Any) -> None:
    """Rename a daemon."""
    with client(where, tenant) as server:
        server.call("PATCH", f"{PREFIX}/hosts/{node_of(server, node)}", body={"name": name})


def _steer(name: str, words: str) -> click.Command:
    @click.argument("node")
    @click.option(
        "--grace",
        type=DURATION,
        default=30.0,
        show_default="30s",
        help="How long running commands may go on.",
    )
    @edge_options
    def steer(node: str, grace: float, tenant: str, **where: Any) -> None:
        body = {"desired": name, "grace_secs": grace}
        with client(where, tenant) as server:
            told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/state", body=body)
        click.echo(f"{told['name']}: {told['status']}, wanted {told['desired']}", err=True)

    steer.__doc__ = words
    return click.command()(steer)


edge.add_command(
    _steer("draining", "Drain a daemon: running commands finish, new ones are refused."), "drain"
)
edge.add_command(_steer("shutdown", "Shut a daemon down; it is refused until `resume`."), "shutdown")
edge.add_command(_steer("active", "Make a drained or stopped daemon active again."), "resume")


@edge.command("revoke")
@click.argument("node")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@edge_options
def revoke(node: str, yes: bool, tenant: str, **where: Any) -> None:
    """Revoke a daemon: its stream is closed, and it cannot connect until `readmit`."""
    if not yes:
        click.confirm(f"Revoke {node}? It stays out until it is readmitted", abort=True, err=True)
    with client(where, tenant) as server:
        server.call("DELETE", f"{PREFIX}/hosts/{node_of(server, node)}")
