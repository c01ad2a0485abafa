from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from certificates_rig import Desk, desk
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from pebble_lab import Pebble

from fleetplane.domains.proxies.acme.side import AcmeOptions, CertificateSide
from fleetplane.domains.proxies.kinds import CertificateStatus
from fleetplane.domains.proxies.values import CertificateState
from fleetplane.rpc import ListenerSpec, open_listener

S = CertificateState


@asynccontextmanager
async def side(at: Desk, pebble: Pebble, **options: object) -> AsyncIterator[CertificateSide]:
    """Everything as the server runs it, its challenges answered where the authority comes."""
    made = CertificateSide(
        at.store, at.clock, at.master,
        AcmeOptions(authority=pebble.options, dns_servers=[("127.0.0.1", pebble.dns_port)]),
        workspaces=at.workspaces, vault=at.vault, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    spec = ListenerSpec(
        name="challenges", addresses=(f"127.0.0.1:{pebble.http_port}",), app=made.board, http1=True
    )
    async with open_listener(spec, grace_seconds=1), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.run())
        try:
            yield made
        finally:
            running.cancel()


def leaf(status: CertificateStatus) -> x509.Certificate:
    return x509.load_pem_x509_certificate(status.chain_pem.encode())


async def test_a_requested_certificate_is_proved_over_http_and_served(
    tmp_path: Path, authority: Pebble
) -> None:
    async with desk(tmp_path) as at, side(at, authority) as running:
        certificate = await at.request("api.example.test")
        status = await at.reached(certificate, S.ACTIVE, S.FAILED)
        assert (status.state, status.error) == (S.ACTIVE, "")
        assert status.names == ("api.example.test",)
        assert running.board.asked >= 1
        assert running.board.find("anything") is None
        assert "open=0" in repr(running.board)
        newest = at.workspaces.newest(at.scope)
        assert newest is not None
        assert certificate.name in newest.certificates, "agents get it with the next version"
        key = serialization.load_pem_private_key(
            await at.vault.private_key(certificate.name, status.fingerprint), password=None
        )
        assert key.public_key() == leaf(status).public_key()
