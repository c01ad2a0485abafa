"""`fleetplane edge worker`, `revoke-tenant`, `config`, `token` and its kin: administration.

Workers and tenants, layers of configuration, and which daemons may enrol or return.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from fleetplane.cli.clients.rest_client import connect, rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place
from fleetplane.domains.edge.cli.edge import PREFIX, client, edge_options, node_of
from fleetplane.domains.edge.cli.exits import edge_exits

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient


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
def edge_token(
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


node_option = click.option("--node", default="", help="Id of one daemon. Default: all daemons of the tenant.")


global_option = click.option("--global", "everyone", is_flag=True, help="All daemons of all tenants.")


def _path(node: str, everyone: bool) -> str:
    if everyone:
        if node:
            raise click.UsageError("--global and --node contradict each other")
        return f"{PREFIX}/config/global"
    return f"{PREFIX}/hosts/{node}/config" if node else f"{PREFIX}/config"


def _client(where: dict[str, Any], tenant: str, everyone: bool) -> RestClient:
    if not everyone:
        return client(where, tenant)
    return of_no_tenant(where)


@click.group()
def config() -> None:
    """What daemons should be configured with: layers for everyone, for the tenant and for single daemons.

    Later layers win, and a daemon applies them before its next command.
    """


@config.command("show")
@node_option
@global_option
@format_option
@edge_options
def show(node: str, everyone: bool, output: Format, tenant: str, **where: Any) -> None:
    """Show this configuration layer and the merged result of all layers."""
    with _client(where, tenant, everyone) as server:
        found = server.call("GET", _path(node, everyone))
    if output is Format.TABLE:
        output = Format.YAML  # a document is no table
    emit(output, found, PrintedTable(columns=(), rows=(), empty=""))


@config.command("set")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@node_option
@global_option
@edge_options
def set_config(file: IO[str], node: str, everyone: bool, tenant: str, **where: Any) -> None:
    """Replace this configuration layer with FILE in YAML or JSON (- reads it from stdin)."""
    import yaml

    try:
        document = yaml.safe_load(file.read())
        json.dumps(document)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise click.UsageError(f"{file.name} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise click.UsageError(f"{file.name} does not hold an object")
    with _client(where, tenant, everyone) as server:
        told = server.call("PUT", _path(node, everyone), body=document)
    click.echo(told["version"])


@config.command("unset")
@node_option
@global_option
@edge_options
def unset(node: str, everyone: bool, tenant: str, **where: Any) -> None:
    """Delete this configuration layer; other layers stay."""
    with _client(where, tenant, everyone) as server:
        server.call("DELETE", _path(node, everyone))


F = TypeVar("F", bound=Callable[..., Any])
NODE_ROLES = ("worker", "hybrid", "controller", "relay-coordinator")


def cluster_options(command: F) -> F:
    return rest_options(edge_exits(command))


def of_no_tenant(where: Mapping[str, Any]) -> RestClient:
    """Acts for no tenant in particular."""
    return connect(Place(**where), headers={"x-aegis-shapes": "documented"})


@click.group("worker")
def worker() -> None:
    """Workers, the nodes of the cluster that accept connections: admit, list and drain them."""


@worker.command("token")
@click.argument("node_id", required=False)
@click.option("--role", type=click.Choice(NODE_ROLES), default="worker", show_default=True)
@click.option(
    "--serves",
    "tenants",
    multiple=True,
    metavar="TENANT",
    help="Tenant that the worker acts for; repeatable; '*' for all.",
)
@click.option("--ttl", type=DURATION, default="1h", show_default=True, help="Seven days at most.")
@format_option
@cluster_options
def token(
    node_id: str | None, role: str, tenants: tuple[str, ...], ttl: float, output: Format, **where: Any
) -> None:
    """Make a token with which the worker NODE_ID joins, once; without one, an id is made up.

    Its role and the tenants that it acts for are those of the token, whatever the node says.
    """
    body = {
        "node_id": node_id or str(uuid.uuid4()),
        "role": role,
        "tenants": list(tenants),
        "ttl_seconds": ttl,
    }
    with of_no_tenant(where) as server:
        made = server.call("POST", f"{PREFIX}/worker-tokens", body=body)
    if output is not Format.TABLE:
        emit(output, made, PrintedTable(columns=(), rows=(), empty=""))
        return
    click.echo(made["token"])
    click.echo(f"For node {made['node_id']} as {made['role']}, once, until {made['expires_at']}.", err=True)


@worker.command("ls")
@format_option
@cluster_options
def ls(output: Format, **where: Any) -> None:
    """List workers."""
    with of_no_tenant(where) as server:
        found = server.call("GET", f"{PREFIX}/workers", query=[("limit", "200")])["items"]
    rows = [
        [
            Cell(text=one["node_id"]),
            Cell(text=one["role"]),
            Cell(text=one["status"]),
            Cell(text=",".join(one["tenants"])),
            Cell(text=one["grpc_address"]),
            Cell(text=one["last_heartbeat_at"] or "never"),
        ]
        for one in found
    ]
    columns = ("NODE", "ROLE", "STATUS", "SERVES", "ADDRESS", "HEARD")
    emit(output, found, PrintedTable(columns=columns, rows=rows, empty="no workers"))


def _steer(draining: bool, words: str) -> click.Command:
    @click.argument("node_id")
    @cluster_options
    def steer(node_id: str, **where: Any) -> None:
        with of_no_tenant(where) as server:
            told = server.call("POST", f"{PREFIX}/workers/{node_id}/state", body={"draining": draining})
        click.echo(f"{told['node_id']}: {told['status']}", err=True)

    steer.__doc__ = words
    return click.command()(steer)


worker.add_command(_steer(True, "Drain a worker: it finishes what it has and gets nothing new."), "drain")
worker.add_command(_steer(False, "Make a drained worker active again."), "resume")


@click.command("revoke-tenant")
@click.argument("tenant_id")
@click.option("--reason", default="the tenant was closed", show_default=True)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@cluster_options
def revoke_tenant(tenant_id: str, reason: str, yes: bool, **where: Any) -> None:
    """Revoke all daemons of a tenant, in one transaction: their streams are cut."""
    if not yes:
        click.confirm(f"Revoke all daemons of {tenant_id}?", abort=True, err=True)
    with of_no_tenant(where) as server:
        told = server.call("POST", f"{PREFIX}/tenants/{tenant_id}/revoke", body={"reason": reason})
    click.echo(f"{told['revoked']} revoked", err=True)
