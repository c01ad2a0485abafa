"""`fleetplane tokens`: tokens with which people and programs act on the server from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleetplane.cli.output import Cell, Format, Table, emit, format_option
from fleetplane.cli.parameters import DURATION

if TYPE_CHECKING:
    from fleetplane.cli.operators_client import OperatorsClient
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

CALL_SECONDS = 30.0

data_dir_option = click.option(
    "--data-dir", type=click.Path(path_type=Path), default=Path("./fleetplane-data"), show_default=True,
    envvar="FLEETPLANE_DATA_DIR", show_envvar=True, help="Of the server to talk to, on this machine.",
)  # fmt: skip


@click.group()
def tokens() -> None:
    """Tokens for people and programs that act on this server from elsewhere."""


def _owner(data_dir: Path) -> OperatorsClient:
    from fleetplane.cli.operators_client import OperatorsClient

    return OperatorsClient(data_dir, call_seconds=CALL_SECONDS)


@tokens.command("create")
@click.argument("name")
@click.option(
    "--role", "roles", multiple=True, required=True, metavar="ROLE",
    help="What it may do, such as edge.admin, boards.viewer or instances.viewer; can be given often.",
)  # fmt: skip
@click.option("--tenant", default="", help="The only tenant it acts for; all when absent.")
@click.option("--expires", type=DURATION, help="How long it lasts, such as 720h; until revoked when absent.")
@data_dir_option
def create(name: str, roles: tuple[str, ...], tenant: str, expires: float | None, data_dir: Path) -> None:
    """Make a token and print it, this once."""
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(data_dir) as owner:
        made = owner.call(
            "CreateToken",
            pb.CreateTokenRequest(name=name, roles=roles, tenant=tenant, life_seconds=expires or 0.0),
        )
    click.echo(made.token)
    click.echo("This is the only time it is shown. Use it as FLEETPLANE_TOKEN, with --server.", err=True)


@tokens.command("list")
@format_option
@data_dir_option
def list_tokens(output: Format, data_dir: Path) -> None:
    """Which tokens there are; not what they are."""
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(data_dir) as owner:
        found = owner.call("ListTokens", pb.ListTokensRequest()).tokens
    data = [_told(token) for token in found]
    rows = [
        [Cell(text=str(one[column] or "")) for column in ("name", "roles", "tenant", "created", "expires")]
        for one in (told | {"roles": ",".join(told["roles"])} for told in data)  # type: ignore[arg-type]
    ]
    columns = ("NAME", "ROLES", "TENANT", "CREATED", "EXPIRES")
    emit(output, data, Table(columns=columns, rows=rows, empty="no tokens"))


def _told(token: pb.Token) -> dict[str, object]:
    return {
        "name": token.name,
        "roles": list(token.roles),
        "tenant": token.tenant or None,
        "created": token.created_at.ToJsonString(),
        "expires": token.expires_at.ToJsonString() if token.HasField("expires_at") else None,
    }


@tokens.command("revoke")
@click.argument("name")
@data_dir_option
def revoke(name: str, data_dir: Path) -> None:
    """Refuse a token from now on."""
    from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb

    with _owner(data_dir) as owner:
        owner.call("RevokeToken", pb.RevokeTokenRequest(name=name))
