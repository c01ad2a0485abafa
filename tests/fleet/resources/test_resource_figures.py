"""Figures in the resource API: latest and over time, and who is told that there are new ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fleet.resources_rig import ResourcesRig, resources_rig, watched

from fleetplane.domains.blueprint import Kernel
from fleetplane.domains.instances import figures as of_instances
from fleetplane.domains.instances.kinds import INSTANCE, InstanceSpec, InstanceStatus
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.fleet.figures import FigureKeeper
from fleetplane.fleet.resources import watching
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.telemetry import Point, Telemetry

VIEWER = "instances.viewer"
BESIDE = "/tenants/acme/groups/web"


@asynccontextmanager
async def measured_rig(folder: Path) -> AsyncIterator[tuple[ResourcesRig, FigureKeeper, Telemetry]]:
    """Instance `a1` of acme and `b1` of rival, each with a tenant of its own."""
    async with Telemetry.open(folder / "telemetry.db", SystemClock()) as telemetry:
        keeper = FigureKeeper(
            telemetry, SystemClock(), prefix=of_instances.PREFIX, measures=of_instances.MEASURES
        )

        def running(kernel: Kernel) -> dict[str, Any]:
            groups = SimpleNamespace(loaded=None, views=dict, configuration=None)
            return {"instances": SimpleNamespace(groups=groups, store=kernel.store, figures=keeper)}

        async with resources_rig(folder, (INSTANCES,), running=running, telemetry=telemetry) as rig:
            for tenant, name in (("acme", "a1"), ("rival", "b1")):
                spec = InstanceSpec(cluster="c", shard="s", group="web", template="t", prefix="wkr")
                await rig.put(INSTANCE, f"tenant/{tenant}", name, spec=spec, status=InstanceStatus())
            yield rig, keeper, telemetry


async def test_figures_of_an_object_over_time_are_read_by_those_who_may_read_it(tmp_path: Path) -> None:
    async with measured_rig(tmp_path) as (rig, keeper, telemetry):
        ours = await rig.token("ours", VIEWER, tenant="acme")
        keeper.take("tenant/acme", "a1", {"cpuPercent": 12.5, "memoryPercent": 40.0})
        keeper.take("tenant/rival", "b1", {"cpuPercent": 99.0})
        await telemetry.flush()
        found = (await rig.get("/instances/a1/figures", ours, scope=BESIDE, step=60)).json()
        assert (found["kind"], found["name"], found["scope"]) == ("figure-history", "a1", BESIDE)
        assert found["stepSeconds"] == 60
        cpu, memory = found["series"]
        assert (cpu["name"], cpu["title"], cpu["unit"], cpu["full"], cpu["high"]) == (
            "cpuPercent",
            "Processor",
            "%",
            100.0,
            90.0,
        )
        [point] = cpu["points"]
        assert (point["average"], point["lowest"], point["highest"]) == (12.5, 12.5, 12.5)
        assert found["since"] <= point["at"] <= found["until"]
        assert memory["name"] == "memoryPercent"

        latest = (await rig.get("/figures/instances", ours, scope="/tenants/acme")).json()["items"]
        assert [(one["name"], one["values"]["cpuPercent"]) for one in latest] == [("a1", 12.5)]
        for path in ("/instances/b1/figures", "/instances/nobody/figures"):
            hidden = await rig.get(path, ours, scope="/tenants/acme")
            assert hidden.status_code == 404, hidden.text
        elsewhere = await rig.get("/instances/b1/figures", ours, scope="/tenants/rival")
        assert elsewhere.status_code == 404, "not even that there is such a tenant"
        assert (await rig.get("/instances/a1/figures", "")).status_code == 401
        assert (await rig.get("/groups/web/figures", ours)).status_code == 404, "groups have none"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"from": "yesterday"}, "from"),
        ({"to": "2026-01-01"}, "to"),
        ({"from": "2026-01-02T00:00:00Z", "to": "2026-01-01T00:00:00Z"}, "from"),
        ({"step": "0"}, "step"),
        ({"step": "1e3"}, "step"),
        ({"from": "1970-01-01T00:00:00Z", "step": "1"}, "step"),
        ({"series": "cpuPercent"}, "series"),
    ],
)
async def test_a_stretch_that_makes_no_sense_is_refused_with_its_field(
    tmp_path: Path, query: dict[str, str], field: str
) -> None:
    async with measured_rig(tmp_path) as (rig, _, _):
        answer = await rig.get("/instances/a1/figures", await rig.token("v", VIEWER), **query)
        assert (answer.status_code, answer.json()["field"]) == (400, field), answer.text


async def test_who_may_not_read_it_is_not_told_that_something_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("IDLE_SECONDS", "MEASURED_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(watching, name, 0.02)
    async with measured_rig(tmp_path) as (rig, keeper, telemetry):
        ours = await rig.token("ours", VIEWER, tenant="acme")
        theirs = await rig.token("theirs", VIEWER, tenant="rival")
        everybody = await rig.token("everybody", VIEWER)
        async with (
            watched(rig, ours, of="instances", measured="1") as acme,
            watched(rig, theirs, of="instances", measured="1") as rival,
            watched(rig, everybody, of="instances", measured="1") as whole,
            watched(rig, everybody, of="instances@/tenants/acme", measured="1") as part,
        ):
            for one in (acme, rival, whole, part):
                await one.until("bookmark")
            keeper.take("tenant/rival", "b1", {"cpuPercent": 1.0})
            at_ns = SystemClock().now_ns()
            stranger = Point(scope="tenant/acme", series="x", source="gone", at_ns=at_ns, value=1.0)
            telemetry.offer(points=[stranger])
            assert (await rival.next())[0] == "measured"
            assert (await whole.next())[0] == "measured"
            # A change comes after what was measured before it: whoever was told nothing is told this first.
            spec = InstanceSpec(cluster="c", shard="s", group="web", template="t", prefix="wkr")
            await rig.put(INSTANCE, "tenant/acme", "a2", spec=spec, status=InstanceStatus())
            assert (await acme.next())[0] == "added"
            assert (await part.next())[0] == "added"
            keeper.take("tenant/acme", "a1", {"cpuPercent": 1.0})
            assert [await _next_word(one) for one in (acme, part)] == ["measured", "measured"]


async def _next_word(reader: Any) -> str:
    """The type of the next event that is no bookmark."""
    while (word := str((await reader.next())[0])) == "bookmark":
        pass
    return word
