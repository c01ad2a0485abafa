"""One authority follows another while agents and operators go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from google.protobuf.empty_pb2 import Empty
from instances_lab import TENANT, Lab, document, lab, until
from operator_rig import make_key, private_pem
from original_agent import OriginalAgent

from fleetplane.agents.instance import InstanceAgentSettings, make_instance_agent
from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.agent.instance_agent import InstanceAgent
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2, authority_pb2_grpc
from fleetplane.gen.nstance.v1 import operator_pb2_grpc
from fleetplane.kernel import audit
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.identity.certificates import peer_identity

QUICK = Backoff(first_seconds=0.05, ceiling_seconds=0.2)
Code = grpc.StatusCode


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
        trust_interval_seconds=0.1,
        hostname="here",
        ipv4="127.0.0.1",
    )


@asynccontextmanager
async def running(settings: InstanceAgentSettings) -> AsyncIterator[InstanceAgent]:
    agent = await asyncio.to_thread(make_instance_agent, settings, structlog.get_logger(), backoff=QUICK)
    task = asyncio.create_task(agent.run())
    try:
        yield agent
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def owner(place: Lab) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"unix:{place.folder / 'admin.sock'}") as channel:
        yield authority_pb2_grpc.AuthorityAdminStub(channel)


def issuer(settings: InstanceAgentSettings) -> str:
    return peer_identity((settings.identity_dir / "identity.crt").read_bytes()).issuer_key_id


def reports(place: Lab) -> int:
    return place.domain._reports.received


async def announce(admin: Any) -> Any:
    return await admin.AnnounceAuthority(authority_pb2.AnnounceAuthorityRequest(), timeout=10)


async def switch(admin: Any, *, force: bool = False) -> Any:
    return await admin.SwitchAuthority(authority_pb2.SwitchAuthorityRequest(force=force), timeout=10)


async def retire(admin: Any, *, force: bool = False) -> Any:
    return await admin.RetireAuthority(authority_pb2.RetireAuthorityRequest(force=force), timeout=10)


async def status(admin: Any) -> Any:
    return await admin.GetAuthorities(authority_pb2.GetAuthoritiesRequest(), timeout=10)


async def refusal(call: Any) -> tuple[Code, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_an_agent_works_through_the_whole_succession_and_comes_out_with_a_new_certificate(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        [request] = await place.created()
        settings = folders(place, request)
        async with running(settings):
            await until(lambda: len(place.domain._sessions) == 3)
            first = place.kernel.authority.key_id
            announced = await announce(admin)
            assert [entry.role for entry in announced.authorities] == ["signing", "announced"]
            await until(lambda: not trust_lags(place))
            assert (settings.identity_dir / "ca.crt").read_bytes() == place.kernel.authority.trust_pem
            assert issuer(settings) == first

            switched = await switch(admin)
            second = switched.authorities[0].key_id
            await until(lambda: issuer(settings) == second)
            await until(lambda: sessions_of(place, settings))
            found = await status(admin)
            assert [(entry.role, entry.instances) for entry in found.authorities] == [
                ("signing", 1), ("retiring", 0),
            ]  # fmt: skip

            await retire(admin)
            before = reports(place)
            await until(lambda: reports(place) > before + 5)
            await until(lambda: roots(settings) == [second])
            assert (await status(admin)).phase == "steady"
        # And again from nothing but its folder, at listeners that present only the new authority.
        async with running(settings):
            before = reports(place)
            await until(lambda: reports(place) > before + 2)
        assert len(place.instances()) == 1, "nobody was replaced"


def trust_lags(place: Lab) -> bool:
    status = place.instances()[0].status
    assert status is not None
    return status.trust != place.kernel.authority.trust_id


def sessions_of(place: Lab, settings: InstanceAgentSettings) -> bool:
    serial = peer_identity((settings.identity_dir / "identity.crt").read_bytes()).serial
    sessions = list(place.domain._sessions)
    return len(sessions) == 3 and all(session.serial == serial for session in sessions)


def roots(settings: InstanceAgentSettings) -> list[str]:
    known = x509.load_pem_x509_certificates((settings.identity_dir / "ca.crt").read_bytes())
    return [
        found.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()
        for found in known
    ]


async def test_a_retired_authority_is_refused_at_once_on_open_and_on_new_connections(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        [request] = await place.created()
        nonce_holder = await place_agent(place, request)
        process = asyncio.create_task(nonce_holder.run())
        await until(lambda: nonce_holder.opened["reports"] > 0 and reports(place) > 0)
        await announce(admin)
        code, words = await refusal(switch(admin))
        assert code is Code.FAILED_PRECONDITION
        assert request.instance_id in words, "the first implementation learns nothing"
        await switch(admin, force=True)
        held = reports(place)
        await until(lambda: reports(place) > held + 2)

        code, words = await refusal(retire(admin))
        assert code is Code.FAILED_PRECONDITION
        assert "1 instance " in words
        await retire(admin, force=True)
        async with asyncio.timeout(5):
            with pytest.raises(Exception, match="revoked"):
                await process
        again = await place_agent(place, request, fresh=False)
        async with asyncio.timeout(10):
            with pytest.raises(Exception):  # noqa: B017, PT011  # it does not even trust the server
                await again.run()


async def place_agent(place: Lab, request: CreateRequest, *, fresh: bool = True) -> OriginalAgent:
    identity = place.folder / "original" / "identity"
    if fresh:
        identity.mkdir(parents=True)
        (identity / "nonce.jwt").write_text(request.nonce)
        (identity / "ca.crt").write_text(request.ca_certificate)
    return OriginalAgent(
        identity,
        place.addresses["registration"],
        place.addresses["agent"],
        instance_id=request.instance_id,
        report_interval=0.1,
        reports_pause=0.1,
        files_pause=0.1,
    )


async def test_an_operators_certificate_is_good_until_its_authority_is_retired(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        key = make_key()
        issued = credentials.issue(
            place.kernel.authority, key.public_key(), role=ClientRole.OPERATOR, tenant=TENANT, client="lab",
            life_hours=1, serial=place.kernel.clock.now_ns(),
        )  # fmt: skip
        await announce(admin)
        bundle = place.kernel.authority.trust_pem
        await switch(admin, force=True)
        identity = grpc.ssl_channel_credentials(bundle, private_pem(key), issued.leaf_pem)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(place.addresses["operator"], identity, options=options) as channel:
            operator: Any = operator_pb2_grpc.OperatorServiceStub(channel)
            assert (await operator.ListGroups(Empty(), timeout=5)).groups
            watch = operator.WatchGroups(Empty())
            assert (await watch.read()).group.key == "workers"
            await retire(admin, force=True)
            assert (await refusal(to_the_end(watch)))[0] is Code.UNAUTHENTICATED
            code, _ = await refusal(operator.ListGroups(Empty(), timeout=5))
            assert code in (Code.UNAUTHENTICATED, Code.UNAVAILABLE)


async def to_the_end(watch: Any) -> None:
    async with asyncio.timeout(5):
        while True:
            await watch.read()


async def test_files_that_name_the_authorities_and_certificates_are_delivered_anew(tmp_path: Path) -> None:
    wanted = document()
    wanted["templates"]["worker"]["files"]["trust.crt"] = {
        "kind": "string", "template": "{{ .Cluster.CACert }}",
    }  # fmt: skip
    async with lab(tmp_path, wanted) as place, owner(place) as admin:
        [request] = await place.created()
        settings = folders(place, request)
        async with running(settings):
            received = settings.recv_dir

            def holds(name: str, expected: bytes) -> bool:
                path = received / name
                return path.exists() and path.read_bytes() == expected

            def signer() -> str:
                return peer_identity((received / "kubelet.crt").read_bytes()).issuer_key_id

            await until(lambda: holds("trust.crt", place.kernel.authority.trust_pem), seconds=20)
            await until((received / "kubelet.crt").exists, seconds=20)
            first = signer()
            await announce(admin)
            await until(lambda: holds("trust.crt", place.kernel.authority.trust_pem), seconds=20)
            assert signer() == first, "what the others do not trust yet is not used yet"
            await until(lambda: not trust_lags(place))
            await switch(admin)
            await until(lambda: signer() == place.kernel.authority.key_id, seconds=20)


async def test_the_steps_are_in_the_audit_log_and_come_in_order(tmp_path: Path) -> None:
    async with lab(tmp_path, document(size=0)) as place, owner(place) as admin:
        code, _ = await refusal(switch(admin))
        assert code is Code.FAILED_PRECONDITION
        await announce(admin)
        code, _ = await refusal(announce(admin))
        assert code is Code.FAILED_PRECONDITION
        code, _ = await refusal(retire(admin, force=True))
        assert code is Code.FAILED_PRECONDITION
        await switch(admin)
        await retire(admin)
        entries = [audit.read(row) async for row in place.kernel.store.audit()]
    assert [entry.action for entry in entries if entry.actor == "local"] == [
        "identity.announce-authority", "identity.switch-authority", "identity.retire-authority",
    ]  # fmt: skip


# The nonce key.


async def test_nonces_stay_good_when_their_key_is_replaced(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        [request] = await place.created()
        old = place.nonces.kid
        done = await admin.RotateNonceKey(authority_pb2.RotateNonceKeyRequest(), timeout=10)
        assert done.key_id == place.nonces.kid != old
        async with running(folders(place, request)):
            await until(lambda: len(place.domain._sessions) == 3)


async def test_a_nonce_that_is_signed_again_with_the_next_key_is_the_same_nonce(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        await place.nonces.rotate(actor="test")
        instance = place.instances()[0]
        machinery = place.domain._machinery
        assert machinery is not None
        assert instance.status is not None
        again = machinery.launcher._nonce(instance.name, TENANT, instance.spec, instance.status)
        assert again != request.nonce
        first = await place_agent(place, request)
        (first.identity_dir / "nonce.jwt").write_text(again)
        answer = await first.register()
        assert answer is not None
        assert answer.authority_pem == place.kernel.authority.trust_pem

        thief = OriginalAgent(
            tmp_path / "thief" / "identity", place.addresses["registration"], place.addresses["agent"],
            place.ca, instance_id=request.instance_id,
        )  # fmt: skip
        (thief.identity_dir / "nonce.jwt").write_text(request.nonce)
        with pytest.raises(Exception, match="nonce already used"):
            await thief.register()
