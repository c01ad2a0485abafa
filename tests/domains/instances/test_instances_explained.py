"""Groups and instances through the one explain route: each tenant's own, and no other's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from support.instances.instances_lab import TENANT
from support.instances.instances_web_rig import OTHER, Web, web

from fleetplane.domains.blueprint import prepare_both
from fleetplane.domains.fleetwide import FleetwideDomain
from fleetplane.domains.instances.server import BLUEPRINT
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import freeze
from fleetplane.web.ops import OpsApp

PREFIX = "/v1/fleet/explain/instances"
Ask = Callable[..., Any]


@asynccontextmanager
async def explained(site: Web) -> AsyncIterator[tuple[FleetwideDomain, httpx.AsyncClient]]:
    fleetwide = FleetwideDomain(site.lab.kernel, [(BLUEPRINT, site.lab.domain)], version="0")
    await prepare_both(fleetwide)
    front = OpsApp(CollectorRegistry(), version="0")
    front.mount(fleetwide.routes)
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield fleetwide, http


def codes(told: Any) -> set[str]:
    return {one["code"] for finding in told["findings"] for one in finding["reasons"]}


async def test_a_tenant_is_told_of_its_own_group_and_instance_and_of_no_others(tmp_path: Path) -> None:
    async with web(tmp_path) as site, explained(site) as (_, http):
        mine, theirs = (await site.provisioned(1))[0], (await site.provisioned(1, tenant=OTHER))[0]
        ada = (await site.viewer()).headers
        found = (await http.get(f"{PREFIX}/instance/{mine.name}", headers=ada)).json()
        assert found["scope"] == f"tenant/{TENANT}/group/workers"
        assert "HEALTH_STARTING" in codes(found)
        assert (await http.get(f"{PREFIX}/group/workers", headers=ada)).json()["scope"] == (
            f"tenant/{TENANT}/group/workers"
        )
        anothers = await http.get(f"{PREFIX}/instance/{theirs.name}", headers=ada)
        nobodys = await http.get(f"{PREFIX}/instance/nobody", headers=ada)
        assert (anothers.status_code, nobodys.status_code) == (404, 404)
        assert anothers.json()["error"]["message"] == (
            nobodys.json()["error"]["message"].replace("nobody", theirs.name)
        )
        for path in ("group/workers", f"instance/{theirs.name}"):
            refused = await http.get(f"{PREFIX}/{path}", headers=ada, params={"scope": f"tenant/{OTHER}"})
            assert refused.status_code == 403


async def test_a_group_of_the_same_name_in_two_tenants_has_to_be_told_apart(tmp_path: Path) -> None:
    async with web(tmp_path) as site, explained(site) as (fleetwide, http):
        everyone = (await site.viewer("root", tenant="")).headers
        answer = await http.get(f"{PREFIX}/group/workers", headers=everyone)
        assert (answer.status_code, answer.json()["error"]["details"][0]["field"]) == (422, "scope")
        named = await http.get(
            f"{PREFIX}/group/workers", headers=everyone, params={"scope": f"tenant/{OTHER}"}
        )
        assert named.json()["scope"] == f"tenant/{OTHER}/group/workers"
        owner = fleetwide.explanations
        assert owner.for_owner("instances", "group", f"{TENANT}/workers").scope == (
            f"tenant/{TENANT}/group/workers"
        )
        with pytest.raises(InvalidArgument):
            owner.for_owner("instances", "group", "workers")


async def test_a_frozen_group_says_so_in_the_words_of_its_controller(tmp_path: Path) -> None:
    async with web(tmp_path) as site, explained(site) as (_, http):
        ada = (await site.viewer()).headers
        await freeze(site.lab.kernel.store, f"tenant/{TENANT}", reason="audit week", actor="grace")

        async def told() -> Any:
            return (await http.get(f"{PREFIX}/group/workers", headers=ada)).json()

        async with asyncio.timeout(60):
            while "FROZEN" not in codes(found := await told()):
                await asyncio.sleep(0.01)
        assert found["frozen"]["reason"] == "audit week"
        bob = (await site.viewer("bob", tenant=OTHER)).headers
        other = (await http.get(f"{PREFIX}/group/workers", headers=bob)).json()
        assert other["frozen"] is None
        assert "FROZEN" not in codes(other)
