from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.instances.agents_rig import BOSS, QUICK, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.agents.stream import STREAM_POLICY
from fleetplane.domains.proxies.kinds.records import AGENT, AGENT_TOKEN, AgentTokenSpec
from fleetplane.domains.proxies.rules.alerts import ALERT
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.store import Draft


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


async def test_an_agent_registers_with_its_token_alone(rig: Rig) -> None:
    agent = await rig.agent("web-01", env="production")
    answer = await agent.open(
        labels={"region": "us-east-1", "env": "ignored"},
        capabilities=["http2", "websocket"],
        deployment_mode=pb.DOCKER_SIDECAR,
    )
    assert (answer.success, answer.agent_id, answer.heartbeat_interval_seconds) == (True, agent.agent_id, 30)
    status = rig.stored(agent.agent_id).status
    assert status is not None
    assert (status.state, status.hostname, status.ip_address) == ("online", "web-01.internal", "10.0.1.10")
    assert (status.deployment_mode, status.capabilities) == ("docker_sidecar", ("http2", "websocket"))
    assert status.labels == {"region": "us-east-1", "env": "ignored"}


async def test_an_agent_that_does_not_say_where_it_is_is_where_it_comes_from(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open(ip_address="")
    status = rig.stored(agent.agent_id).status
    assert status is not None
    assert status.ip_address == "127.0.0.1"


async def refused(agent: FakeAgent, **about: str) -> tuple[str, grpc.StatusCode]:
    answer = await agent.open(**about)
    assert not answer.success
    return answer.error_message, await agent.ended()


async def test_an_unknown_token_is_refused(rig: Rig) -> None:
    agent = await rig.client("nxmesh_agent_guess", "x")
    assert await refused(agent) == ("the token is not known or was revoked", grpc.StatusCode.UNAUTHENTICATED)


async def expire(rig: Rig, agent_id: str) -> None:
    def change(draft: Draft) -> None:
        token = draft.get(AGENT_TOKEN, rig.scope, agent_id)
        assert token is not None
        spec = AgentTokenSpec(digest=token.spec.digest, expires_at_ns=1)
        draft.put(AGENT_TOKEN, rig.scope, agent_id, spec=spec, status=token.status)

    touches = [AGENT_TOKEN.key(rig.scope, agent_id)]
    await rig.store.transact(change, actor="t", action="t", touches=touches)


async def test_an_expired_token_is_refused_at_its_first_use_and_good_after_it(rig: Rig) -> None:
    late, early = await rig.agent("late"), await rig.agent("early")
    await expire(rig, late.agent_id)
    assert await refused(late) == ("the token has expired", grpc.StatusCode.UNAUTHENTICATED)
    assert rig.state(late.agent_id) == "unknown"

    assert (await early.open()).success
    early.leave()
    await expire(rig, early.agent_id)
    assert (await early.open()).success


async def test_a_deleted_agents_stream_ends_and_its_token_is_refused(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await rig.agents.delete(rig.scope, agent.agent_id, if_match=None, actor=BOSS)
    assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
    assert (await refused(agent))[1] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_newer_stream_on_the_same_connection_ends_the_older_and_the_agent_stays_online(
    rig: Rig,
) -> None:
    first = await rig.agent("web-01")
    await first.open()
    revision = rig.stored(first.agent_id).revision
    second = FakeAgent(first.stub, first.token, first.agent_id)
    assert (await second.open()).success

    assert (await first.next("error")).code == "SUPERSEDED"
    assert await first.ended() is grpc.StatusCode.ABORTED
    await second.health()
    await until(lambda: rig.side.presences.sighting(first.agent_id).health)  # type: ignore[union-attr]
    assert rig.state(first.agent_id) == "online"
    status = rig.stored(first.agent_id).status
    assert status is not None
    assert status.disconnected_at_ns is None
    assert rig.stored(first.agent_id).revision >= revision


async def test_the_first_message_must_be_a_registration(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    agent.call = agent.stub.Stream()
    await agent.health()
    assert await agent.ended() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_agent_that_says_nothing_is_told_so_in_time(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, stream=replace(STREAM_POLICY, hello_seconds=0.1)) as rig:
        agent = await rig.agent("web-01")
        agent.call = agent.stub.Stream()
        async with asyncio.timeout(60):
            assert await agent.ended() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_connections_token_must_be_the_registrations(rig: Rig) -> None:
    agent, other = await rig.agent("web-01"), await rig.agent("web-02")
    answer = await agent.open(metadata=[("authorization", f"Bearer {other.token}")])
    assert not answer.success
    assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
    assert (await agent.open(metadata=[("authorization", f"Bearer {agent.token}")])).success


async def test_an_agent_cannot_register_as_another(rig: Rig) -> None:
    agent, other = await rig.agent("web-01"), await rig.agent("web-02")
    answer = await agent.open(agent_id=other.agent_id)
    assert not answer.success
    assert await agent.ended() is grpc.StatusCode.UNAUTHENTICATED
    tokens = [rig.store.get(AGENT_TOKEN, found.scope, found.name) for found in rig.store.list(AGENT)]
    assert [token.status for token in tokens if token is not None] == [None, None], "nothing is half done"


async def test_a_later_message_in_another_name_ends_the_stream(rig: Rig) -> None:
    agent, other = await rig.agent("web-01"), await rig.agent("web-02")
    await agent.open()
    agent.agent_id = other.agent_id
    await agent.health()
    assert (await agent.next("error")).code == "AGENT_ID_MISMATCH"
    assert await agent.ended() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_wrong_label_is_refused_with_its_name(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    answer = await agent.open(labels={"bad key": "x"})
    assert "bad key" in answer.error_message
    assert await agent.ended() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_agent_whose_stream_ends_is_offline_after_a_while_and_online_when_it_returns(
    rig: Rig,
) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.health()
    await until(lambda: rig.side.presences.sighting(agent.agent_id).health)  # type: ignore[union-attr]
    agent.leave()
    await until(lambda: rig.state(agent.agent_id) == "offline")
    status = rig.stored(agent.agent_id).status
    assert status is not None
    assert status.reasons == ("stream_closed",)
    assert status.health is not None
    assert status.health.active_connections == 42, "the last report is kept"
    assert rig.side.presences.sighting(agent.agent_id) is None

    await agent.open()
    assert rig.state(agent.agent_id) == "online"


async def test_a_silent_agent_is_offline_after_three_missed_heartbeats(tmp_path: Path) -> None:
    quick = AgentPolicy(heartbeat_seconds=1, missed_heartbeats=1, reconnect_seconds=60)
    async with agents_rig(tmp_path, policy=quick) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        await until(lambda: rig.state(agent.agent_id) == "offline")
        status = rig.stored(agent.agent_id).status
        assert status is not None
        assert status.reasons == ("connection_timeout",)
        assert await agent.ended() is grpc.StatusCode.UNAVAILABLE


async def test_a_report_shows_in_the_sighting(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.health(version=42)
    seen = await until(lambda: (s := rig.side.presences.sighting(agent.agent_id)) and s.health)
    assert (seen.nginx_status, seen.nginx_uptime_seconds, seen.active_connections) == ("running", 86_400, 42)
    assert (seen.requests_per_second, seen.cpu_percent, seen.memory_used_mb) == (150.5, 25.0, 512)
    assert seen.config_version == 42


async def test_an_agent_without_nginx_is_degraded_until_it_runs_again(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.health(running=False)
    await until(lambda: rig.state(agent.agent_id) == "degraded")
    await until(lambda: rig.alerts(agent.agent_id) == {"nginx_down": "critical"})
    await agent.health()
    await until(lambda: rig.state(agent.agent_id) == "online")
    await until(lambda: rig.alerts(agent.agent_id) == {})


async def test_unary_reports_need_the_token_of_an_agent_that_registered(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    report = pb.HealthReport(nginx=pb.NginxStatus(is_running=True, active_connections=7))
    mine = [("authorization", f"Bearer {agent.token}")]
    for metadata in (None, [("authorization", "Bearer nonsense")], mine):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await agent.stub.ReportHealth(report, metadata=metadata)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

    await agent.open()
    assert (await agent.stub.ReportHealth(report, metadata=mine)).success
    seen = rig.side.presences.sighting(agent.agent_id)
    assert seen is not None
    assert seen.health is not None
    assert seen.health.active_connections == 7
    ack = await agent.stub.ReportMetrics(pb.MetricsBatch(timestamp=5), metadata=mine)
    assert (ack.success, ack.message_id) == (True, "5")
    agent.leave()
    await until(lambda: rig.side.presences.get(agent.agent_id) is None)
    assert not (await agent.stub.ReportHealth(report, metadata=mine)).success


async def test_messages_are_acknowledged_by_their_ids(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    metrics = await agent.send(metrics=pb.MetricsBatch())
    assert (await agent.next("ack")).message_id == str(metrics)
    logs = await agent.send(logs=pb.LogBatch())
    assert (await agent.next("ack")).message_id == str(logs)
    await agent.send(event=pb.Event(event_id="e-1", event_type="nginx.reloaded"))
    assert (await agent.next("ack")).message_id == "e-1"


async def test_a_bad_message_is_told_and_the_stream_goes_on(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.send()
    assert (await agent.next("error")).code == "INVALID_MESSAGE"
    await agent.send(config_status=pb.ConfigStatus(config_id="c", version=1))
    ack = await agent.next("ack")
    assert (ack.success, ack.message_id) == (False, "c:1:CONFIG_APPLY_STATUS_UNSPECIFIED")


async def test_a_state_that_a_newer_agent_knows_is_told_and_the_stream_goes_on(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    status = pb.ConfigStatus(config_id="c", version=1)
    status.status = 77  # type: ignore[assignment]  # of a contract to come
    await agent.send(config_status=status)
    ack = await agent.next("ack")
    assert (ack.success, ack.message_id) == (False, "c:1:77")
    logs = await agent.send(logs=pb.LogBatch())
    assert (await agent.next("ack")).message_id == str(logs)


async def test_a_message_that_is_too_large_is_told_as_that(
    rig: Rig, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.send(logs=pb.LogBatch(entries=[pb.LogEntry(message="x" * (16 * 1024 * 1024))]))
    assert (await agent.next("error")).code == "TOO_LARGE"
    assert await agent.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
    said = capfd.readouterr()
    assert "stream_failed" not in said.out + said.err


async def test_numbers_that_are_none_raise_no_alert(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    system = pb.SystemMetrics(cpu_percent=float("inf"))
    await agent.send(health=pb.HealthReport(nginx=pb.NginxStatus(is_running=True), system=system))
    logs = await agent.send(logs=pb.LogBatch())
    assert (await agent.next("ack")).message_id == str(logs), "what came before has been dealt with"
    assert list(rig.store.list(ALERT)) == []


async def test_agents_are_told_when_the_server_goes(rig: Rig) -> None:
    agent = await rig.agent("web-01")
    await agent.open()
    rig.side.drain()
    assert (await agent.next("error")).code == "GOING_AWAY"
    assert await agent.ended() is grpc.StatusCode.UNAVAILABLE


async def test_after_a_restart_an_agent_that_does_not_return_is_offline_and_one_that_does_never_was(
    tmp_path: Path,
) -> None:
    patient = replace(QUICK, reconnect_seconds=60.0)  # however long it takes to stop, nobody counts as gone
    async with agents_rig(tmp_path, policy=patient) as rig:
        back, gone = await rig.agent("back"), await rig.agent("gone")
        await back.open()
        await gone.open()
    async with agents_rig(tmp_path) as rig:
        again = await rig.client(back.token, back.agent_id)
        assert rig.state(gone.agent_id) == "online", "it may be on its way"
        await again.open()
        rig.side.controller._policy = replace(QUICK, heartbeat_seconds=1, missed_heartbeats=1)  # it was long
        rig.side.controller.look_at(gone.agent_id)
        await until(lambda: rig.state(gone.agent_id) == "offline")
        status = rig.stored(back.agent_id).status
        assert status is not None
        assert status.disconnected_at_ns is None


async def test_many_agents_connect_at_once(rig: Rig) -> None:
    agents = [await rig.agent(f"web-{number}") for number in range(20)]
    answers = await asyncio.gather(*(agent.open() for agent in agents))
    assert all(answer.success for answer in answers)
    assert len(rig.side.presences) == 20
    assert QUICK.heartbeat_seconds == answers[0].heartbeat_interval_seconds


async def test_a_connection_that_breaks_is_not_an_error(rig: Rig, capfd: pytest.CaptureFixture[str]) -> None:
    from fleetplane.gen.nxmesh.agent.v1 import agent_pb2_grpc

    enrolled = await rig.enrol("web-01")
    channel = grpc.aio.secure_channel(rig.address, grpc.ssl_channel_credentials(rig.root))
    agent = FakeAgent(agent_pb2_grpc.AgentServiceStub(channel), enrolled.token, enrolled.agent.name)
    await agent.open()
    live = rig.side.presences.get(agent.agent_id)
    assert live is not None
    await channel.close()
    for _ in range(50):  # while it breaks, something is being sent
        live.session.offer(pb.MasterMessage())
        await asyncio.sleep(0)
    await until(lambda: rig.state(agent.agent_id) == "offline")
    said = capfd.readouterr()
    assert "[error" not in said.out + said.err
