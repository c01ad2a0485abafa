"""Traffic over REST: of one's own workspace, in its shape, compared with the day before."""

from __future__ import annotations

from pathlib import Path

from support.proxies.proxy_api import HOST, rest_api

from fleetplane.domains.proxies.agents.telemetry import AgentRecords
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.values.times import NS

DAY = 86_400


def agent(scope: str, name: str) -> Agent:
    return Agent(
        kind=AGENT.name,
        scope=scope,
        name=name,
        uid=name,
        labels={},
        spec=AgentSpec(name=name),
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def batch(count: int, at: int, host: str, **said: str) -> pb.LogBatch:
    return pb.LogBatch(
        entries=[
            pb.LogEntry(
                timestamp=at * 1000,
                level="access",
                fields={
                    "id": f"{host}-{at}-{number}",
                    "virtual_host_id": host,
                    "status": "200",
                    "uri": f"/{number % 2}",
                    "response_time_ms": "20",
                    **said,
                },
            )
            for number in range(count)
        ]
    )


async def test_a_workspace_is_told_its_own_traffic(tmp_path: Path) -> None:
    clock = SystemClock()
    async with Telemetry.open(tmp_path / "t.db", clock) as telemetry:
        records = AgentRecords(telemetry)
        async with rest_api(tmp_path, records=records) as api:
            organization, workspace = await api.workspace()
            viewer = await api.person(organization, "viewer")
            stranger = await api.person()
            host = (await api.admin.post(f"/workspaces/{workspace}/virtual-hosts", HOST))["id"]
            scope = f"org/{organization}/ws/{workspace}"
            now = clock.now_ns() // NS
            for count, at, one in ((30, now - 30, host), (10, now - 30, "gone"), (4, now - DAY - 30, host)):
                said = {"location": "/", "upstream_id": "u1"} if one == host else {}
                sent = batch(count, at, one, **said)
                await records.logs(agent(scope, "a1"), sent, now_ns=clock.now_ns())
            await records.logs(agent("org/x/ws/y", "a9"), batch(5, now, host), now_ns=clock.now_ns())
            await telemetry.flush()
            path = f"/workspaces/{workspace}/traffic"
            told = await viewer.get(path)
            assert (told["total"]["requests"], told["day_before"]["requests"]) == (40, 4)
            assert [(one["name"], one["figures"]["requests"]) for one in told["virtual_hosts"]] == [
                (HOST["name"], 30),
                ("", 10),
            ]
            assert [(one["agent_id"], one["figures"]["requests"]) for one in told["agents"]] == [("a1", 40)]
            assert sum(one["figures"]["requests"] for one in told["over_time"]) == 40
            assert told["top"]["paths"] == {
                "values": [{"value": "/0", "requests": 20}, {"value": "/1", "requests": 20}],
                "missed": 0,
            }
            assert told["latency_error"] == 0.01
            assert abs(told["total"]["latency_ms"]["p99"] - 20) <= 0.2
            assert (await viewer.get(f"{path}?virtual_host_id={host}"))["total"]["requests"] == 30
            assert (await viewer.get(f"{path}?agent_id=a2"))["total"]["requests"] == 0
            assert (told["locations"], told["upstreams"]) == ([], [])
            placed = await viewer.get(f"{path}?by=location")
            assert placed["total"] == told["total"]
            assert [
                (one["virtual_host"], one["location"], one["upstream_id"], one["figures"]["requests"])
                for one in placed["locations"]
            ] == [(HOST["name"], "/", "u1", 30)]
            assert [(one["upstream_id"], one["figures"]["requests"]) for one in placed["upstreams"]] == [
                ("u1", 30)
            ]
            narrow = await viewer.get(f"{path}?location=/&upstream_id=u1")
            assert (narrow["total"]["requests"], narrow["day_before"]["requests"]) == (30, 4)
            assert (await viewer.get(f"{path}?upstream_id=u2"))["total"]["requests"] == 0
            assert (await viewer.refused("GET", f"{path}?by=referrer"))[0] == 422
            assert (await stranger.call("GET", path)).status_code in (403, 404)
            assert (await viewer.refused("GET", f"{path}?from=2020-01-01T00:00:00Z"))[0] == 422
