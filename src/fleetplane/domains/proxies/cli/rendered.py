"""`fleetplane proxies rendered`: the NGINX configuration that an agent writes for a version."""

from __future__ import annotations

from typing import Any

import click

from fleetplane.cli.output import Format, PrintedTable, emit, format_option
from fleetplane.domains.proxies.cli.observing import agent_named
from fleetplane.domains.proxies.cli.proxies import PREFIX, client, proxy_options


@click.command()
@click.argument("agent")
@click.argument("version", type=click.IntRange(min=1))
@click.option("--against", type=click.IntRange(min=1), help="Show what is different from this version.")
@click.option("--host", "host", default="", metavar="ID", help="Only the file of this virtual host.")
@click.option("--file", "file", default="", metavar="NAME", help="Only this file, such as nginx.conf.")
@format_option
@proxy_options
def rendered(
    agent: str,
    version: int,
    against: int | None,
    host: str,
    file: str,
    output: Format,
    workspace: str,
    **where: Any,
) -> None:
    """Show the NGINX configuration that an AGENT writes for a VERSION, or compare it with another version's.

    Without certificates and the files of users. Needs an administrator, since raw text is in it.
    """
    asked = {
        name: str(value)
        for name, value in (("against", against), ("virtual_host_id", host), ("file", file))
        if value
    }
    with client(where) as server:
        one = agent_named(server, workspace, agent)
        told = server.call("GET", f"{PREFIX}/agents/{one['id']}/configs/{version}/rendered", query=asked)
    if output is not Format.TABLE:
        emit(output, told, PrintedTable(columns=(), rows=[], empty=""))
        return
    for name, text in told["files"].items():
        if len(told["files"]) > 1 and against is None:
            click.echo(f"# {name}")
        click.echo(text, nl=not text.endswith("\n"))
