"""`fleetplane boards certificate`: an operator's own certificate, for callers of boards and of gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fleetplane.cli.parameters import DURATION
from fleetplane.domains.boards.cli.boards import PREFIX, board_options, client

if TYPE_CHECKING:
    from fleetplane.cli.clients.identity_files import IdentityFiles

FOLDER = click.Path(path_type=Path, file_okay=False)
RETRY_SECONDS = 60.0
"""After a renewal that failed; a certificate lives for a day and is renewed with half of that left."""
CALL_SECONDS = 20.0
RENEWED_PEM = "fleetplane-certificate-bin"
ROLE_URI = "fleetplane://role/boards."


@click.group()
def certificate() -> None:
    """An operator's own certificate: good for a day, renewed by its holder."""


@certificate.command("create")
@click.argument("name")
@click.argument("folder", type=FOLDER)
@click.option("--role", type=click.Choice(["viewer", "operator", "admin"]), required=True)
@click.option(
    "--life",
    "life_seconds",
    type=DURATION,
    help="Lifetime of the certificate; at most, and by default, one day.",
)
@board_options
def create(name: str, folder: Path, role: str, life_seconds: float | None, **where: Any) -> None:
    """Make a key in FOLDER and have it certified for NAME. Needs the rights of an administrator.

    FOLDER gets identity.key, which is made here and goes nowhere, identity.crt and ca.crt.
    """
    from fleetplane.cli.clients.identity_files import IdentityFiles, request_pem

    files = IdentityFiles(folder)
    with client(where) as server:
        body = {
            "common_name": name,
            "type": "client",
            "csr_pem": request_pem(files.make_key(), name),
            "sans": [ROLE_URI + role],
            "validity_period": f"{life_seconds:g}s" if life_seconds else "",
        }
        asked = server.call("POST", f"{PREFIX}/ca/requests", body=body)
        decided = server.call("POST", f"{PREFIX}/ca/requests/{asked['id']}/process", body={"approve": True})
        authority = server.call("GET", f"{PREFIX}/ca/certificate")["certificate_pem"]
    files.keep(
        certificate_pem=decided["certificate"]["certificate_pem"].encode(), authority_pem=authority.encode()
    )
    _tell(files)


@certificate.command("renew")
@click.argument("folder", type=FOLDER)
@click.option(
    "--connect", "address", required=True, metavar="HOST:PORT", help="Address of the server's board listener."
)
@click.option(
    "--server-name", default="", help="Name in the server's certificate, if it differs from the address."
)
@click.option("--force", is_flag=True, help="Renew even before half of its lifetime is over.")
@click.option("--watch", is_flag=True, help="Keep running and renew whenever it is due.")
def renew(folder: Path, address: str, server_name: str, force: bool, watch: bool) -> None:
    """Renew the certificate in FOLDER with itself, once half of its life is over."""
    import time
    from datetime import UTC, datetime

    from fleetplane.cli.clients.identity_files import IdentityFiles, renewal_at
    from fleetplane.cli.exits import explain

    files = IdentityFiles(folder)
    while True:
        left_seconds = (renewal_at(files.certificate()) - datetime.now(UTC)).total_seconds()
        if force or left_seconds <= 0:
            force = False
            try:
                _renew(files, address, server_name)
                continue
            except Exception as error:
                failure = explain(error)
                if not watch or failure is None:
                    raise
                click.echo(f"fleetplane: {failure.line}", err=True)
            left_seconds = RETRY_SECONDS
        if not watch:
            _tell(files)
            return
        time.sleep(min(left_seconds, RETRY_SECONDS))


def _renew(files: IdentityFiles, address: str, server_name: str) -> None:
    import grpc

    from fleetplane.cli.clients.client import away
    from fleetplane.cli.clients.identity_files import AUTHORITY, CERTIFICATE, KEY
    from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
    from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
    from fleetplane.kernel.errors import Unavailable

    trust = grpc.ssl_channel_credentials(files.read(AUTHORITY), files.read(KEY), files.read(CERTIFICATE))
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    channel = grpc.secure_channel(address, trust, options=named)
    try:
        stub: Any = pi_controller_pb2_grpc.PiControllerServiceStub(channel)
        request = pi.RenewCertificateRequest()
        _, call = away(lambda: stub.RenewCertificate.with_call(request, timeout=CALL_SECONDS))
        told = dict(call.trailing_metadata())
        if RENEWED_PEM not in told:
            raise Unavailable("the server renewed the certificate and did not send it", hint="upgrade it")
        files.keep(certificate_pem=told[RENEWED_PEM])
    finally:
        away(channel.close)


def _tell(files: IdentityFiles) -> None:
    ends = files.certificate().not_valid_after_utc
    click.echo(f"{files.folder}: good until {ends:%Y-%m-%dT%H:%M:%SZ}", err=True)
