"""What Prometheus is told about daemons."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
from edge_streams_rig import Rig, streams_rig, until
from prometheus_client import CollectorRegistry

from fleetplane.domains.edge.fleet import FleetRuns
from fleetplane.domains.edge.metrics import EdgeCollector
from fleetplane.domains.edge.runs import RunState


def registry_of(rig: Rig) -> CollectorRegistry:
    runs = cast("FleetRuns", SimpleNamespace(ended=Counter({RunState.HALTED: 2})))
    registry = CollectorRegistry()
    registry.register(EdgeCollector(rig.store, streams=rig.side, runs=runs))
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
        assert value("events_refused_total", cause="signature") == 0
        assert value("daemons", state="disconnected") == 1
        assert value("fleet_runs_total", outcome="halted") == 2
        assert value("commands_open") == 0

        daemon.leave()
        await until(lambda: value("stream_seconds_total") > 0)
        assert value("heartbeats_total") == 3
