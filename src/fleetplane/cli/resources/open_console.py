"""`fleetplane open`: a link to the console that signs in once, made by the owner of the server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode, urlsplit

import click

from fleetplane.cli.clients.owner_options import owner_options
from fleetplane.cli.parameters import DURATION

PAGE = "/ui/"
ROLE = "owner"
SESSION_SECONDS = 12 * 3600.0
CALL_SECONDS = 30.0
UNSPECIFIED = frozenset({"0.0.0.0", "::"})  # noqa: S104  # recognised, not bound


@click.command("open")
@click.option(
    "--role",
    "roles",
    multiple=True,
    default=(ROLE,),
    show_default=True,
    metavar="ROLE",
    help="What the session may do, such as viewer or operator; can be given often.",
)
@click.option("--tenant", default="", help="The only tenant that the session sees; all when absent.")
@click.option(
    "--for",
    "seconds",
    type=DURATION,
    default=SESSION_SECONDS,
    show_default="12h",
    help="How long the session lasts; at most 12h.",
)
@owner_options
def open_console(roles: tuple[str, ...], tenant: str, seconds: float, data_dir: Path) -> None:
    """Print a link to the console that signs in.

    The link is good once and for an hour. It stands in the part of the address that browsers keep to
    themselves, and becomes a cookie that no script can read.
    """
    from fleetplane.cli.clients.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
    from fleetplane.kernel.errors import Unavailable

    with OperatorsClient(data_dir, call_seconds=CALL_SECONDS) as owner:
        request = pb.OpenSessionRequest(roles=roles, tenant=tenant, life_seconds=seconds, console_link=True)
        answer = owner.call("OpenSession", request)
    if not answer.web_addresses:
        raise Unavailable("the server has no web listener")
    click.echo(f"{reachable(answer.web_addresses[0])}{PAGE}#{urlencode({'link': answer.link_code})}")


def reachable(address: str) -> str:
    """A web listener's address for a browser; one that listens everywhere is reached as this machine."""
    parts = urlsplit(address)
    port = f":{parts.port}" if parts.port is not None else ""
    place = f"localhost{port}" if parts.hostname in UNSPECIFIED else parts.netloc
    return f"{parts.scheme}://{place}"
