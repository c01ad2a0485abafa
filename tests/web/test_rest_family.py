"""What every REST family has, shown with a family of two routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from fleetplane.kernel.access import Grant, Permission, Principal, Role
from fleetplane.kernel.errors import SettingsError, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock
from fleetplane.web.ops import OpsApp
from fleetplane.web.rest.family import SWEEP_SECONDS, FamilyText, RestFamily
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.routes import Answer, Call, Headers, Route, RouteTable

READ = Permission("things.read")
READER = Role("reader")
TEXT = FamilyText(title="Things", version="7", description="Some.", summary="REST: things")


class Thing(msgspec.Struct, frozen=True, kw_only=True):
    number: int


class Floor:
    def __init__(self, store: Store, clock: VirtualClock) -> None:
        self.store = store
        self.clock = clock
        self.master = MasterKey(bytes(32), clock)


class Things:
    """Counts how often a thing was made."""

    def __init__(self) -> None:
        self.made = 0

    async def make(self, _call: Call[Any]) -> Answer[Thing]:
        self.made += 1
        return Answer(content=Thing(number=self.made))


def who(headers: Headers) -> OperatorCaller:
    authorization = headers.credential
    if authorization is None:
        raise Unauthenticated("a token is required")
    name, _, scope = authorization.partition("@")
    return OperatorCaller(principal=Principal(name=name, roles=frozenset({Role(name)}), scope=scope))


def shown(authorization: str) -> Headers:
    return Headers({b"authorization": authorization.encode()})


def gate(scope: str | None = None) -> RoleGate[OperatorCaller]:
    return RoleGate(who, {READER: (Grant(permission=READ),)}, scope=scope)


@asynccontextmanager
async def family(folder: Path, **how: Any) -> AsyncIterator[tuple[RestFamily[OperatorCaller], Things]]:
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=folder / "f.db"), kinds=(), clock=clock) as store:
        things = Things()
        route = Route(
            method="POST",
            path="/things",
            handler=things.make,
            summary="Make",
            tag="T",
            permission=READ,
            answer=Thing,
        )
        made = RestFamily(
            Floor(store, clock), RouteTable("/v1/t", (route,)), gate(), domain="things", text=TEXT, **how
        )
        await made.take_over()
        yield made, things


@asynccontextmanager
async def client(of: RestFamily[Any]) -> AsyncIterator[httpx.AsyncClient]:
    front = OpsApp(CollectorRegistry(), version="0")
    front.mount(of.mounts)
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


async def test_a_family_serves_its_routes_once_by_key_and_to_those_who_may(tmp_path: Path) -> None:
    async with family(tmp_path) as (of, things), client(of) as http:
        reader = {"authorization": "reader", "idempotency-key": "k"}
        first = await http.post("/v1/t/things", headers=reader)
        again = await http.post("/v1/t/things", headers=reader)
        refused = await http.post("/v1/t/things", headers={"authorization": "stranger"})
        nobody = await http.post("/v1/t/things")

        assert (first.content, again.content, things.made) == (b'{"number":1}', b'{"number":1}', 1)
        assert (refused.status_code, nobody.status_code) == (403, 401)


async def test_a_family_describes_itself_beside_its_routes(tmp_path: Path) -> None:
    async with family(tmp_path) as (of, _), client(of) as http:
        document = (await http.get("/v1/t/openapi.json")).json()
        assert document["info"] == {"title": "Things", "version": "7", "description": "Some."}
        assert list(document["paths"]) == ["/things"]
        assert [mount.summary for mount in of.mounts] == ["REST: things", ""]

        registry = CollectorRegistry()
        for collector in of.collectors:
            registry.register(collector)
        await http.post("/v1/t/things")
        told = registry.get_sample_value(
            "fleetplane_web_answers_total", {"domain": "things", "status": "4xx"}
        )
        assert told == 1


async def test_a_family_sweeps_at_the_start_and_every_hour(tmp_path: Path) -> None:
    swept = 0

    async def sweep() -> None:
        nonlocal swept
        swept += 1

    async with family(tmp_path, sweeps=(sweep,)) as (of, _):
        clock = of._clock
        assert isinstance(clock, VirtualClock)
        running = asyncio.ensure_future(of.run_active())
        while swept < 1:
            await asyncio.sleep(0)
        while not clock.sleepers:
            await asyncio.sleep(0)
        await clock.advance(SWEEP_SECONDS)
        while swept < 2:
            await asyncio.sleep(0)
        running.cancel()


def test_a_gate_asks_in_its_scope_or_in_the_callers_own() -> None:
    of_tenant = who(shown("reader@tenant/acme"))
    assert of_tenant.tenant == "acme"
    assert who(shown("reader")).tenant == ""
    assert gate().admit(of_tenant, READ, {}) == "tenant/acme"
    assert gate("fleet").admit(who(shown("reader")), READ, {}) == "fleet"
    assert not gate("fleet").may(of_tenant, READ), "a tenant's token opens nothing outside its tenant"
    assert not gate().may(who(shown("stranger")), READ)


def test_a_gate_refuses_permissions_that_no_role_grants() -> None:
    gate().require_complete({READ})
    with pytest.raises(SettingsError, match=r"things\.write"):
        gate().require_complete({Permission("things.write")})
