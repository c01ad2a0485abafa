"""`fleetplane edge config`: configuration for a tenant's daemons, and for one of them."""

from __future__ import annotations

import json
from typing import IO, TYPE_CHECKING, Any

import click

from fleetplane.cli.output import Format, PrintedTable, emit, format_option
from fleetplane.domains.edge.cli.edge import PREFIX, client, edge_options

if TYPE_CHECKING:
    from fleetplane.cli.clients.rest_client import RestClient

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
    from fleetplane.domains.edge.cli.cluster import everyone as of_no_tenant

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
