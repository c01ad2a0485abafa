"""A known load through a real NGINX: what is told of it is what was sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from support.proxies.nginx_rig import backend
from support.proxies.proxy_server_double import until
from support.proxies.typed_rig import Site, typed_site
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.log_shipping import access_batch, parse_request, requests_of
from fleetplane.domains.proxies.agents.telemetry import AgentRecords
from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec, UpstreamSpec, VirtualHostSpec
from fleetplane.domains.proxies.rest.telemetry import figures
from fleetplane.domains.proxies.traffic.summary import ERROR, PERCENTILES, TrafficPlace, TrafficReport
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.values.times import NS
from fleetplane.node.logs.tail import TailedLine

SCOPE = "org/o/ws/w"
PLAIN, CACHED, FAILED, MISSING = 40, 12, 6, 9
REGEX = r'~ ^/gone/.*[$"]?x$'
TOTAL = PLAIN + CACHED + FAILED + MISSING


def host(name: str, *locations: dict[str, object], **more: object) -> VirtualHostSpec:
    given = {"name": name, "server_name": f"{name}.test", "listen_port": 80, "locations": locations, **more}
    return msgspec.convert(given, VirtualHostSpec)


def reporting() -> Agent:
    return Agent(
        kind=AGENT.name,
        scope=SCOPE,
        name="a1",
        uid="a1",
        labels={},
        spec=AgentSpec(name="a1"),
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )


def lines(site: Site) -> list[bytes]:
    found = site.rig.paths.access_log.read_bytes().splitlines()
    return [one for one in found if (said := parse_request(one)) is not None and said.virtual_host_id]


async def load(site: Site) -> None:
    for number in range(PLAIN):
        await site.ask("one.test", f"/p{number % 4}?x={number}", headers={"user-agent": "known"})
    await site.ask("two.test", "/kept")
    await until(lambda: len(lines(site)) == PLAIN + 1)  # told once it is kept
    for _ in range(CACHED - 1):
        await site.ask("two.test", "/kept")
    for _ in range(FAILED):
        await site.ask("two.test", "/failing")
    await asyncio.gather(*(site.ask("one.test", "/gone/x") for _ in range(MISSING)))


async def taken(folder: Path, sent: list[bytes]) -> TrafficReport:
    """As an agent ships its lines, and the server keeps and tells them; the first half is sent twice,
    by line and by column."""
    clock = SystemClock()
    numbered = [TailedLine(text=text, place=f"e:1:{number}") for number, text in enumerate(sent)]
    async with Telemetry.open(folder / "t.db", clock) as telemetry:
        kept = AgentRecords(telemetry)
        for part, columns in ((numbered[: len(sent) // 2], False), (numbered, True)):
            requests, identities, seqs = zip(*requests_of(part, "a1"), strict=True)
            batch = access_batch(requests, identities, seqs, columns=columns)
            assert bool(batch.columns) is columns
            await kept.logs(reporting(), batch, now_ns=clock.now_ns())
            await telemetry.flush()
        now = clock.now_ns()
        window: dict[str, Any] = {"from_ns": now - 3600 * NS, "to_ns": now + 60 * NS, "step_seconds": 60}
        places = (await kept.placed_requests(SCOPE, **window)).places
        return msgspec.structs.replace(await kept.requests(SCOPE, **window), places=places)


async def test_what_was_sent_is_what_is_told(tmp_path: Path) -> None:
    dead = free_port()
    async with backend("ok") as behind, typed_site(tmp_path) as site:
        servers = [{"address": f"127.0.0.1:{dead}", "max_fails": 0}]
        group = msgspec.convert(
            {"name": "dead", "algorithm": "round_robin", "servers": servers}, UpstreamSpec
        )
        kept = {"rules": [{"seconds": 600}]}
        url = f"http://{behind.address}"
        await site.serve(
            {
                "h1": host(
                    "one",
                    {"path": "/", "proxy_pass": url},
                    {"path": REGEX, "respond": {"status": 404}},
                ),
                "h2": host(
                    "two",
                    {"path": "/kept", "proxy_pass": url, "cache": kept},
                    {"path": "/failing", "upstream_id": "dead"},
                    cache={"max_mb": 10},
                ),
            },
            {"dead": group},
        )
        await load(site)
        await until(lambda: len(lines(site)) == TOTAL)
        sent = lines(site)
    requests = [said for one in sent if (said := parse_request(one)) is not None]
    report = await taken(tmp_path, sent)
    told = figures(report.total)
    assert told.requests == TOTAL
    assert {one: what.requests for one, what in report.hosts.items()} == {
        "h1": PLAIN + MISSING,
        "h2": CACHED + FAILED,
    }
    assert {(one.host, one.location, one.upstream): what.requests for one, what in report.places.items()} == {
        ("h1", "/", ""): PLAIN,
        ("h1", REGEX, ""): MISSING,
        ("h2", "/kept", ""): CACHED,
        ("h2", "/failing", "dead"): FAILED,
    }
    failing = report.places[TrafficPlace(host="h2", location="/failing", upstream="dead")]
    assert (failing.upstream_failures, figures(failing).status_codes["5xx"]) == (FAILED, FAILED)
    assert report.places[TrafficPlace(host="h2", location="/kept", upstream="")].cache_hits == CACHED - 1
    assert told.status_codes == {
        "other": 0,
        "1xx": 0,
        "2xx": PLAIN + CACHED,
        "3xx": 0,
        "4xx": MISSING,
        "5xx": FAILED,
    }
    assert told.out_bytes == sum(int(one.bytes_sent) for one in requests)
    assert told.in_bytes == sum(int(one.request_length) for one in requests)
    assert (told.cache_hits, told.cache_lookups) == (CACHED - 1, CACHED)
    assert told.upstream_failures == FAILED
    assert report.total.paths.counts["/p0"] == PLAIN // 4
    assert report.total.agents.counts["known"] == PLAIN
    ordered = sorted(float(one.request_time) * 1000 for one in requests)
    for name, share in PERCENTILES.items():
        exact = ordered[int(share * (TOTAL - 1))]
        assert abs(told.latency_ms[name] - exact) <= ERROR * exact + 0.001, name
