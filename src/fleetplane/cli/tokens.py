"""`fleetplane tokens` and `revocations`: tokens of people, programs, and what agents know of revocations.

The owner asks at the server's own socket; anyone else over the API, as one who may manage people there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.clients.rest_client import rest_options
from fleetplane.cli.output import Cell, Format, PrintedTable, emit, format_option
from fleetplane.cli.parameters import DURATION, owner_options
from fleetplane.client.places import CALL_SECONDS, Place, is_remote, owner_directory

if TYPE_CHECKING:
    from fleetplane.cli.clients.owner_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb


ASK_SECONDS = 1.0
STYLES = {"current": "green", "behind": "yellow", "unheard": "yellow", "unable": "red"}


@click.command()
@click.option(
    "--wait",
    "wait_seconds",
    type=DURATION,
    help="Until every agent that can has the list, this long at most; exit code 3 if some have not.",
)
@format_option
@owner_options
def revocations(wait_seconds: float | None, output: Format, data_dir: Path) -> None:
    """Show which agents that accept callers have the list of revocations that holds now.

    The list goes out with heartbeats. `current` has it; `behind` was heard and has an older one;
    `unheard` said nothing since the server started; `unable` takes none: an agent without TLS.
    """
    import time

    from fleetplane.cli.clients.owner_client import OperatorsClient
    from fleetplane.cli.exits import CommandFailed, Exit
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    until = time.monotonic() + (wait_seconds or 0.0)
    with OperatorsClient(data_dir, call_seconds=CALL_SECONDS) as owner:
        while True:
            answer = owner.call("GetRevocationUptake", pb.GetRevocationUptakeRequest())
            missing = [agent for agent in answer.agents if agent.state in ("behind", "unheard")]
            if not missing or time.monotonic() >= until:
                break
            time.sleep(ASK_SECONDS)
    _show(answer, output)
    if missing and wait_seconds is not None:
        names = ", ".join(agent.agent for agent in missing[:5])
        raise CommandFailed(Exit.CONDITION_NOT_MET, f"{len(missing)} agents do not have the list: {names}")


def _show(answer: pb.GetRevocationUptakeResponse, output: Format) -> None:
    agents = [_revocations_told(agent) for agent in answer.agents]
    data: dict[str, Any] = {
        "number": answer.number,
        "issued": answer.issued_at.ToJsonString(),
        "entries": answer.entries,
        "agents": agents,
    }
    click.echo(f"list {answer.number} of {data['issued']}, {answer.entries} entries", err=True)
    rows = [
        [
            Cell(text=one["agent"]),
            Cell(text=one["name"]),
            Cell(text=one["state"], style=STYLES.get(one["state"], "")),
            Cell(text=str(one["number"] or "")),
            Cell(text=one["heard"] or ""),
        ]
        for one in agents
    ]
    columns = ("AGENT", "NAME", "STATE", "LIST", "HEARD")
    emit(output, data, PrintedTable(columns=columns, rows=rows, empty="no agent accepts callers"))


def _revocations_told(agent: pb.AgentUptake) -> dict[str, Any]:
    return {
        "agent": agent.agent,
        "name": agent.name,
        "state": agent.state,
        "number": agent.number,
        "heard": agent.heard_at.ToJsonString() if agent.HasField("heard_at") else None,
    }


TENANTS = "/tenants/"


@click.group()
def tokens() -> None:
    """Bearer tokens for people and programs that use this server remotely."""


def _owner(place: Place) -> OperatorsClient:
    from fleetplane.cli.clients.owner_client import OperatorsClient

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
