"""The protocol's own clients, by hand and to the byte, through the whole life of an instance."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from support.instances.instances_lab import TENANT, Lab, document, lab, until
from support.instances.original_agent import OriginalAgent, OriginalOperator, ProcessExit, _write_pair
from support.shared.h2_grpc import GrpcFailed, connect, tls_context

from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderStatus
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.records.groups import SilencePolicy
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2, registration_pb2
from fleetplane.kernel.errors import NotFound

Generation = Literal["first", "second"]


def agent_of(
    place: Lab, request: CreateRequest, *, generation: Generation = "second", **changes: Any
) -> OriginalAgent:
    folder = place.folder / request.instance_id / "identity"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nonce.jwt").write_text(request.nonce)
    (folder / "ca.crt").write_text(request.ca_certificate)
    pace = {"report_interval": 0.2, "files_pause": 0.1, "reports_pause": 0.1, **changes}
    return OriginalAgent(
        folder,
        request.registration_address,
        request.agent_address,
        instance_id=request.instance_id,
        generation=generation,
        **pace,
    )


@asynccontextmanager
async def running(agent: OriginalAgent) -> AsyncIterator[OriginalAgent]:
    """Registered, and alive until the test is done with it."""
    await agent.register()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_swallow(agent))
        yield agent
        task.cancel()


async def _swallow(agent: OriginalAgent) -> None:
    with contextlib.suppress(ProcessExit):  # its process would have ended; tests look at exit_reason
        await agent.run()


@asynccontextmanager
async def operator(place: Lab, *, tenant: str = TENANT) -> AsyncIterator[OriginalOperator]:
    folder = place.folder / f"operator-{tenant}"
    folder.mkdir(exist_ok=True)
    (folder / "ca.crt").write_bytes(place.ca.read_bytes())
    if not (folder / "identity.crt").exists():
        await OriginalOperator.register(
            folder, place.addresses["registration"], place.operator_nonce(tenant=tenant)
        )
    async with OriginalOperator(folder, place.addresses["operator"]) as client:
        yield client


async def events_into(client: OriginalOperator, method: str, seen: list[Any]) -> None:
    async for event in client.watch(method):
        seen.append(event)  # noqa: PERF401  # one by one, as they come: the test looks meanwhile


# Registration


async def test_an_agent_registers_once_with_the_certificate_the_protocol_asks_for(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        await until(lambda: all(i.status is not None and i.status.provider_id for i in place.instances()))
        agent = agent_of(place, request)
        answer = await agent.register()

        assert answer is not None
        certificate = agent.certificate
        assert certificate.subject.rfc4514_string() == f"CN={request.instance_id},O={TENANT}"
        role = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier("1.3.6.1.4.1.999999.1"))
        assert not role.critical
        assert isinstance(role.value, x509.UnrecognizedExtension)
        assert role.value.value == b"\x13\x05agent"
        with pytest.raises(x509.ExtensionNotFound):
            certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        assert answer.expires_at.seconds > time.time() + 300 * 86_400
        [instance] = place.instances()
        assert instance.status is not None
        said = (instance.status.hostname, instance.status.private_ipv4)
        assert said == (request.instance_id, "127.0.0.1"), "the provider's word stands"


async def test_a_lost_answer_may_be_asked_for_again_with_the_same_key_only(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        agent = agent_of(place, request)
        await agent.register()
        (agent.identity_dir / "nonce.jwt").write_text(request.nonce)
        assert await agent.register() is not None

        thief = OriginalAgent(
            tmp_path / "thief" / "identity",
            request.registration_address,
            request.agent_address,
            place.ca,
            instance_id=request.instance_id,
        )
        (thief.identity_dir / "nonce.jwt").write_text(request.nonce)
        with pytest.raises(GrpcFailed) as caught:
            await thief.register()
        assert (caught.value.code, caught.value.message) == (16, "nonce already used")


async def test_of_sixty_four_thieves_of_one_nonce_one_gets_in(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()

        async def steal(number: int) -> bool:
            folder = tmp_path / f"thief-{number}" / "identity"
            folder.mkdir(parents=True)
            (folder / "nonce.jwt").write_text(request.nonce)
            (folder / "ca.crt").write_text(request.ca_certificate)
            agent = OriginalAgent(
                folder, request.registration_address, request.agent_address, instance_id=request.instance_id
            )
            try:
                return await agent.register() is not None
            except GrpcFailed as error:
                # Refused for the nonce, or turned away by the address's rate limit.
                assert error.code in (8, 16)
                return False

        assert sum(await asyncio.gather(*(steal(number) for number in range(64)))) == 1


@pytest.mark.parametrize(
    ("claims", "code", "message"),
    [
        ({"kind": "operator"}, 16, "not for an agent"),
        ({"cluster_id": "other"}, 3, "cluster_id mismatch"),
        ({"shard": "other"}, 3, "shard mismatch"),
        ({"sub": "wkr" + "0" * 26}, 16, "nonce validation failed"),
        ({"exp": 1}, 16, "expired"),
        ({"tenant": ""}, 16, "tenant is missing"),
    ],
)
async def test_a_wrong_nonce_is_refused_with_the_code_of_the_protocol(
    tmp_path: Path, claims: dict[str, Any], code: int, message: str
) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        nonce = place.nonces.sign(
            {
                "sub": request.instance_id,
                "kind": "agent",
                "cluster_id": "lab",
                "shard": "local",
                "tenant": TENANT,
                **claims,
            },
            life_seconds=60,
        )
        folder = tmp_path / "wrong"
        folder.mkdir()
        _write_pair(folder, "identity", 0o600)
        asked = registration_pb2.RegisterClientRequest(
            registration_nonce_jwt=nonce, public_key_pem=(folder / "identity.pub").read_bytes()
        )
        async with connect(request.registration_address, tls_context(place.ca)) as channel:
            with pytest.raises(GrpcFailed) as caught:
                await channel.unary(
                    "/nstance.v1.RegistrationService/RegisterAgent", asked.SerializeToString()
                )
        assert caught.value.code == code
        assert message in caught.value.message


async def test_tls_1_2_is_refused_on_every_listener(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, operator(place) as admin:
        [request] = await place.created()
        agent = agent_of(place, request)
        await agent.register()
        for listener, method, folder in (
            ("registration", "RegistrationService/RegisterAgent", None),
            ("agent", "AgentService/SubmitPublicKeys", agent.identity_dir),
            ("operator", "OperatorService/ListGroups", admin.identity_dir),
        ):
            identity = (
                {"certificate": folder / "identity.crt", "key": folder / "identity.key"} if folder else {}
            )
            context = tls_context(place.ca, **identity)
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            async with connect(place.addresses[listener], context) as channel:
                with pytest.raises(GrpcFailed) as caught:
                    await channel.unary(f"/nstance.v1.{method}", b"")
            assert caught.value.code == 16, listener
            assert "TLS 1.3" in caught.value.message, listener


# Files and keys


@pytest.mark.parametrize("generation", ["first", "second"])
async def test_an_agent_makes_its_keys_and_receives_its_files(tmp_path: Path, generation: Generation) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with running(agent_of(place, request, generation=generation)) as agent:
            await until(lambda: {"app.env", "kubelet.crt"} <= agent.received_files.keys())

            files = agent.received_files
            assert files["app.env"].decode() == f"COLOUR=blue\nID={request.instance_id}"
            leaf = x509.load_pem_x509_certificate(files["kubelet.crt"])
            assert leaf.subject.rfc4514_string() == "CN=kubelet"
            key = (agent.keys_dir / "kubelet.server.pub").read_bytes()
            assert leaf.public_key() == serialization.load_pem_public_key(key)
            assert agent.exit_reason is None


async def test_a_changed_configuration_reaches_the_agent_as_a_whole_patch(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with running(agent_of(place, request)) as agent, operator(place) as admin:
            await until(lambda: "app.env" in agent.received_files)
            before = agent.config_hash
            changed = document()
            changed["templates"]["worker"]["vars"]["Colour"] = "red"
            await place.configure(changed)
            answer = await admin.call("RefreshConfig")

            assert answer.updated is True
            await until(lambda: b"COLOUR=red" in agent.received_files.get("app.env", b""))
            await until(lambda: agent.config_hash != before)
            assert agent.exit_reason is None


# Groups


async def test_a_group_grows_and_shrinks_through_its_operator(tmp_path: Path) -> None:
    async with lab(tmp_path, document(size=1)) as place, operator(place) as admin:
        await place.created(1)
        request = operator_pb2.UpsertGroupRequest(
            key="workers", config=operator_pb2.GroupConfig(template="worker", size=3)
        )
        status = await admin.call("UpsertGroup", request)
        assert (status.size, status.is_static) == (3, True)
        await place.created(3)
        listed = await admin.call("ListGroups")
        assert [(group.key, group.size) for group in listed.groups] == [("workers", 3)]

        request.config.size = 0
        await admin.call("UpsertGroup", request)
        # Nobody registered, so nobody has to be asked to leave.
        await until(lambda: not place.provider.instances)


async def test_a_silent_instance_is_drained_with_notice_and_replaced(tmp_path: Path) -> None:
    at_once = SilencePolicy(silence_share=1.0)  # the only instance of a group is held otherwise
    slow = document(shard={"default_drain_timeout": "10m"})  # it is drained when that is acknowledged
    async with lab(tmp_path, slow, silence=at_once) as place, operator(place) as admin:
        events: list[Any] = []
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(events_into(admin, "WatchInstances", events))
            [request] = await place.created()
            agent = agent_of(place, request)
            await agent.register()  # and never reports
            await until(lambda: any(event.status == "pending_deletion" for event in events), seconds=60)
            notice = events[0]
            assert (notice.instance_id, notice.reason) == (request.instance_id, "unhealthy")
            assert notice.provider_instance_id
            await place.created(2)
            assert request.instance_id in place.provider.instances, "not before it was drained"

            await admin.call(
                "AcknowledgeDrained", operator_pb2.DrainAckRequest(instance_id=request.instance_id)
            )
            await until(lambda: [event.status for event in events][-1:] == ["deleted"])
            assert request.instance_id not in place.provider.instances
            watching.cancel()


async def test_what_the_provider_loses_is_replaced_without_a_drain(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with running(agent_of(place, request)):
            place.provider.set_status(request.instance_id, ProviderStatus.STOPPED)
            await place.created(2, seconds=60)
            await until(lambda: request.instance_id not in place.provider.instances)
            [lost] = [found for found in place.instances() if found.name == request.instance_id]
            assert lost.status is not None
            assert lost.status.drain is not None
            assert lost.status.drain.reason == rules.RemovalCause.PROVIDER_LOST
            assert lost.status.drain.acked_at_ns is None


async def test_a_spot_notice_drains_the_instance_at_once(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        agent = agent_of(place, request)
        agent.termination_notice = agent_pb2.TerminationNotice(action="terminate")
        async with running(agent):
            await place.created(2, seconds=60)
            [old] = [i for i in place.instances() if i.name == request.instance_id]
            assert old.status is not None
            assert old.status.drain is not None
            assert old.status.drain.reason == rules.RemovalCause.SPOT


async def test_a_lost_answer_of_the_provider_makes_no_second_machine(tmp_path: Path) -> None:
    async with lab(tmp_path) as place:
        place.provider.script(MockFault(operation="create_instance", after=True))
        await place.configure(document())
        await place.domain._groups.refresh()
        [request] = await place.created()
        await until(
            lambda: all(i.status is not None and i.status.provider_id for i in place.instances()), seconds=60
        )

        assert len(place.provider.instances) == 1
        agent = agent_of(place, request)
        assert await agent.register() is not None, "the nonce of the first request still works"


# Operators


async def test_an_agents_certificate_opens_no_operator_listener_and_the_reverse(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        agent = agent_of(place, request)
        await agent.register()
        async with OriginalOperator(agent.identity_dir, place.addresses["operator"]) as imposter:
            with pytest.raises(GrpcFailed) as caught:
                await imposter.call("ListGroups")
        assert caught.value.code == 7
        assert caught.value.message == "insufficient permissions: required role operator, have role agent"


async def test_every_watcher_of_a_tenant_gets_every_event(tmp_path: Path) -> None:
    async with lab(tmp_path, document(size=0)) as place, operator(place) as one, operator(place) as two:
        seen: tuple[list[Any], list[Any]] = ([], [])
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(events_into(client, "WatchGroups", events))
                for client, events in zip((one, two), seen, strict=True)
            ]
            await until(lambda: all(seen))
            config = operator_pb2.GroupConfig(template="worker", size=0, vars={"Colour": "green"})
            await one.call("UpsertGroup", operator_pb2.UpsertGroupRequest(key="workers", config=config))
            await until(lambda: all(events[-1].group.vars.get("Colour") == "green" for events in seen))
            for task in watching:
                task.cancel()

        assert all(events[0].type == operator_pb2.GroupEvent.TYPE_UPSERT for events in seen)


async def test_another_tenants_instance_is_not_found(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, operator(place, tenant="rival") as rival:
        [request] = await place.created()
        with pytest.raises(GrpcFailed) as caught:
            await rival.call(
                "GetInstanceStatus", operator_pb2.GetInstanceStatusRequest(instance_id=request.instance_id)
            )
        assert caught.value.code == 5
        assert list((await rival.call("ListGroups")).groups) == []


async def test_a_bad_configuration_changes_nothing_and_says_where_it_is_wrong(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, operator(place) as admin:
        before = await admin.call("GetConfigStatus")
        bad = document()
        bad["templates"]["worker"]["kind"] = "WORKER"
        await place.configure(bad)
        with pytest.raises(GrpcFailed) as caught:
            await admin.call("RefreshConfig")

        assert caught.value.code == 3
        assert "templates.worker.kind" in caught.value.message
        after = await admin.call("GetConfigStatus")
        assert (after.etag, after.size) == (before.etag, before.size)
        assert before.last_modified.seconds > 0


async def test_an_operator_renews_its_certificate(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, operator(place) as admin:
        key = (admin.identity_dir / "identity.pub").read_bytes()
        answer = await admin.call(
            "RenewCertificate", operator_pb2.RenewCertificateRequest(public_key_pem=key)
        )

        renewed = x509.load_pem_x509_certificate(answer.client_certificate_pem)
        assert renewed.subject.rfc4514_string() == f"CN=lab,O={TENANT}"


async def test_whoever_is_revoked_is_cut_off_within_a_second_and_kept_out(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place, operator(place) as admin:
        [request] = await place.created()
        principal = f"operator/{TENANT}/lab"
        ended: list[GrpcFailed] = []

        async def watch() -> None:
            try:
                await events_into(admin, "WatchGroups", seen)
            except GrpcFailed as error:
                ended.append(error)

        seen: list[Any] = []
        async with running(agent_of(place, request)) as agent, asyncio.TaskGroup() as tasks:
            await until(lambda: "app.env" in agent.received_files)
            tasks.create_task(watch())
            await until(lambda: bool(seen))
            for name in (principal, f"agent/{TENANT}/{request.instance_id}"):
                await place.kernel.revocations.revoke(principal=name, reason="lost", actor="test")

            await until(lambda: bool(ended), seconds=60)
            assert ended[0].code == 16
            await until(lambda: agent.exit_reason is not None, seconds=60)
        with pytest.raises(GrpcFailed) as caught:
            await admin.call("ListGroups")
        assert caught.value.code == 16
        assert "revoked" in caught.value.message


async def test_agents_streams_end_cleanly_when_the_server_stops(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        [request] = await place.created()
        async with running(agent_of(place, request)) as agent:
            await until(lambda: "app.env" in agent.received_files)
            place.domain.drain()
            await asyncio.sleep(0.3)
            assert agent.exit_reason is None, "a clean end is no reason for the original to exit"


async def test_nothing_is_configured_and_everything_says_so(tmp_path: Path) -> None:
    async with lab(tmp_path) as place:
        with pytest.raises(NotFound, match="there is no configuration"):
            await place.domain._groups.refresh()
