"""`fleetplane edge`: daemons behind NAT, their groups, and runs across them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.lazy import LazyEntry, LazyGroup
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option, json_line
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
            target="fleetplane.domains.edge.cli.cluster:edge_token",
            help="Make a token with which one daemon enrols.",
        ),
        "tokens": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:tokens", help="Enrollment tokens so far."
        ),
        "withdraw": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:withdraw",
            help="Refuse a token that was not used yet.",
        ),
        "readmit": LazyEntry(
            target="fleetplane.domains.edge.cli.cluster:readmit", help="Let a revoked daemon enrol again."
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


@edge.group("group", short_help="Named sets of daemons.")
def group() -> None:
    """Groups of daemons: members by selector, and pinned members."""


@group.command("ls")
@format_option
@edge_options
def group_ls(output: Format, tenant: str, **where: Any) -> None:
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
