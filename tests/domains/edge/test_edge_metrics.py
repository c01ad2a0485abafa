"""What Prometheus is told about daemons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from support.edge.edge_company import at_work
from support.edge.edge_site import a_tenant, site
from support.edge.edge_site import until as site_until
from support.edge.edge_streams_rig import Rig, streams_rig, until

from fleetplane.domains.edge.metrics import EdgeCollector
from fleetplane.domains.edge.runs.channel import EdgeRuns
from fleetplane.domains.edge.streams.call_encoding import OTHER, TOOLS_LIMIT, Tallies, reason_of
from fleetplane.fleet.runs.records import RunState, TargetOutcome


def registry_of(rig: Rig) -> CollectorRegistry:
    runs = cast("EdgeRuns", SimpleNamespace(ended=Counter({RunState.HALTED: 2})))
    registry = CollectorRegistry()
    registry.register(EdgeCollector(rig.store, streams=rig.side, runs=runs, tallies=Tallies()))
    return registry


async def test_daemons_heartbeats_and_refusals_are_counted(tmp_path: Path) -> None:
    async with streams_rig(tmp_path) as rig:
        registry = registry_of(rig)

        def value(name: str, **labels: str) -> float:
            found = registry.get_sample_value(f"fleetplane_edge_{name}", labels)
            assert found is not None, name
            return found

        daemon, liar = await rig.daemon(), await rig.daemon()
        await daemon.open()
        await until(lambda: value("daemons", state="connected") == 1)
        for _ in range(3):
            await daemon.beat()
        await until(lambda: value("heartbeats_total") == 3)

        assert (await liar.refusal(token="a.b.c"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert value("events_refused_total", cause="token") == 1
        assert value("daemons", state="disconnected") == 1
        assert value("fleet_runs_total", outcome="halted") == 2
        assert value("commands_open") == 0

        daemon.leave()
        await until(lambda: value("stream_seconds_total") > 0)
        assert value("heartbeats_total") == 3


async def test_commands_are_counted_by_tool_outcome_and_reason(tmp_path: Path) -> None:
    with site(tmp_path / "data") as here:
        async with here.rest(a_tenant()) as rest, at_work(here, rest) as daemon:
            away = await here.shipped(rest)
            await rest.do(f"@{daemon.node_id}", script="true")
            await rest.do(f"@{daemon.node_id}", script="exit 3")
            await rest.do(f"@{daemon.node_id}", tool="fs.read", args={"path": "/etc/hosts"})
            await rest.do("all", script="true")
            assert away.node_id
        wanted = {
            ("cmd.run", "ok", ""): 2.0,
            ("cmd.run", "err", "nonzero_exit"): 1.0,
            ("fs.read", "err", "tool_not_locally_supported"): 1.0,
        }
        async with httpx.AsyncClient(base_url=here.server.web, timeout=60) as anyone:

            async def counted() -> str:
                told = (await anyone.get("/metrics")).text
                return told if _commands(told) == wanted else ""

            told = await site_until(counted)
    assert 'fleetplane_edge_targets_skipped_total{reason="Disconnected"} 1.0' in told


def _commands(told: str) -> dict[tuple[str, str, str], float]:
    return {
        (sample.labels["tool"], sample.labels["outcome"], sample.labels["reason"]): sample.value
        for family in text_string_to_metric_families(told)
        for sample in family.samples
        if sample.name == "fleetplane_edge_commands_total"
    }


def test_words_that_others_choose_get_a_bounded_number_of_counts() -> None:
    tallies = Tallies()
    names = {tallies._tool(f"tool.{number}") for number in range(10 * TOOLS_LIMIT)}
    assert len(names) == TOOLS_LIMIT + 1
    assert OTHER in names
    assert tallies._tool("tool.0") == "tool.0"
    assert reason_of(TargetOutcome.ERR, "whatever a daemon says") == OTHER
    assert reason_of(TargetOutcome.OK, "") == ""
