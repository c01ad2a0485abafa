"""`fleetplane edge`: daemons behind NAT, their groups, and runs across them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.edge_exits import edge_exits
from fleetplane.cli.lazy import Entry, LazyGroup
from fleetplane.cli.output import Cell, Format, Table, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.rest_client import Place, connect, rest_options

if TYPE_CHECKING:
    from fleetplane.cli.rest_client import RestClient

F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "/v1/edge"
ROLES = ("edge.admin",)
STYLES = {"Connected": "green", "Draining": "yellow", "Unhealthy": "red", "Revoked": "dim"}

tenant_option = click.option(
    "--tenant", default="default", show_default=True, envvar="AEGIS_EFFECTIVE_TENANT", show_envvar=True,
    help="For which tenant to act.",
)  # fmt: skip


def edge_options(command: F) -> F:
    """Which server, as whom, for which tenant; and how it ends."""
    return rest_options(tenant_option(edge_exits(command)))


def client(where: Mapping[str, Any], tenant: str) -> RestClient:
    return connect(Place(**where), roles=ROLES, tenant=tenant, headers={"x-tenant-id": tenant})


def node_of(server: RestClient, given: str) -> str:
    """The id of a daemon that is given by its id or its name."""
    try:
        return str(uuid.UUID(given))
    except ValueError:
        found = server.call("POST", f"{PREFIX}/fleet/preview", body={"target": f"@{given}"})
        return str([*found["resolved"], *found["skipped"]][0]["node_id"])


class Verbs(LazyGroup):
    entries: ClassVar[Mapping[str, Entry]] = {
        "config": Entry(
            target="fleetplane.cli.edge_config:config", help="What daemons should be configured with."
        ),
        "group": Entry(target="fleetplane.cli.edge_groups:group", help="Named sets of daemons."),
        "run": Entry(target="fleetplane.cli.edge_runs:run", help="Run a tool on daemons, and watch it."),
        "runs": Entry(target="fleetplane.cli.edge_runs:runs", help="Runs so far, or one in detail."),
        "cancel": Entry(target="fleetplane.cli.edge_runs:cancel", help="Take a run back."),
        "preview": Entry(target="fleetplane.cli.edge_runs:preview", help="Whom a target means just now."),
        "rotate": Entry(
            target="fleetplane.cli.edge_runs:rotate", help="Have daemons replace their keys, in waves."
        ),
    }


@click.group(cls=Verbs)
def edge() -> None:
    """Daemons on machines that nobody can dial: enrol them, sort them, run things on them.

    A target is @NODE, group:NAME, all, or a selector such as 'os=linux tags=prod'. NODE is a daemon's
    id or its name.

    Exit codes: 0 ok, 1 failure, 2 usage, 3 not allowed, 4 conflict, 5 nobody reachable, 6 halted,
    7 cancelled, 8 out of time, 9 too few targets.
    """


@edge.command("token")
@click.option("--name", default="", help="What the daemon will be called.")
@click.option("--ttl", type=DURATION, help="How long the token is good for; 15 minutes at most.")
@format_option
@edge_options
def token(name: str, ttl: float | None, output: Format, tenant: str, **where: Any) -> None:
    """Make a token with which one daemon enrols, once."""
    with client(where, tenant) as server:
        made = server.call("POST", f"{PREFIX}/enrollment-tokens", body={"name": name, "ttl_seconds": ttl})
    if output is not Format.TABLE:
        emit(output, made, Table(columns=(), rows=(), empty=""))
        return
    click.echo(made["token"])
    click.echo(
        f"Good once, until {made['expires_at']}. On the machine:\n  fleetplane agent edge enroll TOKEN",
        err=True,
    )


@edge.command("ls")
@click.option("--tag", "tags", multiple=True, help="Only with this tag; can be given often.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only with this label.")
@click.option("--connected/--disconnected", default=None, help="Only those with, or without, a stream.")
@format_option
@edge_options
def ls(
    tags: tuple[str, ...], labels: tuple[str, ...], connected: bool | None, output: Format, tenant: str,
    **where: Any,
) -> None:  # fmt: skip
    """The daemons of a tenant."""
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
            Cell(text=host["node_id"]), Cell(text=host["name"]),
            Cell(text=host["status"], style=STYLES.get(host["status"], "")),
            Cell(text=f"{host['os']}/{host['arch']}" if host["os"] else ""),
            Cell(text=",".join(host["tags"])), Cell(text=host["last_heartbeat_at"] or "never"),
        ]
        for host in found
    ]  # fmt: skip
    columns = ("NODE", "NAME", "STATUS", "SYSTEM", "TAGS", "HEARD")
    emit(
        output,
        found,
        Table(columns=columns, rows=rows, empty="no daemons; `fleetplane edge token` invites one"),
    )


@edge.group("tag")
def tag() -> None:
    """Words that operators put on daemons, to find them by."""


@tag.command("add")
@click.argument("node")
@click.argument("tags", nargs=-1, required=True)
@edge_options
def tag_add(node: str, tags: tuple[str, ...], tenant: str, **where: Any) -> None:
    """Put tags on a daemon."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/tags", body={"add": tags})
    click.echo(",".join(told["tags"]))


@tag.command("rm")
@click.argument("node")
@click.argument("tags", nargs=-1, required=True)
@edge_options
def tag_rm(node: str, tags: tuple[str, ...], tenant: str, **where: Any) -> None:
    """Take tags off a daemon."""
    with client(where, tenant) as server:
        told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/tags", body={"remove": tags})
    click.echo(",".join(told["tags"]))


@edge.command("rename")
@click.argument("node")
@click.argument("name")
@edge_options
def rename(node: str, name: str, tenant: str, **where: Any) -> None:
    """Give a daemon another name."""
    with client(where, tenant) as server:
        server.call("PATCH", f"{PREFIX}/hosts/{node_of(server, node)}", body={"name": name})


def _steer(name: str, words: str) -> click.Command:
    @click.argument("node")
    @click.option("--grace", type=DURATION, default=30.0, show_default="30s",
                  help="How long running commands may go on.")  # fmt: skip
    @edge_options
    def steer(node: str, grace: float, tenant: str, **where: Any) -> None:
        body = {"desired": name, "grace_secs": grace}
        with client(where, tenant) as server:
            told = server.call("POST", f"{PREFIX}/hosts/{node_of(server, node)}/state", body=body)
        click.echo(f"{told['name']}: {told['status']}, wanted {told['desired']}", err=True)

    steer.__doc__ = words
    return click.command()(steer)


edge.add_command(_steer("draining", "Let a daemon finish what it does and take nothing new."), "drain")
edge.add_command(_steer("shutdown", "Stop a daemon, and keep it away."), "shutdown")
edge.add_command(_steer("active", "Let a drained or stopped daemon work again."), "resume")


@edge.command("revoke")
@click.argument("node")
@click.option("--yes", is_flag=True, help="Do not ask.")
@edge_options
def revoke(node: str, yes: bool, tenant: str, **where: Any) -> None:
    """Refuse a daemon for good: its stream is cut, and it has to enrol anew."""
    if not yes:
        click.confirm(f"Revoke {node}? It has to enrol anew to come back", abort=True, err=True)
    with client(where, tenant) as server:
        server.call("DELETE", f"{PREFIX}/hosts/{node_of(server, node)}")
