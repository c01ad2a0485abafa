from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from google.protobuf.json_format import MessageToDict
from support.instances.agents_rig import BOSS, QUICK, FakeAgent, Rig, agents_rig, until

from fleetplane.domains.proxies.agents.controller import AgentPolicy
from fleetplane.domains.proxies.explain import AgentExplainer, HostExplainer
from fleetplane.domains.proxies.kinds.values import DeploymentState, SelectedAgents
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.reconcile import Reason


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with agents_rig(tmp_path) as rig:
        yield rig


async def connected(rig: Rig, name: str, *, version: int = 0, **labels: str) -> FakeAgent:
    agent = await rig.agent(name, **labels)
    await agent.open()
    await agent.health(version)
    return agent


def checksum(update: pb.ConfigUpdate) -> str:
    """As an agent in any language would take it."""
    content = MessageToDict(update, preserving_proto_field_name=True)
    del content["config_id"], content["version"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


async def nothing_is_sent(agent: FakeAgent) -> None:
    """A metric's receipt overtakes nothing: whatever was to be sent is sent before it."""
    timestamp = await agent.send(metrics=pb.MetricsBatch())
    message = await agent.read()
    while message.ack.message_id != str(timestamp):
        assert message.WhichOneof("payload") == "ack", message
        message = await agent.read()


async def test_a_new_agent_gets_what_its_workspace_serves(rig: Rig) -> None:
    host = await rig.host("example.com www.example.com")
    agent = await connected(rig, "web-01")
    update = await agent.next("config_update")
    assert [one.server_name for one in update.virtual_hosts] == ["example.com www.example.com"]
    assert update.virtual_hosts[0].id == host.name
    assert update.virtual_hosts[0].locations[0].proxy_pass == "http://127.0.0.1:9000"
    assert update.version == 2, "a workspace begins with an empty version 1"
    assert rig.deployment_states(agent.agent_id) == {2: DeploymentState.PENDING}


async def test_an_agent_that_nothing_targets_gets_an_empty_configuration(rig: Rig) -> None:
    await rig.host("other.example", target_agents=SelectedAgents(label_selector="env=prod"))
    update = await (await connected(rig, "web-01", env="dev")).next("config_update")
    assert (len(update.virtual_hosts), update.version) == (0, 2)


async def test_an_agent_at_the_desired_version_is_sent_nothing(rig: Rig) -> None:
    await rig.host("example.com")
    agent = await connected(rig, "web-01", version=2)
    await until(lambda: rig.side.controller.reconciler.explain(agent.agent_id))
    await nothing_is_sent(agent)


async def test_a_change_reaches_every_connected_agent_and_every_step_is_written_down(rig: Rig) -> None:
    agents = [await connected(rig, f"web-{number}", version=1) for number in range(3)]
    await rig.host("example.com")
    for agent in agents:
        update = await agent.next("config_update")
        assert update.version == 2
        for state in ("PENDING", "VALIDATING", "APPLYING", "SUCCESS"):
            await agent.status(update, state)
            await until(lambda a=agent, s=state: rig.deployment_states(a.agent_id)[2] == s.lower())  # type: ignore[misc]
        done = rig.deployments(agent.agent_id)[0].status
        assert done is not None
        assert done.applied_at_ns is not None
        assert done.duration_ms is not None
        assert 0 <= done.duration_ms < 60_000


async def test_statuses_repeated_late_and_out_of_order_do_not_go_back(rig: Rig) -> None:
    agent = await connected(rig, "web-01", version=0)
    update = await agent.next("config_update")
    await agent.status(update, "APPLYING", "PENDING", "VALIDATING", "SUCCESS", "SUCCESS", "FAILED", "PENDING")
    receipts = [(await agent.next("ack")).message_id for _ in range(7)]
    assert receipts[0] == f"{update.config_id}:1:APPLYING"
    assert rig.deployment_states(agent.agent_id) == {1: DeploymentState.SUCCESS}


async def test_a_refused_version_degrades_the_agent_and_is_not_sent_again(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    update = await agent.next("config_update")
    await agent.status(update, "PENDING", "VALIDATING")
    await agent.status(update, "FAILED", error='unknown directive "x"')
    await until(lambda: rig.state(agent.agent_id) == "degraded")
    status = rig.stored(agent.agent_id).status
    assert status is not None
    assert status.reasons == ('version 1 failed: unknown directive "x"',)
    await agent.health(0)
    explained = await until(
        lambda: (
            (e := rig.side.controller.reconciler.explain(agent.agent_id))
            and [reason.code for reason in e.reasons] == ["REFUSED"]
            and e
        )
    )
    assert 'unknown directive "x"' in explained.reasons[0].message
    await nothing_is_sent(agent)

    await rig.host("example.com")
    update = await agent.next("config_update")
    assert update.version == 2, "the next version gets its chance"
    await agent.status(update, "SUCCESS")
    await agent.health(2)
    await until(lambda: rig.state(agent.agent_id) == "online")


async def test_a_rolled_back_version_degrades_the_agent(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    await agent.status(await agent.next("config_update"), "APPLYING", "ROLLED_BACK", error="port in use")
    await until(lambda: rig.state(agent.agent_id) == "degraded")
    assert rig.deployment_states(agent.agent_id) == {1: DeploymentState.ROLLED_BACK}


async def test_a_newer_version_ends_an_older_one_that_its_agent_never_ended(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    first = await agent.next("config_update")
    await agent.status(first, "PENDING")
    await rig.host("example.com")
    second = await agent.next("config_update")
    await agent.status(second, "SUCCESS")
    await until(lambda: rig.deployment_states(agent.agent_id)[2] == "success")
    old = rig.deployments(agent.agent_id)[0].status
    assert old is not None
    assert (old.state, old.error) == (DeploymentState.SUPERSEDED, "superseded by version 2")


async def test_an_update_lost_with_its_connection_is_sent_again(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    await agent.next("config_update")
    agent.leave()  # without a word about it
    await agent.open()
    await agent.health(0)
    assert (await agent.next("config_update")).version == 1


async def test_an_update_being_applied_is_not_sent_again_after_a_reconnect(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    update = await agent.next("config_update")
    await agent.status(update, "PENDING", "APPLYING")
    await until(lambda: rig.deployment_states(agent.agent_id)[1] == "applying")
    agent.leave()
    await agent.open()
    await agent.health(0)
    await nothing_is_sent(agent)
    await agent.status(update, "SUCCESS")
    await until(lambda: rig.deployment_states(agent.agent_id)[1] == "success")


async def test_a_restarted_server_learns_the_end_of_what_the_former_one_sent(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as rig:
        agent = await connected(rig, "web-01")
        update = await agent.next("config_update")
        await agent.status(update, "APPLYING")
        await until(lambda: rig.deployment_states(agent.agent_id)[1] == "applying")
    async with agents_rig(tmp_path) as rig:
        again = await rig.client(agent.token, agent.agent_id)
        await again.open()
        await again.health(1, checksum=checksum(update))
        await until(lambda: rig.deployment_states(agent.agent_id)[1] == "success")
        await nothing_is_sent(again)


async def test_an_agent_that_lost_what_it_had_gets_it_again(rig: Rig) -> None:
    agent = await connected(rig, "web-01")
    update = await agent.next("config_update")
    await agent.status(update, "SUCCESS")
    await until(lambda: rig.deployment_states(agent.agent_id)[1] == "success")
    await agent.health(0)
    assert (await agent.next("config_update")).version == 1


async def test_an_agent_whose_checksum_differs_gets_it_again(rig: Rig) -> None:
    await rig.host("example.com")
    agent = await rig.agent("web-01")
    await agent.open()
    await agent.health(2, checksum="0" * 64)
    update = await agent.next("config_update")
    assert rig.deployments(agent.agent_id)[0].spec.checksum == checksum(update)
    await agent.status(update, "SUCCESS")
    await agent.health(2, checksum=checksum(update))
    await until(lambda: rig.state(agent.agent_id) == "online")
    await nothing_is_sent(agent)


async def test_silence_about_a_version_is_a_failure_and_a_late_word_overrules_it(tmp_path: Path) -> None:
    impatient = AgentPolicy(apply_seconds=0.3, debounce_seconds=0)
    async with agents_rig(tmp_path, policy=impatient) as rig:
        agent = await connected(rig, "web-01")
        update = await agent.next("config_update")
        await until(lambda: rig.deployment_states(agent.agent_id)[1] == "failed")
        found = rig.deployments(agent.agent_id)[0].status
        assert found is not None
        assert found.error == "timeout"
        await agent.status(update, "SUCCESS")
        await until(lambda: rig.deployment_states(agent.agent_id)[1] == "success")


async def test_a_selector_that_stops_matching_takes_the_host_away(rig: Rig) -> None:
    await rig.host("example.com", target_agents=SelectedAgents(label_selector="env=production"))
    agent = await connected(rig, "web-01", env="production")
    update = await agent.next("config_update")
    assert len(update.virtual_hosts) == 1
    await agent.status(update, "SUCCESS")
    await rig.agents.update(
        rig.scope, agent.agent_id, {"labels": {"env": "staging"}}, if_match=None, actor=BOSS
    )
    update = await agent.next("config_update")
    assert len(update.virtual_hosts) == 0


async def test_labels_that_only_an_agent_reports_place_no_host_and_that_is_explained(rig: Rig) -> None:
    host = await rig.host("example.com", target_agents=SelectedAgents(label_selector="region=eu"))
    agent = await rig.agent("web-01")
    workspaces = rig.side.controller._workspaces
    explainers = (
        (AgentExplainer(rig.store, rig.side.controller, workspaces, SystemClock()), agent.agent_id),
        (HostExplainer(rig.store, workspaces, SystemClock()), host.name),
    )

    def reasons() -> list[Reason]:
        findings = [found for why, name in explainers for found in why.explain(rig.scope, name)]
        return [
            one for found in findings for one in found.explanation.reasons if one.code == "REPORTED_LABELS"
        ]

    with structlog.testing.capture_logs() as logged:
        await agent.open(labels={"region": "eu"})
    [line] = [one for one in logged if one["event"] == "proxies.reported_labels_ignored"]
    assert (line["name"], line["hosts"]) == ("web-01", ["example.com"])
    await agent.health()
    assert len((await agent.next("config_update")).virtual_hosts) == 0
    assert [one.subject for one in reasons()] == [f"agent/{agent.agent_id}"] * 2
    assert "'web-01' reports do not place example.com" in reasons()[0].message

    await rig.agents.update(
        rig.scope, agent.agent_id, {"labels": {"region": "eu"}}, if_match=None, actor=BOSS
    )
    assert (await agent.next("config_update")).virtual_hosts[0].server_name == "example.com"
    assert reasons() == []


async def test_an_agent_that_says_nothing_of_what_it_serves_is_sent_it_after_a_while(tmp_path: Path) -> None:
    async with agents_rig(tmp_path, policy=AgentPolicy(first_report_seconds=0.2)) as rig:
        agent = await rig.agent("web-01")
        await agent.open()
        assert (await agent.next("config_update")).version == 1


async def test_every_field_of_a_host_and_its_upstream_arrives(rig: Rig) -> None:
    from fleetplane.domains.proxies.kinds.records import SettingsSpec, UpstreamSpec, VirtualHostSpec
    from fleetplane.domains.proxies.kinds.values import (
        Algorithm,
        Header,
        HealthCheck,
        Location,
        RewriteRule,
        UpstreamServer,
    )

    upstream = await rig.hosts.upstreams.create(
        rig.scope,
        UpstreamSpec(
            name="api-backend",
            algorithm=Algorithm.LEAST_CONNECTIONS,
            servers=(
                UpstreamServer(address="10.0.1.20:8080"),
                UpstreamServer(address="10.0.1.21:8080", weight=3, down=True, max_fails=0, fail_timeout=5),
            ),
            health_check=HealthCheck(enabled=True, path="/health"),
            keepalive_connections=16,
        ),
        actor=BOSS,
    )
    location = Location(
        path="/api",
        upstream_id=upstream.name,
        custom_headers=(Header(name="X-A", value="$scheme", always=True),),
        rewrite_rules=(RewriteRule(pattern="^/a", replacement="/b", flag="last"),),
        custom_directives={"proxy_read_timeout": "60s"},
    )
    await rig.hosts.create(
        rig.scope,
        VirtualHostSpec(
            name="api",
            server_name="api.example.com",
            listen_port=8080,
            locations=(location,),
            custom_directives={"client_max_body_size": "1m"},
        ),
        actor=BOSS,
    )
    await rig.hosts.put_settings(rig.scope, SettingsSpec(env_vars={"A": "b"}), actor=BOSS)
    update = await (await connected(rig, "web-01")).next("config_update")
    host: Any = MessageToDict(update, preserving_proto_field_name=True)
    assert host["virtual_hosts"][0]["locations"] == [
        {
            "path": "/api",
            "upstream_id": upstream.name,
            "custom_headers": [{"name": "X-A", "value": "$scheme", "always": True}],
            "rewrite_rules": [{"pattern": "^/a", "replacement": "/b", "flag": "last"}],
            "custom_directives": {"proxy_read_timeout": "60s"},
        }
    ]
    assert host["upstreams"][0] == {
        "id": upstream.name,
        "name": "api-backend",
        "algorithm": "LEAST_CONNECTIONS",
        "servers": [
            {"address": "10.0.1.20:8080", "weight": 1, "max_fails": 3, "fail_timeout_seconds": 30},
            {"address": "10.0.1.21:8080", "weight": 3, "down": True, "fail_timeout_seconds": 5},
        ],
        "health_check": {
            "enabled": True,
            "path": "/health",
            "interval_seconds": 10,
            "timeout_seconds": 5,
            "healthy_threshold": 2,
            "unhealthy_threshold": 3,
        },
        "keepalive_connections": 16,
    }
    assert host["global_settings"] == {"env_vars": {"A": "b"}}
    assert QUICK.debounce_seconds == 0
