"""Over REST: what became of a version at each agent, why an agent is degraded, and what happened there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.boards.fleet_api import fleet_api
from support.instances.agents_rig import QUICK, FakeAgent, Rig, until
from support.proxies.proxy_api import Person

from fleetplane.domains.proxies.agents.events import EVENTS_KEPT
from fleetplane.domains.proxies.agents.live import EVENTS_PER_MINUTE
from fleetplane.domains.proxies.nginx.site import VALIDATES_TYPED
from fleetplane.domains.proxies.rules.deployment import RetryPolicy
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

PATIENT = replace(QUICK, retry=RetryPolicy(first_seconds=60.0))
"""What may pass is not tried again while a test looks at it."""
NO_NAME = 'host not found in upstream "nowhere.example:80" in conf.d/host-h-1.conf:3'


class Fleet:
    def __init__(self, rig: Rig, admin: Person) -> None:
        self.rig = rig
        self.admin = admin
        self.workspace = rig.scope.rpartition("/")[2]

    async def connected(self, name: str, version: int = 0, **about: Any) -> FakeAgent:
        agent = await self.rig.agent(name)
        await agent.open(**about)
        await agent.health(version)
        return agent


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with fleet_api(tmp_path, policy=PATIENT) as (rig, admin, _):
        yield Fleet(rig, admin)


# Versions at agents.


async def test_how_far_each_agent_is_with_each_version_can_be_read(fleet: Fleet) -> None:
    good, bad = await fleet.connected("web-1"), await fleet.connected("web-2")
    away = (await fleet.rig.enrol("web-3")).agent.name
    update = await good.next("config_update")
    await good.send(
        config_status=pb.ConfigStatus(
            config_id=update.config_id,
            version=1,
            status="SUCCESS",
            error_message="1 set aside",
            set_aside={"virtual_host/h-1": NO_NAME},
        )
    )
    await good.health(1)
    await bad.status(await bad.next("config_update"), "FAILED", error='unknown directive "x"')
    await until(lambda: fleet.rig.deployment_states(good.agent_id) == {1: "success"})
    await until(lambda: fleet.rig.deployment_states(bad.agent_id) == {1: "failed"})
    await until(lambda: (seen := fleet.rig.side.presences.serving(good.agent_id)) and seen.version == 1)

    rows = (await fleet.admin.get(f"/workspaces/{fleet.workspace}/configs/1/agents"))["data"]
    told = {row["agent_id"]: row for row in rows}
    assert [told[one]["state"] for one in (good.agent_id, bad.agent_id, away)] == ["success", "failed", None]
    assert [told[one]["in_service"] for one in (good.agent_id, bad.agent_id, away)] == [True, False, False]
    assert told[good.agent_id]["set_aside"] == {"virtual_host/h-1": NO_NAME}
    assert told[bad.agent_id]["error"] == 'unknown directive "x"'
    assert (told[away]["sent_at"], told[away]["attempt"], told[good.agent_id]["attempt"]) == (None, 0, 1)
    own = (await fleet.admin.get(f"/agents/{good.agent_id}/configs"))["data"][0]
    assert own["set_aside"] == {"virtual_host/h-1": NO_NAME}
    for path in ("configs/9/agents", "configs/9/retry"):
        method = "GET" if path.endswith("agents") else "POST"
        assert await fleet.admin.refused(method, f"/workspaces/{fleet.workspace}/{path}") == (
            404,
            "NOT_FOUND",
        )


async def test_a_virtual_host_tells_which_agents_do_not_serve_it_and_why(fleet: Fleet) -> None:
    host = await fleet.rig.host("example.com")
    one, other = await fleet.connected("web-1"), await fleet.connected("web-2")
    path = f"/virtual-hosts/{host.name}"
    assert "set_aside" not in await fleet.admin.get(path)
    update = await one.next("config_update")
    status = pb.ConfigStatus(
        config_id=update.config_id,
        version=2,
        status="SUCCESS",
        set_aside={f"virtual_host/{host.name}": NO_NAME},
    )
    await one.send(config_status=status)
    words = f"[emerg] unknown directive in conf.d/host-{host.name}.conf:7"
    await other.status(await other.next("config_update"), "FAILED", error=words)
    await until(lambda: fleet.rig.deployment_states(one.agent_id) == {2: "success"})
    await until(lambda: fleet.rig.deployment_states(other.agent_id) == {2: "failed"})
    told = (await fleet.admin.get(path))["set_aside"]
    assert sorted((row["agent_id"], row["version"], row["error"]) for row in told) == sorted(
        [(one.agent_id, 2, NO_NAME), (other.agent_id, 2, words)]
    )


async def test_a_version_is_tried_again_on_request_by_agent_and_by_version(fleet: Fleet) -> None:
    one, other = await fleet.connected("web-1"), await fleet.connected("web-2")
    for agent in (one, other):
        await agent.status(await agent.next("config_update"), "FAILED", error='unknown directive "x"')
        await until(lambda a=agent: fleet.rig.deployment_states(a.agent_id) == {1: "failed"})  # type: ignore[misc]
    told = await fleet.admin.post(f"/agents/{one.agent_id}/retry", status=200)
    assert told == {"version": 1, "agents": [one.agent_id], "away": []}
    await one.status(await one.next("config_update"), "SUCCESS")
    await one.health(1)
    await until(lambda: fleet.rig.deployment_states(one.agent_id) == {1: "success"})
    told = await fleet.admin.post(f"/agents/{one.agent_id}/retry", status=200)
    assert told["agents"] == [], "nothing failed there"

    told = await fleet.admin.post(f"/workspaces/{fleet.workspace}/configs/1/retry", status=200)
    assert told == {"version": 1, "agents": [other.agent_id], "away": []}
    update = await other.next("config_update")
    await other.status(update, "FAILED", error="again")
    await until(lambda: fleet.rig.deployments(other.agent_id)[0].spec.attempt == 2)
    await until(lambda: fleet.rig.deployment_states(other.agent_id) == {1: "failed"})
    other.leave()
    await until(lambda: fleet.rig.side.presences.get(other.agent_id) is None)
    assert await fleet.admin.refused("POST", f"/agents/{other.agent_id}/retry") == (
        503,
        "SERVICE_UNAVAILABLE",
    )
    told = await fleet.admin.post(f"/workspaces/{fleet.workspace}/configs/1/retry", status=200)
    assert (told["agents"], told["away"]) == ([], [other.agent_id])
    await fleet.rig.host("example.com")
    path = f"/workspaces/{fleet.workspace}/configs/1/retry"
    assert await fleet.admin.refused("POST", path) == (409, "CONFLICT"), "only the newest is tried"


# Why.


async def test_why_an_agent_is_degraded_is_told_with_it_and_explained(fleet: Fleet) -> None:
    agent = await fleet.connected("web-1")
    path = f"/agents/{agent.agent_id}"
    assert "reasons" not in await fleet.admin.get(path)
    broken = pb.Alert(id="nginx_broken", severity="critical", message="bind() failed")
    note = pb.Alert(id="http3_left_out", severity="warning", message="no HTTP/3")
    update = await agent.next("config_update")
    await agent.status(update, "ROLLED_BACK", error="[emerg] bind() to 0.0.0.0:80 failed")
    await agent.health(0, alerts=[broken, note])
    await until(lambda: len(fleet.rig.alerts(agent.agent_id)) == 2)

    def reasons() -> tuple[str, ...]:
        status = fleet.rig.stored(agent.agent_id).status
        return status.reasons if status is not None else ()

    await until(lambda: len(reasons()) == 2)
    shown = await fleet.admin.get(path)
    assert shown["state"] == "degraded"
    assert shown["reasons"] == [
        "version 1 was rolled back: [emerg] bind() to 0.0.0.0:80 failed",
        "alert nginx_broken: bind() failed",
    ]
    assert {one["id"]: one["severity"] for one in shown["alerts"]} == {
        "nginx_broken": "critical",
        "http3_left_out": "warning",
    }
    assert shown["alerts"][0]["since"].endswith("Z")
    listed = (await fleet.admin.get(f"/workspaces/{fleet.workspace}/agents"))["data"][0]
    assert (listed["reasons"], "alerts" in listed) == (shown["reasons"], False)

    def refused() -> bool:
        found = fleet.rig.side.controller.explain(agent.agent_id)
        return found is not None and [one.code for one in found.reasons] == ["REFUSED"]

    await until(refused)
    explained = await fleet.admin.get(f"{path}/explain")
    assert (explained["state"], explained["reasons"]) == ("degraded", shown["reasons"])
    assert [one["code"] for one in explained["findings"]] == ["REFUSED"]
    assert "bind() to 0.0.0.0:80 failed" in explained["findings"][0]["message"]
    assert explained["looked_at"] is not None
    never = (await fleet.rig.enrol("web-2")).agent.name
    assert (await fleet.admin.get(f"/agents/{never}/explain"))["reasons"] == [
        "the agent has never registered"
    ]


# What happened.


async def test_what_an_agent_says_happened_is_kept_once_and_bounded(fleet: Fleet) -> None:
    agent = await fleet.connected("web-1")

    async def say(identity: str, kind: str = "nginx.crashed", **data: str) -> None:
        event = pb.Event(event_id=identity, event_type=kind, timestamp=1_700_000_000_000, data=data)
        await agent.send(event=event)
        while (await agent.next("ack")).message_id != identity:
            pass

    await say("e-1", exit="11", note="x" * 5000)
    await say("e-1")
    await say("e-2", "config.drift", release="1-2")
    path = f"/agents/{agent.agent_id}/events"
    rows = (await fleet.admin.get(path))["data"]
    assert [(row["id"], row["type"]) for row in rows] == [("e-2", "config.drift"), ("e-1", "nginx.crashed")]
    assert rows[1]["occurred_at"] == "2023-11-14T22:13:20Z"
    assert (rows[1]["details"]["exit"], len(rows[1]["details"]["note"])) == ("11", 1024)

    for number in range(EVENTS_PER_MINUTE + 5):
        await say(f"flood-{number}")
    rows = (await fleet.admin.get(f"{path}?per_page=100"))["data"]
    assert len(rows) == EVENTS_PER_MINUTE <= EVENTS_KEPT
    live = fleet.rig.side.presences.get(agent.agent_id)
    assert live is not None
    assert live.events_dropped == 7

    await agent.send(event=pb.Event(event_id="odd", event_type="no type"))
    refused = await agent.next("ack")
    assert (refused.message_id, refused.success) == ("odd", False)


# Trying typed hosts.


async def test_typed_hosts_are_tried_by_the_agent_that_is_asked(fleet: Fleet) -> None:
    agent = await fleet.connected("web-1", capabilities=["http2", VALIDATES_TYPED])
    old = await fleet.connected("web-2", capabilities=["http2"])
    upstream = await fleet.admin.post(
        f"/workspaces/{fleet.workspace}/upstreams",
        {"name": "backend", "servers": [{"address": "10.0.0.1:80"}]},
    )
    locations = [{"path": "/", "upstream_id": upstream["id"]}]
    body = {"virtual_host": {"name": "n", "server_name": "n.example", "locations": locations}}
    path = f"/workspaces/{fleet.workspace}/config/validate"

    asked = asyncio.create_task(fleet.admin.post(f"{path}?agent_id={agent.agent_id}", body, status=200))
    command = await agent.next("command")
    candidate = command.validate_config.candidate
    assert [one.server_name for one in candidate.virtual_hosts] == ["n.example"]
    assert [one.id for one in candidate.upstreams] == [upstream["id"]]
    await agent.answer(command.command_id, success=False, message=NO_NAME)
    answer = await asked
    assert (answer["valid"], answer["message"]) == (False, NO_NAME)
    assert [(one["field"], one["message"]) for one in answer["errors"]] == [("virtual_host", NO_NAME)]

    wrong = {"virtual_host": {"name": "n", "server_name": "a;b"}}
    refused = await fleet.admin.post(f"{path}?agent_id={agent.agent_id}", wrong, status=200)
    assert (refused["valid"], "message" in refused) == (False, False), "what is wrong anyway asks nobody"
    code = await fleet.admin.refused("POST", f"{path}?agent_id={old.agent_id}", body)
    assert code[0] in (409, 412, 422, 400), "one that cannot try it does not count as having agreed"
    assert (await fleet.admin.refused("POST", f"{path}?agent_id=nobody", body))[0] == 422
    agent.leave()
    await until(lambda: fleet.rig.side.presences.get(agent.agent_id) is None)
    assert (await fleet.admin.refused("POST", f"{path}?agent_id={agent.agent_id}", body))[0] == 503
    both = {**body, "config_content": "events {}"}
    assert (await fleet.admin.refused("POST", f"{path}?agent_id={agent.agent_id}", both))[0] == 422
