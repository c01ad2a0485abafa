"""`fleetplane tokens`: tokens with which people and programs act on the server from elsewhere.

The owner asks at the server's own socket; anyone else over the API, as whoever may manage people there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION
from fleetplane.client.places import Place, is_remote, owner_directory

if TYPE_CHECKING:
    from fleetplane.cli.clients.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

TENANTS = "/tenants/"


@click.group()
def tokens() -> None:
    """Bearer tokens for people and programs that use this server remotely."""


def _owner(place: Place) -> OperatorsClient:
    from fleetplane.cli.clients.operators_client import OperatorsClient

    return OperatorsClient(owner_directory(place), call_seconds=place.timeout)


def _asked(place: Place, method: str, name: str = "", body: Any = None) -> Any:
    """What the API of a server elsewhere answers about tokens."""
    from fleetplane.client import requests
    from fleetplane.client.sync import connect

    with connect(place) as fleet:
        return fleet.call(requests.tokens(method, name, body))


@tokens.command("create")
@click.argument("name")
@click.option(
    "--role",
    "roles",
    multiple=True,
    required=True,
    metavar="ROLE",
    help="What it may do, such as edge.admin, boards.viewer or instances.viewer; can be given often.",
)
@click.option("--tenant", default="", help="The only tenant it acts for; all when absent.")
@click.option("--expires", type=DURATION, help="How long it lasts, such as 720h; until revoked when absent.")
@rest_options
def create(name: str, roles: tuple[str, ...], tenant: str, expires: float | None, **where: Any) -> None:
    """Create a token and print it; it is not shown again.

    Nobody can give more than they have. Only the owner of the server, on its machine, makes tokens that do
    not expire.
    """
    place = Place(**where)
    click.echo(
        _created_there(place, name, roles, tenant, expires)
        if is_remote(place)
        else _created_here(place, name, roles, tenant, expires)
    )
    click.echo("This is the only time it is shown. Use it as FLEETPLANE_TOKEN, with --server.", err=True)


def _created_here(place: Place, name: str, roles: tuple[str, ...], tenant: str, expires: float | None) -> str:
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(place) as owner:
        made = owner.call(
            "CreateToken",
            pb.CreateTokenRequest(name=name, roles=roles, tenant=tenant, life_seconds=expires or 0.0),
        )
    return str(made.token)


def _created_there(
    place: Place, name: str, roles: tuple[str, ...], tenant: str, expires: float | None
) -> str:
    from fleetplane.client.requests import mapping

    if expires is None:
        raise click.UsageError("--expires is required: tokens that are made from elsewhere end.")
    body = {
        "name": name,
        "roles": list(roles),
        "scope": f"{TENANTS}{tenant}" if tenant else "/",
        "expiresInSeconds": max(1, round(expires)),
    }
    return str(mapping(_asked(place, "POST", body=body)).get("token", ""))


@tokens.command("list")
@format_option
@rest_options
def list_tokens(output: Format, **where: Any) -> None:
    """List tokens, without their text."""
    place = Place(**where)
    data = _listed_there(place) if is_remote(place) else _listed_here(place)
    rows = [
        [Cell(text=str(one[column] or "")) for column in ("name", "roles", "tenant", "created", "expires")]
        for one in (told | {"roles": ",".join(told["roles"])} for told in data)
    ]
    columns = ("NAME", "ROLES", "TENANT", "CREATED", "EXPIRES")
    emit(output, data, PrintedTable(columns=columns, rows=rows, empty="no tokens"))


def _listed_here(place: Place) -> list[dict[str, Any]]:
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(place) as owner:
        return [_told(token) for token in owner.call("ListTokens", pb.ListTokensRequest()).tokens]


def _listed_there(place: Place) -> list[dict[str, Any]]:
    from fleetplane.client.requests import mapping

    return [
        {
            "name": one["name"],
            "roles": one["roles"],
            "tenant": str(one["scope"]).removeprefix(TENANTS).strip("/") or None,
            "created": one["createdAt"],
            "expires": one["expiresAt"],
        }
        for one in mapping(_asked(place, "GET")).get("items") or ()
    ]


def _told(token: pb.Token) -> dict[str, Any]:
    return {
        "name": token.name,
        "roles": list(token.roles),
        "tenant": token.tenant or None,
        "created": token.created_at.ToJsonString(),
        "expires": token.expires_at.ToJsonString() if token.HasField("expires_at") else None,
    }


@tokens.command("revoke")
@click.argument("name")
@rest_options
def revoke(name: str, **where: Any) -> None:
    """Revoke a token."""
    place = Place(**where)
    if is_remote(place):
        _asked(place, "DELETE", name)
        return
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(place) as owner:
        owner.call("RevokeToken", pb.RevokeTokenRequest(name=name))
