"""Agents whose instance is gone, whose certificate was revoked, or who ask for more than they may have."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.instances.controller_rig import rig, wanted
from support.instances.instances_lab import TENANT, Lab, document, lab, until
from support.instances.original_agent import OriginalAgent
from support.shared.h2_grpc import GrpcFailed, H2Channel, connect, tls_context

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.grpc.operators import _deleting as delete_on_request
from fleetplane.domains.instances.kinds import PUBLIC_KEY
from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderContext, ProviderError
from fleetplane.domains.instances.providers.mock.provider import MockFault, MockProvider
from fleetplane.domains.instances.records.instances import KEYS_LIMIT, Instances
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import NotFound, ResourceExhausted

SERVICE = "/nstance.v1.AgentService"
QUIET = {"health_check_interval": "60s"}


async def registered(place: Lab, *, name: str = "agent") -> OriginalAgent:
    [request] = await place.created()
    folder = place.folder / name / "identity"
    folder.mkdir(parents=True)
    (folder / "nonce.jwt").write_text(request.nonce)
    (folder / "ca.crt").write_text(request.ca_certificate)
    agent = OriginalAgent(
        folder, request.registration_address, request.agent_address, instance_id=request.instance_id
    )
    await agent.register()
    return agent


def channel(place: Lab, agent: OriginalAgent) -> Any:
    folder = agent.identity_dir
    context = tls_context(folder / "ca.crt", certificate=folder / "identity.crt", key=folder / "identity.key")
    return connect(place.addresses["agent"], context)


async def delete(place: Lab, name: str) -> None:
    await Instances(place.kernel.store).step(TENANT, name, delete_on_request, action="delete")
    await until(lambda: all(rules.state(one) is rules.State.DELETED for one in place.instances()[:1]))


async def refused(line: H2Channel, method: str) -> GrpcFailed:
    with pytest.raises(GrpcFailed) as caught:
        async for _ in await line.down(f"{SERVICE}/{method}", b""):
            pass
    return caught.value


@pytest.mark.parametrize(
    "method", ["ReceiveFiles", "ReceiveKeyRequests", "SubmitHealthReport", "KeyGenRequests", "ReportHealth"]
)
async def test_the_agent_of_a_deleted_instance_is_turned_away(tmp_path: Path, method: str) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        await delete(place, agent.instance_id)
        async with channel(place, agent) as line:
            error = await refused(line, method)
        assert error.code == 7
        assert "is not known any more" in error.message
        assert place.domain._agents._sent == {}


async def test_open_streams_end_cleanly_when_their_instance_is_deleted(tmp_path: Path) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        async with channel(place, agent) as line:
            streams = [await line.down(f"{SERVICE}/ReceiveFiles", b"")]
            reports = line.open(f"{SERVICE}/SubmitHealthReport")
            await until(lambda: len(place.domain._sessions) == 2)
            await delete(place, agent.instance_id)
            async with asyncio.timeout(60):
                for stream in (*streams, reports):
                    await stream.ended.wait()
                    stream.check()  # with status 0, although the next report was nowhere near


async def test_a_revoked_certificate_ends_a_report_stream_that_is_waiting(tmp_path: Path) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        async with channel(place, agent) as line:
            reports = line.open(f"{SERVICE}/SubmitHealthReport")
            await until(lambda: len(place.domain._sessions) == 1)
            name = credentials.principal_name(credentials.ClientRole.AGENT, TENANT, agent.instance_id)
            await place.domain._revocations.revoke(principal=name, reason="stolen", actor="ada")
            async with asyncio.timeout(60):
                await reports.ended.wait()
            assert (await refused(line, "ReceiveFiles")).code == 16


async def test_a_newer_report_stream_is_no_reason_for_suspicion(tmp_path: Path) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        async with channel(place, agent) as line:
            first = line.open(f"{SERVICE}/SubmitHealthReport")
            await until(lambda: len(place.domain._sessions) == 1)
            line.open(f"{SERVICE}/SubmitHealthReport")
            async with asyncio.timeout(60):
                await first.ended.wait()
            machinery = place.domain._machinery
            assert machinery is not None
            assert machinery._rechecks == set()
        await until(lambda: machinery._rechecks == {agent.instance_id})


async def test_an_instance_that_is_being_deleted_registers_nobody(tmp_path: Path) -> None:
    async with lab(tmp_path, document()) as place:
        place.provider.script(MockFault(operation="delete_instance", count=0))
        [request] = await place.created()
        await Instances(place.kernel.store).step(
            TENANT, request.instance_id, delete_on_request, action="delete"
        )
        with pytest.raises(GrpcFailed) as caught:
            await registered(place)
        assert (caught.value.code, caught.value.message) == (
            16,
            "nonce validation failed: the instance is being deleted",
        )


async def test_what_is_remembered_of_a_stream_goes_with_it(tmp_path: Path) -> None:
    config = document(shard=QUIET)
    del config["templates"]["worker"]["files"]["kubelet.crt"]
    async with lab(tmp_path, config) as place:
        agent = await registered(place)
        async with channel(place, agent) as line:
            stream = await line.down(f"{SERVICE}/ReceiveFiles", b"")
            await until(lambda: agent.instance_id in place.domain._agents._sent)
            stream.cancel()
            await until(lambda: place.domain._agents._sent == {})


async def test_files_that_are_made_for_a_stream_which_was_replaced_count_as_sent_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = document(shard=QUIET)
    del config["templates"]["worker"]["files"]["kubelet.crt"]
    async with lab(tmp_path, config) as place:
        agent = await registered(place)
        service = place.domain._agents
        make, turns = service._files.make, list[asyncio.Event]()

        async def held(*names: Any, **more: Any) -> dict[str, bytes]:
            turns.append(asyncio.Event())
            await turns[-1].wait()
            return await make(*names, **more)

        monkeypatch.setattr(service._files, "make", held)
        async with channel(place, agent) as line:
            older = await line.down(f"{SERVICE}/ReceiveFiles", b"")
            await until(lambda: len(turns) == 1)
            await line.down(f"{SERVICE}/ReceiveFiles", b"")
            await until(lambda: len(turns) == 2)
            turns[0].set()
            async with asyncio.timeout(60):
                await older.ended.wait()
            assert service._sent == {}
            turns[1].set()
            await until(lambda: agent.instance_id in service._sent)


async def test_keys_are_kept_of_instances_that_exist_and_only_so_many(tmp_path: Path) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        instances = Instances(place.kernel.store)
        many = {f"key-{number:03}": "pem" for number in range(KEYS_LIMIT)}
        await instances.keep_keys(TENANT, agent.instance_id, many, actor="agent")
        await instances.keep_keys(TENANT, agent.instance_id, many, actor="agent")  # the same ones again
        with pytest.raises(ResourceExhausted, match="at most 64 keys"):
            await instances.keep_keys(TENANT, agent.instance_id, {"one-more": "pem"}, actor="agent")
        assert instances.keys(TENANT, agent.instance_id, ["key-001", "one-more"]) == {"key-001": "pem"}

        await delete(place, agent.instance_id)
        with pytest.raises(NotFound):
            await instances.keep_keys(TENANT, agent.instance_id, {"key-001": "new"}, actor="agent")
        await instances.purge(TENANT, agent.instance_id)
        assert list(place.kernel.store.list(PUBLIC_KEY)) == []


async def test_looking_up_an_agents_keys_does_not_look_at_everyone_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lab(tmp_path, document(shard=QUIET)) as place:
        agent = await registered(place)
        instances = Instances(place.kernel.store)
        monkeypatch.setattr(place.kernel.store, "list", None)
        assert instances.keys(TENANT, agent.instance_id, ["kubelet.server"]) == {}
        monkeypatch.undo()


# A provider that hangs or breaks


async def test_a_provider_that_hangs_is_given_up_on(tmp_path: Path) -> None:
    mock = MockProvider(ProviderContext(clock=SystemClock(), state_directory=tmp_path))
    mock.script(MockFault(operation="create_instance", delay_seconds=30, error=""))
    mock.script(MockFault(operation="get_instance_status", delay_seconds=30, error=""))
    guarded = GuardedProvider(mock, check_seconds=0.05, change_seconds=0.05)
    request = CreateRequest(cluster="c", shard="s", instance_id="i")
    with pytest.raises(ProviderError, match=r"mock: create took longer than 0\.05 s"):
        await guarded.create_instance(request)
    with pytest.raises(ProviderError, match=r"mock: status took longer than 0\.05 s"):
        await guarded.get_instance_status("i", "")
    guarded = GuardedProvider(mock)
    assert (await guarded.create_instance(request)).instance_id == "i", "and asked again"


async def test_a_defect_of_a_provider_is_an_error_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = MockProvider(ProviderContext(clock=SystemClock(), state_directory=tmp_path))

    async def broken(_subnet: str) -> bool:
        raise KeyError("Subnets")

    monkeypatch.setattr(mock, "check_subnet_capacity", broken)
    with pytest.raises(ProviderError, match="check_subnet failed: KeyError: 'Subnets'"):
        await GuardedProvider(mock).check_subnet_capacity("net-a")


async def test_what_the_provider_is_asked_to_change_takes_no_longer_than_the_document_says(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, wanted(1, request_timeout="7s")) as place:
        assert place.machinery._guarded._change_seconds == 7.0
        await place.configure(wanted(1, request_timeout="9s"))
        assert place.machinery._guarded._change_seconds == 9.0
