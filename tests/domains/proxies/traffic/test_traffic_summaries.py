"""What requests come to: counts are exact, percentiles and frequent values within their stated bounds."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from support.shared.telemetry_place import TelemetryPlace

from fleetplane.domains.proxies.agents.telemetry import AgentRecords, TrafficCollector
from fleetplane.domains.proxies.kinds.records import Agent, AgentSpec
from fleetplane.domains.proxies.rest.telemetry import figures, step_of
from fleetplane.domains.proxies.traffic.fields import Row, row_of
from fleetplane.domains.proxies.traffic.summary import (
    BYTES_MOST,
    ERROR,
    PERCENTILES,
    TOP_KEPT,
    AccessSummarizer,
    Frequent,
    TrafficPlace,
    TrafficSummary,
    report,
)
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.telemetry.summaries import SUBJECTS_LIMIT
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

DAY = 86_400
SCOPE = "org/o/ws/w"


def row(milliseconds: float = 5, **said: str) -> Row:
    return row_of(request(milliseconds, **said))


def request(milliseconds: float = 5, **said: str) -> dict[str, str]:
    base = {
        "status": "200",
        "request_length": "100",
        "bytes_sent": "1000",
        "uri": "/a?b",
        "remote_addr": "::1",
    }
    return {**base, "response_time_ms": f"{milliseconds:g}", **said}


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=300))
def test_a_percentile_is_within_its_bound_of_a_request_that_was_there(milliseconds: list[int]) -> None:
    said = TrafficSummary()
    said.count([row(one) for one in milliseconds])
    ordered = sorted(milliseconds)
    for share in PERCENTILES.values():
        exact = ordered[int(share * (len(ordered) - 1))]
        assert abs(said.percentile(share) - exact) <= ERROR * exact + 1e-9


@given(st.lists(st.sampled_from([row(1), row(30, status="503"), row(0, uri="/b")]), max_size=60))
def test_summaries_add_up_to_the_summary_of_all_their_requests(lines: list[Row]) -> None:
    whole, parts = TrafficSummary(), TrafficSummary()
    whole.count(lines)
    for start in range(0, len(lines), 7):
        part = TrafficSummary()
        part.count(lines[start : start + 7])
        parts.add(msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=TrafficSummary))
    assert parts == whole


def test_requests_are_counted_by_what_they_came_to() -> None:
    said = TrafficSummary()
    said.count(
        [
            row(status="200", cache_status="HIT"),
            row(status="304", cache_status="MISS"),
            row(status="502", upstream_statuses="502, 504 : 200"),
            row(status="", request_length="-", bytes_sent=""),
            row(status="404", referer="-", user_agent="curl"),
        ]
    )
    told = figures(said)
    assert told.status_codes == {"other": 1, "1xx": 0, "2xx": 1, "3xx": 1, "4xx": 1, "5xx": 1}
    assert (told.requests, told.in_bytes, told.out_bytes) == (5, 400, 4000)
    assert (told.cache_hits, told.cache_lookups, told.upstream_failures) == (1, 2, 2)
    assert (said.paths.counts, said.referrers.counts, said.agents.counts) == ({"/a": 5}, {}, {"curl": 1})


def test_nothing_is_remembered_of_texts_that_are_no_figures() -> None:
    """An agent may write 64 KB wherever a number belongs."""
    names = ("request_length", "bytes_sent", "upstream_statuses", "response_time_ms")
    tracemalloc.start()
    try:
        for number in range(200):
            TrafficSummary().count([row_of(dict.fromkeys(names, f"{number}{'0' * 60000}"))], frequent=False)
        assert tracemalloc.get_traced_memory()[0] < 4_000_000
    finally:
        tracemalloc.stop()


def test_frequent_values_are_told_within_what_may_be_missed() -> None:
    randomly = random.Random(7)
    values = [f"/{int(randomly.paretovariate(0.6))}" for _ in range(5_000)]
    said, exact = Frequent(), Counter(values)
    for start in range(0, len(values), 250):
        said.add(Counter(values[start : start + 250]))
    assert len(said.counts) == TOP_KEPT
    for value, times in exact.items():
        assert said.counts.get(value, 0) <= times <= said.counts.get(value, 0) + said.missed
    assert {value for value, _ in exact.most_common(3)} <= said.counts.keys()


@pytest.mark.parametrize(("seconds", "step"), [(3600, 60), (7201, 3600), (4 * DAY, 3600), (30 * DAY, DAY)])
def test_longer_stretches_are_told_in_wider_steps(seconds: int, step: int) -> None:
    assert step_of(seconds) == step


# Through the store.


def agent(name: str) -> Agent:
    return Agent(
        kind="proxy-agent",
        scope=SCOPE,
        name=name,
        labels={},
        uid=name,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
        spec=AgentSpec(name=name),
        status=None,
    )


def entries(count: int, at: int, *, host: str = "h1", name: str = "a", **said: str) -> Iterator[pb.LogEntry]:
    for number in range(count):
        fields = {
            **request(number % 50),
            "id": f"{name}-{host}-{at}-{number}",
            "virtual_host_id": host,
        } | said
        yield pb.LogEntry(timestamp=at * 1000, level="access", message="GET / HTTP/1.1", fields=fields)


@asynccontextmanager
async def records(place: TelemetryPlace) -> AsyncIterator[tuple[AgentRecords, Telemetry, VirtualClock]]:
    clock = VirtualClock()
    async with place.opened(clock) as telemetry:
        yield AgentRecords(telemetry), telemetry, clock


async def told(kept: AgentRecords, start: int, stop: int, **only: Any) -> Any:
    return await kept.requests(SCOPE, from_ns=start * NS, to_ns=stop * NS, step_seconds=60, **only)


async def test_lines_that_are_sent_again_count_once_and_streams_do_not(
    telemetry_place: TelemetryPlace,
) -> None:
    async with records(telemetry_place) as (kept, telemetry, clock):
        now = clock.now_ns() // NS
        batch = pb.LogBatch(entries=entries(100, now))
        half = pb.LogBatch(entries=[*list(entries(150, now))[50:], *entries(10, now, host="h2")])
        for one in (batch, batch, half):
            await kept.logs(agent("a1"), one, now_ns=clock.now_ns())
            await telemetry.flush()
        await kept.logs(agent("a2"), pb.LogBatch(entries=entries(7, now, name="b")), now_ns=clock.now_ns())
        stream = pb.LogEntry(timestamp=now * 1000, level="access", fields={"stream_id": "s", "id": "s1"})
        await kept.logs(agent("a1"), pb.LogBatch(entries=[stream]), now_ns=clock.now_ns())
        await telemetry.flush()
        said = await told(kept, now - 60, now + 60)
        assert said.total.requests == 167
        assert {one: what.requests for one, what in said.hosts.items()} == {"h1": 157, "h2": 10}
        assert {one: what.requests for one, what in said.sources.items()} == {"a1": 160, "a2": 7}
        assert (await told(kept, now - 60, now + 60, host="h2")).total.requests == 10
        assert (await told(kept, now - 60, now + 60, source="a2")).total.requests == 7
        assert (await told(kept, now - 7200, now - 3600)).total.requests == 0


async def test_old_stretches_grow_wider_and_nothing_is_lost(telemetry_place: TelemetryPlace) -> None:
    async with records(telemetry_place) as (kept, telemetry, clock):
        now = clock.now_ns() // NS
        moments = [
            now - 36 * DAY,
            *(now - 10 * DAY - hour * 3600 for hour in range(30)),
            now - 5 * 3600,
            now - 60,
        ]
        for at in moments:
            await kept.logs(agent("a1"), pb.LogBatch(entries=entries(3, at)), now_ns=clock.now_ns())
        await telemetry.flush()
        before = await told(kept, now - 30 * DAY, now)
        await telemetry.sweep()
        after = await told(kept, now - 30 * DAY, now)
        assert (after.total, after.total.requests) == (before.total, 3 * (len(moments) - 1))
        found = await telemetry.summaries(SCOPE, "access", from_ns=0, to_ns=now * NS)
        widths = Counter(one.width_seconds for one in found)
        assert (widths[60], widths[3600], widths[DAY] in (2, 3)) == (1, 1, True)
        assert min(one.at_seconds for one in found) >= now - 36 * DAY + 1, "older than 35 days is gone"


async def test_requests_are_told_by_location_and_upstream_also_when_they_are_old(
    telemetry_place: TelemetryPlace,
) -> None:
    here, there = {"location": "/", "upstream_id": "u1"}, {"location": "/api/", "upstream_id": "u1"}
    async with records(telemetry_place) as (kept, telemetry, clock):
        now = clock.now_ns() // NS
        for at in (now - 20 * DAY, now - 5 * 3600, now):
            for count, said in ((3, here), (4, there), (5, {"location": "/x"}), (6, {})):
                name = said.get("location", "old")
                batch = pb.LogBatch(entries=entries(count, at, name=name, **said))
                await kept.logs(agent("a1"), batch, now_ns=clock.now_ns())
        await telemetry.flush()
        window: dict[str, Any] = {"from_ns": (now - 25 * DAY) * NS, "to_ns": (now + 60) * NS}
        window["step_seconds"] = 3600
        for _ in range(2):
            told = await kept.placed_requests(SCOPE, **window)
            assert {(one.location, one.upstream): what.requests for one, what in told.places.items()} == {
                ("/", "u1"): 9,
                ("/api/", "u1"): 12,
                ("/x", ""): 15,
            }
            assert {one: what.requests for one, what in told.upstreams.items()} == {"u1": 21}
            assert (await kept.placed_requests(SCOPE, **window, upstream="u1")).total.requests == 21
            only = await kept.placed_requests(SCOPE, **window, location="/api/")
            assert (only.total.requests, [one.requests for one in only.over_time.values()]) == (12, [4, 4, 4])
            assert (await kept.requests(SCOPE, **window)).total.requests == 54
            await telemetry.sweep()


def test_a_place_is_read_as_it_was_written_and_a_cut_one_keeps_its_host() -> None:
    place = TrafficPlace(host="h", location="~ \\.php$", upstream="u")
    assert TrafficPlace.parse(place.key) == place
    assert TrafficPlace.parse("h").host == "h"


async def test_counters_grow_by_what_is_new(telemetry_place: TelemetryPlace) -> None:
    async with records(telemetry_place) as (kept, telemetry, clock):
        now = clock.now_ns() // NS
        for count in (5, 8, 8):
            await kept.logs(agent("a1"), pb.LogBatch(entries=entries(count, now)), now_ns=clock.now_ns())
            await telemetry.flush()
        registry = CollectorRegistry()
        registry.register(TrafficCollector(kept.totals))

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"fleetplane_proxies_{name}", labels)

        assert (value("requests_total", **{"class": "2xx"}), value("requests_total", **{"class": "5xx"})) == (
            8,
            0,
        )
        assert (value("request_bytes_total"), value("response_bytes_total")) == (800, 8000)


def test_a_report_of_nothing_is_empty() -> None:
    said = report((), step_seconds=60)
    assert (said.total, said.over_time) == (TrafficSummary(), {})
    assert figures(said.total).latency_ms == dict.fromkeys(PERCENTILES, 0.0)
    assert AccessSummarizer().merged([]) == msgspec.msgpack.encode(TrafficSummary())


async def test_what_a_hostile_agent_says_costs_nobody_else_their_lines(
    telemetry_place: TelemetryPlace,
) -> None:
    """Sums that no summary could hold, latencies of every size, and a new virtual host with every line."""
    huge = TrafficSummary(received=BYTES_MOST, sent=BYTES_MOST)
    huge.count([row(request_length="9" * 15, bytes_sent="9" * 15)])
    huge.add(huge)
    assert (huge.received, huge.sent) == (BYTES_MOST, BYTES_MOST)
    small = TrafficSummary()
    small.count([row(response_time_ms=f"1e-{power}") for power in range(3, 300)])
    assert len(small.bins) == 1
    async with records(telemetry_place) as (kept, telemetry, clock):
        now = clock.now_ns() // NS
        many = [one for number in range(SUBJECTS_LIMIT + 5) for one in entries(1, now, host=f"h{number}")]
        await kept.logs(agent("a1"), pb.LogBatch(entries=many), now_ns=clock.now_ns())
        await telemetry.flush()
        said = await told(kept, now - 60, now + 60)
        assert (len(said.hosts), said.hosts[""].requests) == (SUBJECTS_LIMIT + 1, 5)
        assert said.total.requests == SUBJECTS_LIMIT + 5
