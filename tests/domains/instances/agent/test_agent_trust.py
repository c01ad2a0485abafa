"""Whom an agent trusts, and how it follows when its server's authority is replaced."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import structlog
from support.instances.instance_server_double import INSTANCE_ID
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.identity.renewal import (
    CertificateKeeper,
    NoSuchMethod,
    RenewalTrust,
    Renewed,
)
from fleetplane.kernel.errors import IntegrityError
from fleetplane.node.certificates import PEM_LIMIT_BYTES, Life
from fleetplane.sim.clock import VirtualClock

OLD, NEW = ThrowawayCa(name="old"), ThrowawayCa(name="new")
BOTH = OLD.pem + NEW.pem
NO_CHANNEL: Any = None


@pytest.fixture
def folder(tmp_path: Path) -> IdentityFolder:
    """Enrolled under the old authority, which is the only one it knows."""
    (tmp_path / "ca.crt").write_bytes(OLD.pem)
    folder = IdentityFolder(tmp_path, mode=0o600)
    folder.store_certificate(OLD.client(folder.key().public_key(), INSTANCE_ID), INSTANCE_ID)
    return folder


def test_others_may_be_trusted_as_long_as_we_know_ourselves(folder: IdentityFolder) -> None:
    assert folder.trust(OLD.pem) is False
    assert folder.trust(BOTH) is True
    assert folder.authority_pem() == BOTH
    assert folder.trust(BOTH) is False


@pytest.mark.parametrize(
    "pem", [b"", b"nonsense", NEW.pem, b"-----BEGIN CERTIFICATE-----\n", BOTH + b"\n" * PEM_LIMIT_BYTES]
)
def test_trust_that_would_lock_us_out_is_refused(folder: IdentityFolder, pem: bytes) -> None:
    with pytest.raises(IntegrityError):
        folder.trust(pem)
    assert folder.authority_pem() == OLD.pem


def test_a_certificate_of_the_next_authority_comes_with_its_trust(folder: IdentityFolder) -> None:
    leaf = NEW.client(folder.key().public_key(), INSTANCE_ID)
    with pytest.raises(IntegrityError, match="not from the authority"):
        folder.store_certificate(leaf, INSTANCE_ID)
    folder.store_certificate(leaf, INSTANCE_ID, BOTH)
    assert folder.credentials().certificate_pem == leaf
    assert folder.credentials().authority_pem == BOTH


def test_a_certificate_that_its_own_trust_does_not_cover_changes_nothing(folder: IdentityFolder) -> None:
    before = folder.credentials()
    for leaf, trust in ((NEW.client(folder.key().public_key(), INSTANCE_ID), OLD.pem), (b"x", BOTH)):
        with pytest.raises(IntegrityError):
            folder.store_certificate(leaf, INSTANCE_ID, trust)
    assert folder.credentials() == before


class Server:
    """Says whom to trust, and issues from the new authority."""

    def __init__(self, folder: IdentityFolder, *, trusted: bytes, renew: bool, tells: bool = True) -> None:
        self.folder, self.trusted, self.renew_now, self.tells = folder, trusted, renew, tells
        self.holding: list[str] = []
        self.renewals = 0

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> Renewed:
        self.renewals += 1
        leaf = NEW.client(self.folder.key().public_key(), INSTANCE_ID)
        return Renewed(certificate_pem=leaf, authority_pem=self.trusted)

    async def trust(self, channel: grpc.aio.Channel, holding: str) -> RenewalTrust:
        if not self.tells:
            raise NoSuchMethod("not here")
        self.holding.append(holding)
        return RenewalTrust(authority_pem=self.trusted, renew=self.renew_now)


def keeper(folder: IdentityFolder, server: Server, clock: VirtualClock) -> CertificateKeeper:
    return CertificateKeeper(
        folder=folder, instance_id=INSTANCE_ID, clock=clock, log=structlog.get_logger(), renewal=server
    )


def young(clock: VirtualClock) -> Life:
    now = clock.now_ns() / 1e9
    return Life(start=now, end=now + 365 * 86400)


async def test_new_trust_asks_for_a_new_connection_which_tells_that_it_was_taken_up(
    folder: IdentityFolder,
) -> None:
    clock = VirtualClock()
    server = Server(folder, trusted=BOTH, renew=False)
    async with asyncio.timeout(60):
        await keeper(folder, server, clock).until_renewed(NO_CHANNEL, young(clock))
    assert folder.authority_pem() == BOTH
    again = asyncio.ensure_future(keeper(folder, server, clock).until_renewed(NO_CHANNEL, young(clock)))
    async with asyncio.timeout(60):
        while len(server.holding) < 2:
            await asyncio.sleep(0.005)
    again.cancel()
    assert server.holding == [hashlib.sha256(pem).hexdigest() for pem in (OLD.pem, BOTH)]
    assert server.renewals == 0


async def test_a_young_certificate_is_renewed_when_its_authority_is_being_replaced(
    folder: IdentityFolder,
) -> None:
    clock = VirtualClock()
    folder.trust(BOTH)
    server = Server(folder, trusted=BOTH, renew=True)
    async with asyncio.timeout(60):
        await keeper(folder, server, clock).until_renewed(NO_CHANNEL, young(clock))
    assert server.renewals == 1
    assert folder.credentials().certificate_pem != b""


async def test_it_asks_again_after_an_hour_or_so(folder: IdentityFolder) -> None:
    clock = VirtualClock()
    server = Server(folder, trusted=OLD.pem, renew=False)
    waiting = asyncio.ensure_future(keeper(folder, server, clock).until_renewed(NO_CHANNEL, young(clock)))
    deadline = asyncio.get_running_loop().time() + 60
    while len(server.holding) < 5 and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.002)
        if clock.sleepers:
            await clock.advance(60.0)
    waiting.cancel()
    assert len(server.holding) == 5
    assert 4 * 0.5 <= clock.monotonic() / 3600 <= 4 * 1.5 + 0.1


async def test_a_server_that_says_nothing_of_trust_still_renews(folder: IdentityFolder) -> None:
    clock = VirtualClock()
    server = Server(folder, trusted=BOTH, renew=False, tells=False)
    now = clock.now_ns() / 1e9
    async with asyncio.timeout(60):
        await keeper(folder, server, clock).until_renewed(NO_CHANNEL, Life(start=now - 80, end=now + 20))
    assert server.renewals == 1
