"""`fleetplane edge config`: configuration for a tenant's daemons, and for one of them."""

from __future__ import annotations

import json
from typing import IO, Any

import click

from fleetplane.cli.edge import PREFIX, client, edge_options
from fleetplane.cli.output import Format, Table, emit, format_option

node_option = click.option("--node", default="", help="One daemon, by its id; all of the tenant's if absent.")


def _path(node: str) -> str:
    return f"{PREFIX}/hosts/{node}/config" if node else f"{PREFIX}/config"


@click.group()
def config() -> None:
    """What daemons should be configured with: layers for the tenant and for single daemons.

    Later layers win, and a daemon applies them before its next command.
    """


@config.command("show")
@node_option
@format_option
@edge_options
def show(node: str, output: Format, tenant: str, **where: Any) -> None:
    """What is set here, and what comes of all layers."""
    with client(where, tenant) as server:
        found = server.call("GET", _path(node))
    if output is Format.TABLE:
        output = Format.YAML  # a document is no table
    emit(output, found, Table(columns=(), rows=(), empty=""))


@config.command("set")
@click.argument("file", type=click.File("r", encoding="utf-8"))
@node_option
@edge_options
def set_config(file: IO[str], node: str, tenant: str, **where: Any) -> None:
    """Replace what is set here with a FILE in YAML or JSON (- reads it from stdin)."""
    import yaml

    try:
        document = yaml.safe_load(file.read())
        json.dumps(document)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise click.UsageError(f"{file.name} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise click.UsageError(f"{file.name} does not hold an object")
    with client(where, tenant) as server:
        told = server.call("PUT", _path(node), body=document)
    click.echo(told["version"])


@config.command("unset")
@node_option
@edge_options
def unset(node: str, tenant: str, **where: Any) -> None:
    """Set nothing here any more; other layers stay."""
    with client(where, tenant) as server:
        server.call("DELETE", _path(node))
