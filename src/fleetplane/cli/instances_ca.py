"""`fleetplane instances ca`: replacing the server's certificate authority, and the key of its nonces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleetplane.cli.instances import data_dir_option, timeout_option
from fleetplane.cli.output import Format, format_option

NEXT = {
    "announced": "next: `fleetplane instances ca switch`, once `ca status` shows nobody unaware. Hand "
    "operators and proxies the new trust first: `fleetplane instances ca show`",
    "switched": "next: `fleetplane instances ca retire`, once `ca status` shows nobody with certificates of "
    "the retiring one",
    "steady": "",
}


@click.group()
def ca() -> None:
    """Replace the server's certificate authority.

    \b
    rotate   the next authority is made and trusted; it signs nothing yet
    switch   it signs; the one before is still trusted
    retire   the one before is refused

    None of them needs a restart. Agents of ours take up new trust, and renew, within two hours;
    the protocol's first agents do not, and learn of another authority only by being replaced.
    """


@ca.command("status")
@data_dir_option
@timeout_option
@format_option
def ca_status(data_dir: Path, timeout: float, output: Format) -> None:
    """Who is trusted, who signs, and who depends on which of them."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(data_dir, timeout, "GetAuthorities", authority_pb2.GetAuthoritiesRequest())
    _emit(found, output)


@ca.command()
@data_dir_option
@timeout_option
def show(data_dir: Path, timeout: float) -> None:
    """Print the certificates of all that are trusted: what clients should have as ca.crt."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(data_dir, timeout, "GetAuthorities", authority_pb2.GetAuthoritiesRequest())
    click.echo(found.trust_pem.decode(), nl=False)


@ca.command()
@data_dir_option
@timeout_option
@format_option
def rotate(data_dir: Path, timeout: float, output: Format) -> None:
    """First step: make the next authority and have it trusted. Nothing is signed by it yet."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(data_dir, timeout, "AnnounceAuthority", authority_pb2.AnnounceAuthorityRequest())
    _emit(found, output)


@ca.command()
@click.option("--force", is_flag=True, help="Also while instances do not know it: they will not come back.")
@data_dir_option
@timeout_option
@format_option
def switch(force: bool, data_dir: Path, timeout: float, output: Format) -> None:
    """Second step: sign with the announced authority. The one before is still trusted."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(data_dir, timeout, "SwitchAuthority", authority_pb2.SwitchAuthorityRequest(force=force))
    _emit(found, output)


@ca.command()
@click.option("--force", is_flag=True, help="Also while its certificates are in use: they will be refused.")
@data_dir_option
@timeout_option
@format_option
def retire(force: bool, data_dir: Path, timeout: float, output: Format) -> None:
    """Last step: refuse the certificates of the authority before, and end what they have open."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(data_dir, timeout, "RetireAuthority", authority_pb2.RetireAuthorityRequest(force=force))
    _emit(found, output)


@click.command("rotate-nonce-key")
@data_dir_option
@timeout_option
def rotate_nonce_key(data_dir: Path, timeout: float) -> None:
    """Sign nonces with a new key. Those that were handed out stay good until they run out."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    made = _call(data_dir, timeout, "RotateNonceKey", authority_pb2.RotateNonceKeyRequest())
    click.echo(f"nonces are signed with key {made.key_id} from now on")


def _call(data_dir: Path, call_seconds: float, method: str, request: Any) -> Any:
    from fleetplane.cli.instances_client import AuthorityClient

    with AuthorityClient(data_dir, call_seconds=call_seconds) as client:
        return client.call(method, request)


def _emit(found: Any, output: Format) -> None:
    import time

    from fleetplane.cli import instances_view
    from fleetplane.cli.output import emit

    data = instances_view.plain(found)
    data["trust_pem"] = found.trust_pem.decode()
    emit(output, data, instances_view.authority_table(found.authorities, time.time()))
    if output is Format.TABLE:
        if found.unaware_instances and found.phase == "announced":
            names = ", ".join(found.unaware_instances)
            click.echo(f"not known to trust the announced one: {names}", err=True)
        if NEXT[found.phase]:
            click.echo(NEXT[found.phase], err=True)
