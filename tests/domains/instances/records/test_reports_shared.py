"""The last reports of instances where several servers share a database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.kinds import KINDS, REPORT, HealthReport, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import SCOPE, InstanceReports
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

SPEC = InstanceSpec(cluster="c", shard="s", group="g", template="t", prefix="wkr")


@asynccontextmanager
async def shared(tmp_path: Path) -> AsyncIterator[tuple[Store, VirtualClock]]:
    """A store that says that others write as well, with one instance."""
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KINDS, clock=clock) as store:
        store.shared = True
        await Instances(store).record("acme", "wkr1", SPEC, InstanceStatus())
        yield store, clock


async def written(reports: InstanceReports, *found: HealthReport) -> None:
    for report in found:
        reports.take(report)
    await reports._writer.flush()


async def test_a_report_to_one_server_is_known_to_the_others(tmp_path: Path) -> None:
    async with shared(tmp_path) as (store, clock):
        here, there = InstanceReports(clock, store), InstanceReports(clock, store)
        await written(
            here, HealthReport(instance="wkr1", config_hash="h", files={"a": ""}, connections={80: 3})
        )
        heard = there.last("wkr1")
        assert heard is not None
        assert (heard.report.config_hash, heard.report.connections) == ("h", {80: 3})
        await clock.advance(5)
        await written(there, HealthReport(instance="wkr1", config_hash="i"))
        newest = here.last("wkr1")
        assert newest is not None
        assert newest.report.config_hash == "i"


async def test_an_older_report_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    async with shared(tmp_path) as (store, clock):
        late, there = InstanceReports(clock, store), InstanceReports(clock, store)
        late.take(HealthReport(instance="wkr1", config_hash="old"))
        await clock.advance(5)
        await written(there, HealthReport(instance="wkr1", config_hash="new"))
        await late._writer.flush()
        found = store.get(REPORT, SCOPE, "wkr1")
        assert found is not None
        assert found.spec.report.config_hash == "new"


async def test_who_becomes_active_gives_everyone_the_time_it_has_itself(tmp_path: Path) -> None:
    async with shared(tmp_path) as (store, clock):
        await written(InstanceReports(clock, store), HealthReport(instance="wkr1"))
        await clock.advance(3600)
        successor = InstanceReports(clock, store)
        assert successor.heard_at_ns("wkr1", 1) == clock.now_ns()


async def test_a_report_goes_with_its_instance(tmp_path: Path) -> None:
    async with shared(tmp_path) as (store, clock):
        reports = InstanceReports(clock, store)
        await written(reports, HealthReport(instance="wkr1"), HealthReport(instance="unknown"))
        assert [one.name for one in store.list(REPORT)] == ["wkr1"]
        await Instances(store).purge("acme", "wkr1")
        await written(reports, HealthReport(instance="wkr1"))
        assert not store.list(REPORT)


@pytest.mark.parametrize("poison", ["files", "hash", "modified", "deadline", "counters"])
async def test_no_report_keeps_those_of_other_tenants_from_being_written(poison: str, tmp_path: Path) -> None:
    said = agent_pb2.HealthReportRequest(instance_id="wkr1")
    said.files["a.crt"].last_modified.seconds = 1
    match poison:
        case "files":
            for number in range(200):
                said.files[f"{number}" + "n" * 8000].error = "e"
        case "hash":
            said.config_hash = "h" * 2_000_000
        case "modified":
            said.files["a.crt"].last_modified.FromJsonString("9999-12-31T00:00:00Z")
        case "deadline":
            said.termination_notice.deadline.FromJsonString("9999-12-31T00:00:00Z")
        case "counters":
            interface = said.metrics.network_interface
            interface.rx_bytes = interface.tx_bytes = interface.rx_drops = interface.tx_drops = 2**64 - 1
    async with shared(tmp_path) as (store, clock):
        await Instances(store).record("umbrella", "wkr2", SPEC, InstanceStatus())
        reports = InstanceReports(clock, store)
        with suppress(InvalidArgument):  # refused before it is taken, or taken and written
            reports.take(wire.health_report(said.SerializeToString()))
        await written(reports, HealthReport(instance="wkr2"))
        assert "wkr2" in {one.name for one in store.list(REPORT)}


async def test_each_report_is_told_with_the_one_before_it(tmp_path: Path) -> None:
    told: list[tuple[str | None, str]] = []
    more = asyncio.Event()

    def tell(before: HealthReport | None, report: HealthReport) -> None:
        told.append((before.config_hash if before is not None else None, report.config_hash))
        more.set()

    async with shared(tmp_path) as (store, clock):
        reports = InstanceReports(clock, store)
        following = asyncio.create_task(reports.follow(tell))
        await asyncio.sleep(0)
        for config_hash in ("a", "b"):
            await clock.advance(1)
            more.clear()
            await written(reports, HealthReport(instance="wkr1", config_hash=config_hash))
            async with asyncio.timeout(60):
                await more.wait()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert told == [(None, "a"), ("a", "b")]
