"""Our own agent renews its certificate at our own server, in time and without a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from support.instances.instances_lab import TENANT, Lab, document, lab, until

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.agent import transport
from fleetplane.domains.instances.agent.agent import InstanceAgent
from fleetplane.domains.instances.agent.identity.renewal import Renewed, ServerRenewal
from fleetplane.domains.instances.agent.root import InstanceAgentSettings, make_instance_agent
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.grpc.renewal import check
from fleetplane.domains.instances.kinds import InstanceStatus
from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, PermissionDenied
from fleetplane.node.certificates import ConnectionCredentials, Life, private_pem, public_pem

MINUTE = 60


class LaggingClock(SystemClock):
    """The machine's clock, some time ago: what it dates is older than it should be."""

    def __init__(self) -> None:
        self.behind_seconds = 0.0

    def now_ns(self) -> int:
        return super().now_ns() - round(self.behind_seconds * 1e9)


def short_lived() -> dict[str, Any]:
    """An hour is the shortest life that can be configured."""
    return document(
        certificates={
            "agent": {"kind": "client", "ttl": 1},
            "kubelet.server": {"kind": "server", "cn": "kubelet"},
        },
        # Clocks are set here: nobody is silent for the time in between.
        shard={
            "health_check_interval": "2h",
            "garbage_collection": {"interval": "1s", "registration_timeout": "3h"},
        },
    )


def folders(place: Lab, request: CreateRequest) -> InstanceAgentSettings:
    home = place.folder / request.instance_id
    identity, keys, recv = (home / name for name in ("identity", "keys", "recv"))
    for folder in (identity, keys, recv):
        folder.mkdir(parents=True)
    (identity / "nonce.jwt").write_text(request.nonce)
    (identity / "ca.crt").write_text(request.ca_certificate)
    return InstanceAgentSettings(
        registration_address=request.registration_address,
        agent_address=request.agent_address,
        instance_id=request.instance_id,
        identity_dir=identity,
        keys_dir=keys,
        recv_dir=recv,
        report_interval_seconds=0.1,
        hostname="here",
        ipv4="127.0.0.1",
    )


@asynccontextmanager
async def running(agent: InstanceAgent) -> AsyncIterator[None]:
    task = asyncio.create_task(agent.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def certificate_of(settings: InstanceAgentSettings) -> x509.Certificate:
    return x509.load_pem_x509_certificate((settings.identity_dir / "identity.crt").read_bytes())


class HeldRenewal(ServerRenewal):
    """Asks the server, but not before the test lets it."""

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def renew(self, channel: grpc.aio.Channel, public_key_pem: bytes) -> Renewed:
        await self.may.wait()
        return await super().renew(channel, public_key_pem)


async def test_an_agent_renews_in_time_and_goes_on_without_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, renewal = LaggingClock(), HeldRenewal()
    clock.behind_seconds = 50 * MINUTE  # its certificates have ten minutes left of their hour
    async with lab(tmp_path, short_lived(), clock=clock) as place:
        [request] = await place.created()
        settings = folders(place, request)
        agent = await asyncio.to_thread(
            make_instance_agent, settings, structlog.get_logger(), renewal=renewal
        )
        sessions = place.domain._sessions
        open_when_dialled: list[int] = []
        connect = agent._transport.agent_channel

        def dial(identity: ConnectionCredentials) -> grpc.aio.Channel:
            open_when_dialled.append(len(sessions))
            return connect(identity)

        monkeypatch.setattr(agent._transport, "agent_channel", dial)
        async with running(agent):
            await until(lambda: len(sessions) == 3)
            first = certificate_of(settings)
            clock.behind_seconds = 0.0
            renewal.may.set()
            await until(lambda: agent.sessions == 2)
            renewed = certificate_of(settings)
            await until(lambda: [session.serial for session in sessions] == [renewed.serial_number] * 3)
            assert renewed.serial_number != first.serial_number
            assert renewed.not_valid_after_utc > first.not_valid_after_utc
            assert (renewed.subject, renewed.public_key()) == (first.subject, first.public_key())
            assert open_when_dialled == [0, 3], "the old streams went before the new line was there"
            status = place.instances()[0].status
            assert status is not None
            assert status.certificate_serial == str(renewed.serial_number)
            ends_ns = round(renewed.not_valid_after_utc.timestamp() * 1e9)
            assert status.certificate_expires_at_ns == ends_ns


# The server's side alone.


@asynccontextmanager
async def asking(
    place: Lab, client: str, key: ed25519.Ed25519PrivateKey, *, role: ClientRole = ClientRole.AGENT
) -> AsyncIterator[Callable[[ed25519.Ed25519PrivateKey], Awaitable[x509.Certificate]]]:
    """How a client with a certificate for `key` asks for its next one."""
    authority = place.kernel.authority
    issued = credentials.issue(
        authority,
        key.public_key(),
        role=role,
        tenant=TENANT,
        client=client,
        life_hours=1,
        serial=place.kernel.clock.now_ns(),
    )
    identity = ConnectionCredentials(
        key_pem=private_pem(key),
        certificate_pem=issued.leaf_pem,
        authority_pem=authority.certificate_pem,
        life=Life(start=0, end=1),
    )
    async with transport.agent_channel(place.addresses["agent"], identity) as channel:

        async def ask(wanted: ed25519.Ed25519PrivateKey) -> x509.Certificate:
            renewed = await ServerRenewal().renew(channel, public_pem(wanted))
            assert renewed.authority_pem == authority.trust_pem
            return x509.load_pem_x509_certificate(renewed.certificate_pem)

        yield ask


def new_key() -> ed25519.Ed25519PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


async def refusal(asked: Awaitable[x509.Certificate]) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked
    return caught.value.code()


async def test_the_next_certificate_may_be_for_a_new_key_which_then_is_the_only_one(tmp_path: Path) -> None:
    old, new = new_key(), new_key()
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with asking(place, request.instance_id, old) as ask:
            assert (await ask(old)).public_key() == old.public_key()
            renewed = await ask(new)
            assert renewed.public_key() == new.public_key()
            assert renewed.subject.rfc4514_string() == f"CN={request.instance_id},O={TENANT}"
            assert (await ask(new)).public_key() == new.public_key(), "the answer may have been lost"
            assert await refusal(ask(old)) is grpc.StatusCode.PERMISSION_DENIED
            assert await refusal(ask(new_key())) is grpc.StatusCode.PERMISSION_DENIED
        status = place.instances()[0].status
        assert status is not None
        assert status.key_digest == credentials.key_digest(new.public_key())


async def test_the_revoked_do_not_renew(tmp_path: Path) -> None:
    key = new_key()
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with asking(place, request.instance_id, key) as ask:
            await ask(key)
            await place.domain._revocations.revoke(
                principal=credentials.principal_name(ClientRole.AGENT, TENANT, request.instance_id),
                reason="stolen",
                actor="test",
            )
            assert await refusal(ask(key)) is grpc.StatusCode.UNAUTHENTICATED


async def test_instances_on_their_way_out_do_not_renew(tmp_path: Path) -> None:
    key = new_key()
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with asking(place, request.instance_id, key) as ask:
            await ask(key)
            await place.configure(document(size=0))
            await place.domain._groups.refresh()
            place.domain.look_at(TENANT, "workers")
            await until(lambda: not place.provider.instances)
            assert await refusal(ask(key)) is grpc.StatusCode.FAILED_PRECONDITION
            await place.domain._instances.purge(TENANT, request.instance_id)
            assert await refusal(ask(key)) is grpc.StatusCode.NOT_FOUND


async def test_operators_and_nonsense_are_refused(tmp_path: Path) -> None:
    key = new_key()
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with asking(place, request.instance_id, key, role=ClientRole.OPERATOR) as ask:
            assert await refusal(ask(key)) is grpc.StatusCode.PERMISSION_DENIED
        async with asking(place, "wkr" + "0" * 26, key) as ask:
            assert await refusal(ask(key)) is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("status", "refused"),
    [
        (InstanceStatus(), None),
        (InstanceStatus(key_digest="presented"), None),
        (InstanceStatus(key_digest="wanted"), None),
        (InstanceStatus(key_digest="another"), PermissionDenied),
        (InstanceStatus(key_digest="presented", deleting_at_ns=1), FailedPrecondition),
        (InstanceStatus(key_digest="presented", deleted_at_ns=1), FailedPrecondition),
    ],
)
def test_who_may_have_another_certificate(
    status: InstanceStatus, refused: type[FleetplaneError] | None
) -> None:
    if refused is None:
        check(status, presented="presented", wanted="wanted")
        return
    with pytest.raises(refused):
        check(status, presented="presented", wanted="wanted")
