"""One authority follows another while agents and operators go on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from cryptography import x509
from google.protobuf.empty_pb2 import Empty
from support.instances.instances_lab import TENANT, Lab, document, lab, until
from support.instances.operator_rig import make_key, private_pem
from support.instances.original_agent import OriginalAgent

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.agent.agent import InstanceAgent
from fleetplane.domains.instances.agent.root import InstanceAgentSettings, make_instance_agent
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2, authority_pb2_grpc
from fleetplane.gen.nstance.v1 import operator_pb2_grpc
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import Backoff
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
    return await admin.AnnounceAuthority(authority_pb2.AnnounceAuthorityRequest(), timeout=60)


async def switch(admin: Any, *, force: bool = False) -> Any:
    return await admin.SwitchAuthority(authority_pb2.SwitchAuthorityRequest(force=force), timeout=60)


async def retire(admin: Any, *, force: bool = False) -> Any:
    return await admin.RetireAuthority(authority_pb2.RetireAuthorityRequest(force=force), timeout=60)


async def status(admin: Any) -> Any:
    return await admin.GetAuthorities(authority_pb2.GetAuthoritiesRequest(), timeout=60)


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
                ("signing", 1),
                ("retiring", 0),
            ]

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
        assert list((await status(admin)).unaware_instances) == [request.instance_id]
        await switch(admin)
        held = reports(place)
        await until(lambda: reports(place) > held + 2)

        code, words = await refusal(retire(admin))
        assert code is Code.FAILED_PRECONDITION
        assert request.instance_id in words, "the first implementation learns nothing"
        await retire(admin, force=True)
        async with asyncio.timeout(60):
            with pytest.raises(Exception, match="revoked"):
                await process
        again = await place_agent(place, request, fresh=False)
        async with asyncio.timeout(60):
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
            place.kernel.authority,
            key.public_key(),
            role=ClientRole.OPERATOR,
            tenant=TENANT,
            client="lab",
            life_hours=1,
            serial=place.kernel.clock.now_ns(),
        )
        bundle = place.kernel.authority.trust_pem  # and it learns of no other
        for step in (announce, switch):
            async with place.presenting_anew():
                await step(admin)
        identity = grpc.ssl_channel_credentials(bundle, private_pem(key), issued.leaf_pem)
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.secure_channel(place.addresses["operator"], identity, options=options) as channel:
            operator: Any = operator_pb2_grpc.OperatorServiceStub(channel)
            assert (await operator.ListGroups(Empty(), timeout=60)).groups
            watch = operator.WatchGroups(Empty())
            assert (await watch.read()).group.key == "workers"
            await retire(admin, force=True)
            assert (await refusal(to_the_end(watch)))[0] is Code.UNAUTHENTICATED
            code, _ = await refusal(operator.ListGroups(Empty(), timeout=60))
            assert code in (Code.UNAUTHENTICATED, Code.UNAVAILABLE)


async def to_the_end(watch: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            await watch.read()


async def test_files_that_name_the_authorities_and_certificates_are_delivered_anew(tmp_path: Path) -> None:
    wanted = document()
    wanted["templates"]["worker"]["files"]["trust.crt"] = {
        "kind": "string",
        "template": "{{ .Cluster.CACert }}",
    }
    wanted["templates"]["worker"]["files"]["peers.crt"] = {
        "kind": "string",
        "template": "{{ .Cluster.WorkloadCACert }}",
    }
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

            await until(lambda: holds("trust.crt", everyone(place)), seconds=60)
            await until((received / "kubelet.crt").exists, seconds=60)
            assert holds("peers.crt", place.workloads.trust_pem)
            first = signer()
            await announce(admin)
            await until(lambda: holds("trust.crt", everyone(place)), seconds=60)
            assert signer() == first, "what the others do not trust yet is not used yet"
            await until(lambda: not trust_lags(place))
            await switch(admin)
            await until(lambda: signer() == place.workloads.key_id != first, seconds=60)


def everyone(place: Lab) -> bytes:
    """What files hold as the authorities: of the fleet, and of workloads."""
    return place.kernel.authority.trust_pem + place.workloads.trust_pem


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
        "identity.announce-authority",
        "identity.announce-workload-authority",
        "identity.switch-authority",
        "identity.switch-workload-authority",
        "identity.retire-authority",
        "identity.retire-workload-authority",
    ]


async def test_an_agent_that_knows_only_the_old_authority_comes_back_after_the_switch(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        [request] = await place.created()
        first = await place_agent(place, request)
        await first.register()
        for step in (announce, switch):
            async with place.presenting_anew():
                await step(admin)
        presented = await place_presents(place)
        assert presented == place.kernel.authority.key_id, "listeners present the new one"

        # Its ca.crt is as old as itself, and it makes a new connection.
        process = asyncio.create_task((await place_agent(place, request, fresh=False)).run())
        before = reports(place)
        await until(lambda: reports(place) > before + 2)
        process.cancel()
        with suppress(asyncio.CancelledError):
            await process


async def test_an_agent_that_reads_only_the_first_of_two_authorities_registers_before_and_after_the_switch(
    tmp_path: Path,
) -> None:
    async with lab(tmp_path, document(size=0)) as place, owner(place) as admin:
        for step in (announce, switch):
            async with place.presenting_anew():
                await step(admin)
            await place.configure(document(size=len(place.requests) + 1))
            await place.domain._groups.refresh()
            request = (await place.created(len(place.requests) + 1))[-1]
            identity = tmp_path / step.__name__ / "identity"
            identity.mkdir(parents=True)
            end = "-----END CERTIFICATE-----\n"
            (identity / "ca.crt").write_text(request.ca_certificate.partition(end)[0] + end)
            (identity / "nonce.jwt").write_text(request.nonce)
            agent = OriginalAgent(
                identity,
                place.addresses["registration"],
                place.addresses["agent"],
                instance_id=request.instance_id,
            )
            assert await agent.register() is not None
        found = await status(admin)
        assert list(found.unaware_instances) == [next(iter(place.requests))], "only what was shown counts"


async def place_presents(place: Lab) -> str:
    """The authority behind what the agents' listener presents, once it is the one that signs."""
    host, _, port = place.addresses["agent"].rpartition(":")
    async with asyncio.timeout(60):
        while True:
            pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
            found = peer_identity(pem).issuer_key_id
            if found == place.kernel.authority.key_id:
                return found
            await asyncio.sleep(0.05)


async def test_another_servers_authority_is_imported_and_both_servers_share_it(tmp_path: Path) -> None:
    async with lab(tmp_path / "a", document(size=0)) as first, owner(first) as admin:
        exported = await admin.ExportAuthority(authority_pb2.ExportAuthorityRequest(), timeout=60)
        actions = [audit.read(row).action async for row in first.kernel.store.audit()]
        assert "identity.export-authority" in actions
    certificate, _, key = exported.fleet_pem.partition(b"-----BEGIN PRIVATE KEY-----")
    workload, _, workload_key = exported.workload_pem.partition(b"-----BEGIN PRIVATE KEY-----")
    begin = b"-----BEGIN PRIVATE KEY-----"
    wanted = authority_pb2.ImportAuthorityRequest(
        certificate_pem=certificate,
        key_pem=begin + key,
        workload_certificate_pem=workload,
        workload_key_pem=begin + workload_key,
    )
    async with lab(tmp_path / "b", document(size=0)) as second, owner(second) as admin:
        found = await admin.ImportAuthority(wanted, timeout=60)
        assert found.phase == "announced"
        code, _ = await refusal(admin.ImportAuthority(wanted, timeout=60))
        assert code is Code.FAILED_PRECONDITION
        await switch(admin)
        await retire(admin)
        assert second.kernel.authority.trust_pem == first.kernel.authority.trust_pem
        assert second.workloads.trust_pem == first.workloads.trust_pem


# The nonce key.


async def test_nonces_stay_good_when_their_key_is_replaced(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, owner(place) as admin:
        [request] = await place.created()
        old = place.nonces.kid
        done = await admin.RotateNonceKey(authority_pb2.RotateNonceKeyRequest(), timeout=60)
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
        again = machinery.intents.nonce(instance.name, TENANT, instance.spec, instance.status)
        assert again != request.nonce
        first = await place_agent(place, request)
        (first.identity_dir / "nonce.jwt").write_text(again)
        answer = await first.register()
        assert answer is not None
        assert answer.authority_pem == place.kernel.authority.trust_pem

        thief = OriginalAgent(
            tmp_path / "thief" / "identity",
            place.addresses["registration"],
            place.addresses["agent"],
            place.ca,
            instance_id=request.instance_id,
        )
        (thief.identity_dir / "nonce.jwt").write_text(request.nonce)
        with pytest.raises(Exception, match="nonce already used"):
            await thief.register()
