"""`fleetplane instances open`: a link to the live page, made by the owner of the server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import click

from fleetplane.cli.clients.owner_options import owner_options
from fleetplane.cli.parameters import DURATION
from fleetplane.cli.resources.open_console import reachable
from fleetplane.domains.instances.cli.instances import tenant_option, timeout_option

PAGE = "/ui/instances"
ROLE = "instances.viewer"
LIFE_SECONDS = 3600.0


@click.command("open")
@tenant_option
@click.option(
    "--for",
    "seconds",
    type=DURATION,
    default=LIFE_SECONDS,
    show_default="1h",
    help="Lifetime of the link; at most 12h.",
)
@owner_options
@timeout_option
def open_page(tenant: str, seconds: float, data_dir: Path, timeout: float) -> None:
    """Print a link to the page that shows a tenant's groups and instances live.

    The link holds a token that can look and do nothing else, in the part that browsers keep to
    themselves. Whoever has the link can look until it ends: hand it over like a password.
    """
    from fleetplane.cli.clients.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
    from fleetplane.kernel.errors import Unavailable

    with OperatorsClient(data_dir, call_seconds=timeout) as owner:
        request = pb.OpenSessionRequest(roles=[ROLE], tenant=tenant, life_seconds=seconds)
        answer = owner.call("OpenSession", request)
    if not answer.web_addresses:
        raise Unavailable("the server has no web listener")
    click.echo(link(answer.web_addresses[0], answer.token))


def link(address: str, token: str) -> str:
    """To the page on a web listener."""
    return f"{reachable(address)}{PAGE}#{urlencode({'token': token})}"
