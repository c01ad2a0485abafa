"""`fleetplane instances open`: a link to the live page, for whoever owns the server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode, urlsplit

import click

from fleetplane.cli.instances import data_dir_option, tenant_option, timeout_option
from fleetplane.cli.parameters import DURATION

PAGE = "/ui/instances"
ROLE = "instances.viewer"
LIFE_SECONDS = 3600.0
UNSPECIFIED = frozenset({"0.0.0.0", "::"})  # noqa: S104  # recognised, not bound


@click.command("open")
@tenant_option
@click.option(
    "--for", "seconds", type=DURATION, default=LIFE_SECONDS, show_default="1h",
    help="How long the page may be looked at; up to 12h.",
)  # fmt: skip
@data_dir_option
@timeout_option
def open_page(tenant: str, seconds: float, data_dir: Path, timeout: float) -> None:
    """Print a link to the page that shows a tenant's groups and instances live.

    The link holds a token that can look and do nothing else, in the part that browsers keep to
    themselves. Whoever has the link can look until it ends: hand it over like a password.
    """
    from fleetplane.cli.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
    from fleetplane.kernel.errors import Unavailable

    with OperatorsClient(data_dir, call_seconds=timeout) as owner:
        request = pb.OpenSessionRequest(roles=[ROLE], tenant=tenant, life_seconds=seconds)
        answer = owner.call("OpenSession", request)
    if not answer.web_addresses:
        raise Unavailable("the server has no web listener")
    click.echo(link(answer.web_addresses[0], answer.token))


def link(address: str, token: str) -> str:
    """To the page on a web listener; one that listens everywhere is reached as this machine."""
    parts = urlsplit(address)
    port = f":{parts.port}" if parts.port is not None else ""
    place = f"localhost{port}" if parts.hostname in UNSPECIFIED else parts.netloc
    return f"{parts.scheme}://{place}{PAGE}#{urlencode({'token': token})}"
