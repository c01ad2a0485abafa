"""Figures of objects: what is taken, what is refused, and what is read again."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fleetplane.domains.instances import figures as of_instances
from fleetplane.domains.instances.kinds import HealthReport
from fleetplane.domains.instances.records.reports import ReceivedReport
from fleetplane.fleet import figures as module
from fleetplane.fleet.figures import CPU, MEMORY, FigureKeeper, Measure, Stretch
from fleetplane.fleet.resources.common import NoStatus, made_up
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.values.times import NS
from fleetplane.sim.clock import VirtualClock

THING: Kind[NoStatus, NoStatus] = Kind("thing", NoStatus, NoStatus)
MEASURES = (CPU, MEMORY, Measure(name="celsius", title="T", unit="°C", most=200, least=-50))


def thing(name: str, scope: str = "tenant/acme") -> AnyResource:
    return made_up(THING, name, spec=NoStatus(), scope=scope)


@asynccontextmanager
async def kept(folder: Path) -> AsyncIterator[tuple[FigureKeeper, Telemetry, VirtualClock]]:
    clock = VirtualClock()
    async with Telemetry.open(folder / "telemetry.db", clock) as telemetry:
        yield FigureKeeper(telemetry, clock, prefix="things", measures=MEASURES), telemetry, clock


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpuPercent", math.nan),
        ("cpuPercent", math.inf),
        ("cpuPercent", -math.inf),
        ("cpuPercent", -0.1),
        ("cpuPercent", 100.1),
        ("celsius", -51.0),
        ("celsius", 1e300),
        ("rmMinusRf", 1.0),
        ("", 1.0),
    ],
)
def test_a_value_that_cannot_be_or_that_nobody_asked_for_is_not_taken(name: str, value: float) -> None:
    keeper = FigureKeeper(None, VirtualClock(), prefix="things", measures=MEASURES)
    keeper.take("tenant/acme", "a", {name: value})
    assert keeper.latest([thing("a")]) == {}
    assert keeper.refused == 1
    keeper.take("tenant/acme", "a", {name: value, "memoryPercent": 0.0, "cpuPercent": None})
    assert keeper.latest([thing("a")])["a"].values == {"memoryPercent": 0.0}


async def test_figures_are_read_again_over_time_by_object(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, telemetry, clock):
        begun = clock.now_ns()
        for value in (10.0, 30.0):
            keeper.take("tenant/acme", "a", {"cpuPercent": value})
            keeper.take("tenant/other", "a", {"cpuPercent": 90.0})
            await clock.advance(10)
        await telemetry.flush()
        stretch = Stretch(from_ns=begun, to_ns=begun + 60 * NS, step_seconds=60)
        [series] = await keeper.history(thing("a"), stretch)
        assert series.measure is CPU
        assert [(one.average, one.lowest, one.highest) for one in series.buckets] == [(20.0, 10.0, 30.0)]
        assert await keeper.history(thing("b"), stretch) == []
        other = FigureKeeper(telemetry, clock, prefix="others", measures=MEASURES)
        assert await other.history(thing("a"), stretch) == [], "of another kind with the same scope and name"


async def test_the_latest_are_those_of_the_object_and_do_not_last(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _, clock):
        keeper.take("tenant/acme", "a", {"cpuPercent": 1.0})
        keeper.take("tenant/other", "a", {"cpuPercent": 2.0})
        assert keeper.latest([thing("a")])["a"].values == {"cpuPercent": 1.0}
        assert keeper.latest([thing("a", "tenant/other")])["a"].values == {"cpuPercent": 2.0}
        assert keeper.latest([thing("a", "tenant/third")]) == {}
        await clock.advance(module.FRESH_NS / NS + 1)
        assert keeper.latest([thing("a")]) == {}
        keeper.take("tenant/acme", "b", {"cpuPercent": 1.0})
        assert len(keeper._latest) == 1, "those that fell silent are forgotten"


async def test_an_agent_that_reports_without_pause_fills_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept(tmp_path) as (keeper, telemetry, clock):
        for _ in range(100):
            keeper.take("tenant/acme", "a", {"cpuPercent": 1.0})
            await clock.advance(0.1)
        await telemetry.flush()
        assert telemetry.statistics().written == math.ceil(10 * NS / module.EVERY_NS)
        monkeypatch.setattr(module, "OBJECTS_LIMIT", 10)
        for number in range(100):
            keeper.take("tenant/acme", f"n{number}", {"cpuPercent": 1.0})
        assert len(keeper._latest) == 10


def test_a_report_of_an_instance_has_shares_and_rates() -> None:
    report = HealthReport(
        instance="i",
        cpu_usage=12.5,
        memory_usage=40.0,
        conntrack_percent=3.0,
        dropped_packets=11,
        received_bytes=5_000,
        sent_bytes=900,
    )
    then = ReceivedReport(
        at_ns=10 * NS,
        report=HealthReport(instance="i", dropped_packets=1, received_bytes=1_000, sent_bytes=1_000),
    )
    assert of_instances.figures(report, then, 20 * NS) == {
        "cpuPercent": 12.5,
        "memoryPercent": 40.0,
        "conntrackPercent": 3.0,
        "receivedBytesPerSecond": 400.0,
        "sentBytesPerSecond": None,  # the machine was restarted, and counts anew
        "droppedPacketsPerSecond": 1.0,
    }
    first = of_instances.figures(report, None, 20 * NS)
    assert first["receivedBytesPerSecond"] is None
    assert of_instances.figures(report, then, 10 * NS)["receivedBytesPerSecond"] is None, "at the same moment"
    assert first.keys() == {one.name for one in of_instances.MEASURES}
