"""What agents report is what REST tells of their traffic, and nothing of it twice."""

from __future__ import annotations

import asyncio
import datetime as dt
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.instances.agents_rig import agents_rig
from support.proxies.proxy_api import rest_api

from fleetplane.domains.proxies.agents.ports import LEVELS, AgentLogQuery, AgentTraffic, ErrorQuery, LogPage
from fleetplane.domains.proxies.agents.telemetry import AgentRecords
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.telemetry import Telemetry, TelemetryLimits
from fleetplane.sim.clock import VirtualClock

NOW = VirtualClock().now_ns()
SECOND = 1_000_000_000
HOUR = 3600 * SECOND
SCOPE = "org/o/ws/w"


def agent(name: str, scope: str = SCOPE) -> Agent:
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


def measured(
    second: float, *, connections: float = 0, requests: float = 0, **counted: float
) -> pb.MetricsBatch:
    """`counted` by class and host, such as `a_2xx`."""
    metrics = [
        pb.Metric(name="nginx_connections_active", value=connections, type=pb.GAUGE),
        pb.Metric(name="nginx_http_requests_total", value=requests, type=pb.COUNTER),
        pb.Metric(name="nginx_http_request_bytes_total", value=requests * 10, type=pb.COUNTER),
        pb.Metric(name="nginx_http_response_bytes_total", value=requests * 100, type=pb.COUNTER),
        pb.Metric(name="system_cpu_percent", value=25, type=pb.GAUGE),
    ]
    for key, value in counted.items():
        host, _, code_class = key.partition("_")
        labels = {"code_class": code_class, "virtual_host_id": host}
        metrics.append(pb.Metric(name="nginx_http_responses_total", value=value, labels=labels))
    return pb.MetricsBatch(timestamp=round(NOW / 1e6 + second * 1000), metrics=metrics)


def request(number: int, *, level: str = "access", **about: str) -> pb.LogEntry:
    fields = {
        "id": f"id-{number}",
        "remote_addr": "192.0.2.1",
        "method": "GET",
        "uri": f"/{number}",
        "protocol": "HTTP/1.1",
        "host": "a.test",
        "status": "200",
        "body_bytes_sent": "512",
        "response_time_ms": "12.5",
        "user_agent": 'q"uote ü',
        "referer": "",
        "request_id": "f" * 32,
        **about,
    }
    return pb.LogEntry(timestamp=NOW // 1_000_000 + number, level=level, message="m", fields=fields)


class Desk:
    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry
        self.records = AgentRecords(telemetry)

    async def measure(self, who: str, *batches: pb.MetricsBatch) -> None:
        for batch in batches:
            await self.records.metrics(agent(who), batch, now_ns=NOW + HOUR)
        await self.telemetry.flush()

    async def log(self, who: str, *entries: pb.LogEntry, scope: str = SCOPE) -> None:
        await self.records.logs(agent(who, scope), pb.LogBatch(entries=entries), now_ns=NOW + HOUR)
        await self.telemetry.flush()

    async def traffic(self, *who: str, start: float = 0, stop: float = 3600) -> AgentTraffic:
        window = (NOW + round(start * SECOND), NOW + round(stop * SECOND))
        return await self.records.traffic(SCOPE, who, from_ns=window[0], to_ns=window[1])

    async def page(self, **about: Any) -> LogPage:
        given = {"from_ns": NOW, "to_ns": NOW + HOUR, "limit": 10, **about}
        return await self.records.access_log(SCOPE, AgentLogQuery(**given))

    async def uris(self, **about: Any) -> list[str]:
        return [entry.uri for entry in (await self.page(**about)).entries]


@asynccontextmanager
async def desk(folder: Path, **limits: Any) -> AsyncIterator[Desk]:
    async with Telemetry.open(folder / "t.db", VirtualClock(), limits=TelemetryLimits(**limits)) as telemetry:
        yield Desk(telemetry)


async def test_traffic_is_the_growth_of_all_counters_of_the_agents_asked_for(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.measure(
            "one",
            measured(0, requests=1000, a_2xx=900, b_2xx=50, a_1xx=7),
            measured(15, requests=1100, connections=42, a_2xx=960, b_2xx=60, a_5xx=10, b_4xx=20, a_1xx=9),
        )
        await it.measure("two", measured(0), measured(15, requests=30, connections=8, a_3xx=100))
        await it.measure("else", measured(0), measured(15, requests=999, connections=999, a_2xx=999))
        found = await it.traffic("one", "two", stop=16)
        assert found == AgentTraffic(
            requests_total=200,
            requests_per_second=round(100 / 15 + 30 / 15, 3),
            error_rate=10 / 200,
            active_connections=50,
            in_bytes=1300,
            out_bytes=13_000,
            status_2xx=70,
            status_3xx=100,
            status_4xx=20,
            status_5xx=10,
        )
        assert found.requests_total == (
            found.status_2xx + found.status_3xx + found.status_4xx + found.status_5xx
        )


async def test_a_restart_of_nginx_and_a_batch_sent_twice_change_no_sum(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        batches = [measured(at, requests=value) for at, value in ((0, 100), (15, 130), (30, 5), (45, 25))]
        await it.measure("one", *batches, *batches)
        assert (await it.traffic("one")).in_bytes == (30 + 5 + 20) * 10


async def test_an_agent_that_went_silent_has_no_connections_but_had_its_traffic(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.measure("one", measured(0), measured(15, requests=30, connections=8, a_2xx=30))
        found = await it.traffic("one", stop=3600)
        assert (found.active_connections, found.requests_per_second, found.requests_total) == (0, 0.0, 30)


async def test_without_reports_there_is_no_traffic(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.measure("one", measured(0, requests=math.nan, connections=math.inf))
        assert await it.traffic("one") == AgentTraffic()
        assert await it.page() == LogPage(entries=[])


async def test_access_lines_come_back_as_they_were_sent(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.log("one", request(1, status="-", response_time_ms="nan"), request(2))
        page = await it.page()
        assert (page.total, page.cursor) == (2, "")
        newest, oldest = page.entries
        assert (newest.id, newest.agent_id, newest.uri, newest.host) == ("id-2", "one", "/2", "a.test")
        assert (newest.status, newest.body_bytes_sent, newest.response_time_ms) == (200, 512, 12.5)
        assert (newest.user_agent, newest.timestamp) == ('q"uote ü', "2026-01-01T00:00:00Z")
        assert (oldest.status, oldest.response_time_ms) == (0, 0.0)


async def test_the_access_log_is_searched_by_status_agent_host_and_method(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        await it.log("one", request(1), request(2, status="503"), request(3, host="b.test"))
        await it.log("two", request(4, method="POST"), request(5, level="error"))
        await it.log("one", request(6), scope="org/other/ws/w")
        assert await it.uris() == ["/4", "/3", "/2", "/1"]
        assert await it.uris(status_low=500, status_high=599) == ["/2"]
        assert await it.uris(agent_id="two") == ["/4"]
        assert await it.uris(host="b.test") == ["/3"]
        assert await it.uris(method="POST") == ["/4"]
        first = await it.page(limit=3)
        assert (first.total, len(first.entries)) == (4, 3)
        assert await it.uris(limit=3, cursor=first.cursor) == ["/1"]


@pytest.mark.parametrize("identity", ["", "id"])
async def test_a_batch_of_lines_that_is_sent_again_is_kept_once(tmp_path: Path, identity: str) -> None:
    async with desk(tmp_path) as it:
        numbered = [request(1, id=identity and f"{identity}-{each}") for each in range(3)]
        await it.log("one", *numbered)
        await it.log("one", *numbered)
        page = await it.page()
        assert page.total == 3, "lines that look alike are still different lines"
        assert len({entry.id for entry in page.entries}) == 3


async def test_what_a_clock_far_ahead_dates_happened_when_it_came(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        entry = request(1)
        entry.timestamp = (1 << 63) - 1
        await it.log("one", entry)
        assert await it.uris(from_ns=NOW + HOUR, to_ns=NOW + HOUR + 1) == ["/1"]


async def test_an_agent_is_told_to_send_again_what_there_is_no_room_for(tmp_path: Path) -> None:
    async with desk(tmp_path, queue_rows=2) as it:
        with pytest.raises(Unavailable, match="again"):
            await it.log("one", request(1), request(2), request(3))
        with pytest.raises(Unavailable, match="again"):
            await it.measure("one", measured(0))


async def test_what_agents_send_over_grpc_is_kept_before_rest_is_asked(tmp_path: Path) -> None:
    async with Telemetry.open(tmp_path / "t.db", clock := SystemClock()) as telemetry:
        records = AgentRecords(telemetry)
        async with agents_rig(tmp_path, intake=records) as rig:
            fake = await rig.agent("web-01")
            await fake.open()
            now_ms = clock.now_ns() // 1_000_000
            entry = request(1)
            entry.timestamp = now_ms
            await fake.send(logs=pb.LogBatch(entries=[entry]))
            assert (await fake.next("ack")).success
            for at, value in ((now_ms - 15_000, 10), (now_ms, 40)):
                batch = measured(0, requests=value, connections=3, a_2xx=value)
                batch.timestamp = at
                metadata = (("authorization", f"Bearer {fake.token}"),)
                assert (await fake.stub.ReportMetrics(batch, metadata=metadata)).success
            await telemetry.flush()
            window: dict[str, Any] = {"from_ns": clock.now_ns() - HOUR, "to_ns": clock.now_ns()}
            found = await records.traffic(rig.scope, {fake.agent_id}, **window)
            assert (found.requests_total, found.requests_per_second, found.active_connections) == (30, 2.0, 3)
            page = await records.access_log(rig.scope, AgentLogQuery(limit=10, **window))
            assert [one.agent_id for one in page.entries] == [fake.agent_id]


async def test_the_reports_of_an_agent_without_measurements_stand_for_them(tmp_path: Path) -> None:
    async with Telemetry.open(tmp_path / "t.db", clock := SystemClock()) as telemetry:
        records = AgentRecords(telemetry)
        async with agents_rig(tmp_path, intake=records) as rig:
            fake = await rig.agent("web-01")
            await fake.open()
            for value in (10, 40):
                nginx = pb.NginxStatus(is_running=True, active_connections=3, total_requests=value)
                await fake.send(health=pb.HealthReport(nginx=nginx))
            window: dict[str, Any] = {"from_ns": clock.now_ns() - HOUR, "to_ns": clock.now_ns() + HOUR}

            async def told() -> bool:
                await telemetry.flush()
                return (await records.traffic(rig.scope, {fake.agent_id}, **window)).requests_total == 30

            async with asyncio.timeout(30):
                while not await told():
                    await asyncio.sleep(0.01)
            window["to_ns"] = clock.now_ns()
            found = await records.traffic(rig.scope, {fake.agent_id}, **window)
            assert (found.requests_total, found.active_connections) == (30, 3)
            assert found.requests_per_second > 0


async def test_rest_answers_from_what_was_reported(tmp_path: Path) -> None:
    async with Telemetry.open(tmp_path / "t.db", clock := VirtualClock(start_ns=NOW + HOUR)) as telemetry:
        records = AgentRecords(telemetry)
        async with rest_api(tmp_path, records=records) as api:
            _, workspace = await api.workspace()
            enrolled = await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "web-01"})
            (stored,) = api.store.list(AGENT)
            for second, value in ((0, 10), (15, 40)):
                batch = measured(second, requests=value, connections=3, a_2xx=value, a_5xx=value / 10)
                await records.metrics(stored, batch, now_ns=clock.now_ns())
            await records.logs(
                stored, pb.LogBatch(entries=[request(1), request(2, status="500")]), now_ns=clock.now_ns()
            )
            await telemetry.flush()
            start = dt.datetime.fromtimestamp(NOW / SECOND, dt.UTC)
            window = f"from={start:%Y-%m-%dT%H:%M:%SZ}&to={start:%Y-%m-%dT%H}:00:16Z"
            for path in (f"/workspaces/{workspace}", f"/agents/{enrolled['agent_id']}"):
                assert await api.admin.get(f"{path}/metrics?{window}") == {
                    "requests_total": 33,
                    "requests_per_second": 2.0,
                    "error_rate": pytest.approx(3 / 33),
                    "active_connections": 3,
                    "bandwidth": {"in_bytes": 300, "out_bytes": 3000},
                    "status_codes": {"2xx": 30, "3xx": 0, "4xx": 0, "5xx": 3},
                }
            logs = f"/workspaces/{workspace}/access-logs?{window}"
            found = await api.admin.get(f"{logs}&status_code=5xx&limit=1")
            assert [one["uri"] for one in found["data"]] == ["/2"]
            assert found["meta"] == {"total": 1, "limit": 1}
            page = await api.admin.get(f"{logs}&limit=1")
            rest = await api.admin.get(f"{logs}&limit=1&cursor={page['meta']['cursor']}")
            assert [one["uri"] for one in page["data"] + rest["data"]] == ["/2", "/1"]
            assert await api.admin.faults("GET", f"{logs}&cursor=nonsense") == [("cursor", "INVALID_FORMAT")]


def complaint(number: int, level: str, *, source: str = "nginx_error", at_ms: int = 0) -> pb.LogEntry:
    fields = {"id": f"e-{number}", "source": source, "pid": "7"}
    moment = at_ms or NOW // 1_000_000 + number
    return pb.LogEntry(timestamp=moment, level=level, message=f"complaint {number}", fields=fields)


async def test_complaints_are_searched_by_severity_agent_and_source(tmp_path: Path) -> None:
    async with desk(tmp_path) as it:
        levels = ["notice", "warn", "error", "emerg", "strange"]
        await it.log("one", *(complaint(n, level) for n, level in enumerate(levels)), request(9))
        await it.log("two", complaint(7, "error", source="agent"))

        async def found(severity: str, **about: Any) -> list[str]:
            asked = ErrorQuery(
                from_ns=NOW, to_ns=NOW + HOUR, limit=10, severity=LEVELS.index(severity), **about
            )
            return [one.message for one in (await it.records.error_log(SCOPE, asked)).entries]

        assert await found("debug") == [f"complaint {n}" for n in (7, 4, 3, 2, 1, 0)], "and no request"
        assert await found("warn") == [f"complaint {n}" for n in (7, 3, 2, 1)], "an unknown level is no alarm"
        assert await found("emerg") == ["complaint 3"]
        assert await found("debug", agent_id="two") == ["complaint 7"]
        assert await found("debug", source="agent") == ["complaint 7"]
        assert await it.uris() == ["/9"]


async def test_rest_tells_what_nginx_complained_of(tmp_path: Path) -> None:
    async with Telemetry.open(tmp_path / "t.db", clock := SystemClock()) as telemetry:
        records = AgentRecords(telemetry)
        async with rest_api(tmp_path, records=records) as api:
            _, workspace = await api.workspace()
            enrolled = await api.admin.post(f"/workspaces/{workspace}/agents/tokens", {"name": "web-01"})
            (stored,) = api.store.list(AGENT)
            now_ms = clock.now_ns() // 1_000_000
            entries = [complaint(n, "error", at_ms=now_ms - 1000 + n) for n in range(3)]
            await records.logs(stored, pb.LogBatch(entries=entries), now_ns=clock.now_ns())
            await telemetry.flush()
            path = f"/workspaces/{workspace}/error-logs"
            page = await api.admin.get(f"{path}?level=error&limit=2")
            rest = await api.admin.get(f"{path}?limit=2&cursor={page['meta']['cursor']}")
            none = await api.admin.get(f"{path}?level=crit")
            bad = await api.admin.faults("GET", f"{path}?level=loud&limit=0")
            _, other = await api.workspace()
            elsewhere = await api.admin.get(f"/workspaces/{other}/error-logs")

    assert [one["message"] for one in page["data"] + rest["data"]] == [f"complaint {n}" for n in (2, 1, 0)]
    assert page["data"][0] == {
        "id": "e-2",
        "agent_id": enrolled["agent_id"],
        "timestamp": page["data"][0]["timestamp"],
        "level": "error",
        "message": "complaint 2",
        "source": "nginx_error",
    }
    assert (page["meta"]["total"], rest["meta"]) == (3, {"total": 3, "limit": 2})
    assert (none["data"], elsewhere["data"]) == ([], [])
    assert sorted(field for field, _ in bad) == ["level", "limit"]
