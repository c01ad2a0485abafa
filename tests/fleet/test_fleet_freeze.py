"""Freezes of every domain: what may be set, what holds, and who is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.fleet.freeze import Freezable, FreezeSwitch, message
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

FREEZABLE = {
    "edge": Freezable(stops="configuration", scopes=("tenant/{tenant}", "tenant/{tenant}/daemon/{daemon}")),
    "boards": Freezable(stops="pins", scopes=("boards", "boards/board/{number}")),
}
HOUR_NS = 3600 * 10**9


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def switch(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[FreezeSwitch]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(FREEZE,), clock=clock) as store:
        yield FreezeSwitch(store, clock, FREEZABLE)


async def stop(switch: FreezeSwitch, scope: str, *domains: str, ends_ns: int | None = None) -> None:
    await switch.freeze(scope, domains=domains, reason="audit", actor="ada", expires_at_ns=ends_ns)


async def test_a_freeze_holds_for_the_domain_at_and_below_its_scope_until_it_ends(
    switch: FreezeSwitch, clock: VirtualClock
) -> None:
    await stop(switch, "tenant/acme", "edge", ends_ns=clock.now_ns() + HOUR_NS)
    freezes = switch.freezes
    held = freezes.holding("edge", "tenant/acme/daemon/d1")

    assert held is not None
    assert message(held) == "frozen at tenant/acme by ada: audit"
    assert freezes.seconds_left(held, at_most=60.0) == 60.0
    assert freezes.seconds_left(held, at_most=86_400.0) == 3600.0
    assert freezes.holding("edge", "tenant/acme2") is None
    assert freezes.holding("boards", "tenant/acme") is None
    await clock.advance(3600)
    assert freezes.holding("edge", "tenant/acme") is None
    assert freezes.listed() == []


@pytest.mark.parametrize(
    ("scope", "domains", "field"),
    [
        ("", ["gpus"], "domains"),
        ("", ["x" * 100_000], "domains"),
        ("", [], "domains"),
        ("tenant/acme", ["boards"], "scope"),
        ("tenant/acme", ["edge", "boards"], "scope"),
        ("tenants/acme", ["*"], "scope"),
        ("tenant/", ["edge"], "scope"),
        ("tenant/a b", ["edge"], "scope"),
        ("tenant/../x", ["edge"], "scope"),
        ("boards/board/5/pin/3", ["boards"], "scope"),
        ("tenant/" + "x" * 2000, ["edge"], "scope"),
    ],
)
async def test_what_could_stop_nothing_is_refused_and_nothing_is_written(
    switch: FreezeSwitch, scope: str, domains: list[str], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await stop(switch, scope, *domains)

    assert refused.value.field == field
    assert switch.freezes.listed() == []


@pytest.mark.parametrize("ends_ns", [-HOUR_NS, 0, 11 * 365 * 24 * HOUR_NS])
async def test_a_freeze_ends_in_the_future_and_within_ten_years(
    switch: FreezeSwitch, clock: VirtualClock, ends_ns: int
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await stop(switch, "", "*", ends_ns=clock.now_ns() + ends_ns)

    assert refused.value.field == "expires_at"
    assert switch.freezes.listed() == []


async def test_a_freeze_of_everything_may_lie_wherever_one_domain_has_something(switch: FreezeSwitch) -> None:
    for scope in ("", "tenant/acme", "boards/board/5"):
        await stop(switch, scope, "*")

    assert switch.freezes.holding("a domain that comes later", "tenant/acme") is not None


async def test_what_concerns_a_scope_is_listed_from_above_and_below(switch: FreezeSwitch) -> None:
    for scope in ("tenant/acme", "tenant/acme/daemon/d1", "tenant/other"):
        await stop(switch, scope, "edge")
    await stop(switch, "", "*")

    listed = switch.freezes.listed("tenant/acme")
    assert sorted(one.scope for one in listed) == ["", "tenant/acme", "tenant/acme/daemon/d1"]


async def test_whoever_follows_is_told_of_each_freeze_and_each_lift(switch: FreezeSwitch) -> None:
    told: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(switch.freezes.follow(told.append))
        await asyncio.sleep(0)
        await stop(switch, "boards", "boards")
        await switch.lift("boards", domains=["boards"], actor="ada")
        async with asyncio.timeout(60):
            while not told:
                await asyncio.sleep(0.005)
        following.cancel()

    assert set(told) == {"boards"}


async def test_both_freezing_and_lifting_are_audited_with_who_did_it(switch: FreezeSwitch) -> None:
    await stop(switch, "", "*")
    assert await switch.lift("", domains=["*"], actor="grace")
    assert not await switch.lift("", domains=["*"], actor="grace")

    entries = [audit.read(row) async for row in switch.freezes._store.audit()]
    assert [(one.action, one.actor) for one in entries] == [("freeze.set", "ada"), ("freeze.lift", "grace")]
