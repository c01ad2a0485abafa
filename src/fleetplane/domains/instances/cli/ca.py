"""`fleetplane instances ca`: replacing the server's certificate authority, and the key of its nonces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleetplane.cli.output import Format, format_option
from fleetplane.client.places import Place
from fleetplane.domains.instances.cli.instances import admin_options

NEXT = {
    "announced": "next: `fleetplane instances ca switch`. Hand operators and proxies the new trust first: "
    "`fleetplane instances ca show`",
    "switched": "next: `fleetplane instances ca retire`, once `ca status` shows nobody who trusts only the "
    "retiring one, or has its certificates",
    "steady": "",
}


@click.group()
def ca() -> None:
    """Replace the server's certificate authority.

    \b
    rotate   the next authority is made and trusted; it signs nothing yet
    import   the same with an authority that exists already
    switch   it signs; the one before is still trusted, and vouches for it
    retire   the one before is refused

    None of them needs a restart. Agents of ours take up new trust, and renew, within two hours;
    the protocol's first agents do not, and learn of another authority only by being replaced.
    """


@ca.command("status")
@admin_options
@format_option
def ca_status(place: Place, output: Format) -> None:
    """Show which authorities are trusted, which one signs, and who depends on each."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(place, "GetAuthorities", authority_pb2.GetAuthoritiesRequest())
    _emit(found, output)


@ca.command()
@click.option("--workloads", is_flag=True, help="Those that sign the certificate files of instances instead.")
@admin_options
def show(workloads: bool, place: Place) -> None:
    """Print the certificates of all that are trusted: what clients should have as ca.crt."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(place, "GetAuthorities", authority_pb2.GetAuthoritiesRequest())
    click.echo((found.workload_pem if workloads else found.trust_pem).decode(), nl=False)


@ca.command()
@admin_options
@format_option
def rotate(place: Place, output: Format) -> None:
    """First step: make the next authority and have it trusted. Nothing is signed by it yet."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(place, "AnnounceAuthority", authority_pb2.AnnounceAuthorityRequest())
    _emit(found, output)


@ca.command("import")
@click.argument("certificate", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("key", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@admin_options
@format_option
def import_authority(certificate: Path, key: Path | None, place: Place, output: Format) -> None:
    """First step, with an authority that exists: an older fleet's, or another server's of this cluster.

    CERTIFICATE holds its certificate in PEM, KEY its private key; both may be in one file, as `export`
    writes it. Go on with `switch`.
    """
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    certificates, keys = _pem_blocks(certificate.read_bytes())
    if key is not None:
        keys += _pem_blocks(key.read_bytes())[1]
    if not 1 <= len(certificates) == len(keys) <= 2:
        raise click.UsageError(
            f"{len(certificates)} certificates and {len(keys)} private keys were found; give one of each, or "
            "a file that `fleetplane instances ca export` has written"
        )
    request = authority_pb2.ImportAuthorityRequest(certificate_pem=certificates[0], key_pem=keys[0])
    if len(keys) == 2:
        request.workload_certificate_pem, request.workload_key_pem = certificates[1], keys[1]
    _emit(_call(place, "ImportAuthority", request), output)


@ca.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@admin_options
def export(file: Path, place: Place) -> None:
    """Write the newest authorities with their private keys to FILE, which only you can read.

    For another server of the same cluster, whose agents shall trust both: `ca import FILE` there.
    """
    import os

    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise click.UsageError(f"{file} exists already; name a file that does not") from None
    done = False
    try:
        found = _call(place, "ExportAuthority", authority_pb2.ExportAuthorityRequest())
        os.write(descriptor, found.fleet_pem + found.workload_pem)
        done = True
    finally:
        os.close(descriptor)
        if not done:
            file.unlink()
    click.echo(f"{file} holds the private keys of the fleet: delete it once it was imported")


def _pem_blocks(text: bytes) -> tuple[list[bytes], list[bytes]]:
    """The certificates and the private keys of a text."""
    import re

    pattern = rb"-----BEGIN ([A-Z ]+)-----\r?\n.*?-----END \1-----\r?\n?"
    blocks = [match[0] for match in re.finditer(pattern, text, re.DOTALL)]
    return (
        [block for block in blocks if block.startswith(b"-----BEGIN CERTIFICATE-----")],
        [block for block in blocks if b"PRIVATE KEY-----" in block.partition(b"\n")[0]],
    )


@ca.command()
@click.option("--force", is_flag=True, help="Also while instances do not know it: they will not come back.")
@admin_options
@format_option
def switch(force: bool, place: Place, output: Format) -> None:
    """Second step: sign with the announced authority. The one before is still trusted."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(place, "SwitchAuthority", authority_pb2.SwitchAuthorityRequest(force=force))
    _emit(found, output)


@ca.command()
@click.option("--force", is_flag=True, help="Also while its certificates are in use: they will be refused.")
@admin_options
@format_option
def retire(force: bool, place: Place, output: Format) -> None:
    """Last step: refuse the certificates of the authority before, and end what they have open."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    found = _call(place, "RetireAuthority", authority_pb2.RetireAuthorityRequest(force=force))
    _emit(found, output)


@click.command("rotate-nonce-key")
@admin_options
def rotate_nonce_key(place: Place) -> None:
    """Sign nonces with a new key. Those that were handed out stay good until they run out."""
    from fleetplane.gen.fleetplane.admin.v1 import authority_pb2

    made = _call(place, "RotateNonceKey", authority_pb2.RotateNonceKeyRequest())
    click.echo(f"nonces are signed with key {made.key_id} from now on")


def _call(place: Place, method: str, request: Any) -> Any:
    from fleetplane.domains.instances.cli.client import authority_client

    with authority_client(place) as client:
        return client.call(method, request)


def _emit(found: Any, output: Format) -> None:
    import time

    from fleetplane.cli.output import emit
    from fleetplane.domains.instances.cli import view as instances_view

    data = instances_view.plain(found)
    data["trust_pem"] = found.trust_pem.decode()
    data["workload_pem"] = found.workload_pem.decode()
    emit(output, data, instances_view.authority_table(found.authorities, time.time()))
    if output is Format.TABLE:
        if found.unaware_instances:
            names = ", ".join(found.unaware_instances)
            newer = "announced" if found.phase == "announced" else "signing"
            click.echo(f"not shown to trust the {newer} one: {names}", err=True)
        if NEXT[found.phase]:
            click.echo(NEXT[found.phase], err=True)
