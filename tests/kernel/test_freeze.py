from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import FREEZE, Freeze, FreezeSpec, freeze, frozen, lift, sweep
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

NOW = 1000
ACME = "tenant/acme"
WEB = "tenant/acme/group/web"


def made(scope: str, expires_at_ns: int | None = None) -> Freeze:
    return Freeze(
        kind="freeze",
        scope=scope,
        name="freeze",
        uid="u",
        labels={},
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
        spec=FreezeSpec(reason="r", actor="a", frozen_at_ns=0, expires_at_ns=expires_at_ns),
    )


@pytest.mark.parametrize(
    ("freezes", "scope", "by"),
    [
        ([], WEB, None),
        ([made("")], WEB, ""),
        ([made("")], "", ""),
        ([made(ACME)], WEB, ACME),
        ([made(ACME)], ACME, ACME),
        ([made(ACME)], "tenant/acme2", None),
        ([made(ACME)], "", None),
        ([made(WEB)], ACME, None),
        ([made(WEB)], "tenant/acme/group/db", None),
        ([made(WEB), made("")], WEB, ""),
        ([made(WEB, NOW)], WEB, None),
        ([made(WEB, NOW + 1)], WEB, WEB),
        ([made("", NOW), made(WEB)], WEB, WEB),
    ],
)
def test_a_freeze_holds_at_and_below_its_scope_until_it_ends(
    freezes: list[Freeze], scope: str, by: str | None
) -> None:
    found = frozen(freezes, scope, NOW)

    assert (found.scope if found else None) == by


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(FREEZE,), clock=clock) as opened:
        yield opened


async def test_setting_and_lifting_are_durable_and_audited(store: Store, clock: VirtualClock) -> None:
    await freeze(store, ACME, reason="migration", actor="alice")
    held = frozen(store.list(FREEZE), WEB, clock.now_ns())
    assert held is not None
    assert (held.spec.reason, held.spec.actor) == ("migration", "alice")

    assert await lift(store, ACME, actor="bob") is True
    assert await lift(store, ACME, actor="bob") is False
    assert frozen(store.list(FREEZE), WEB, clock.now_ns()) is None
    entries = [audit.read(row) async for row in store.audit()]
    assert [(entry.actor, entry.action) for entry in entries] == [
        ("alice", "freeze.set"),
        ("bob", "freeze.lift"),
    ]


async def test_freezing_again_replaces_reason_and_end(store: Store, clock: VirtualClock) -> None:
    await freeze(store, reason="one", actor="a", expires_at_ns=clock.now_ns() + 1)
    await freeze(store, reason="two", actor="b")

    (only,) = store.list(FREEZE)
    assert (only.spec.reason, only.spec.actor, only.spec.expires_at_ns) == ("two", "b", None)


async def test_a_freeze_ends_by_itself(store: Store, clock: VirtualClock) -> None:
    await freeze(store, reason="short", actor="a", expires_at_ns=clock.now_ns() + 60 * 10**9)
    await freeze(store, ACME, reason="long", actor="a")
    await clock.advance(59)
    assert await sweep(store, clock.now_ns()) == 0
    assert frozen(store.list(FREEZE), "tenant/other", clock.now_ns()) is not None
    await clock.advance(1)

    assert frozen(store.list(FREEZE), "tenant/other", clock.now_ns()) is None
    assert await sweep(store, clock.now_ns()) == 1
    assert [found.scope for found in store.list(FREEZE)] == [ACME]


async def test_a_freeze_needs_a_reason_and_an_end_to_come(store: Store, clock: VirtualClock) -> None:
    with pytest.raises(InvalidArgument):
        await freeze(store, reason="", actor="a")
    with pytest.raises(InvalidArgument, match="before it begins"):
        await freeze(store, reason="r", actor="a", expires_at_ns=clock.now_ns())


# Whose controllers.


def test_a_record_of_before_freezes_named_domains_holds_for_instances_alone() -> None:
    old = msgspec.msgpack.encode({"reason": "r", "actor": "a", "frozen_at_ns": 5, "expires_at_ns": None})
    spec = msgspec.msgpack.decode(old, type=FreezeSpec)
    stored = msgspec.structs.replace(made(""), spec=spec)

    assert spec.domains == ("instances",)
    assert frozen([stored], WEB, NOW) is stored
    assert frozen([stored], WEB, NOW, domain="edge") is None


async def test_a_freeze_stops_the_domains_that_it_names_and_each_is_lifted_by_itself(
    store: Store, clock: VirtualClock
) -> None:
    def held(domain: str) -> str | None:
        found = frozen(store.list(FREEZE), WEB, clock.now_ns(), domain=domain)
        return found.spec.reason if found is not None else None

    await freeze(store, ACME, reason="by itself", actor="a")
    await freeze(store, ACME, reason="both", actor="a", domains=("edge", "boards"))
    assert [held(one) for one in ("instances", "edge", "boards", "proxies")] == [
        "by itself",
        "both",
        "both",
        None,
    ]

    await freeze(
        store, ACME, reason="all", actor="a", domains=("*", "edge"), expires_at_ns=clock.now_ns() + 9
    )
    assert held("proxies") == "all"
    assert held("edge") == "both", "of several at one scope, the one that lasts is told"

    assert await lift(store, ACME, actor="a", domains=("edge",))
    assert [held(one) for one in ("instances", "edge", "boards")] == ["by itself", "all", "both"]
    assert not await lift(store, ACME, actor="a", domains=("edge",))
    assert await lift(store, ACME, actor="a", domains=("*",))
    assert [held(one) for one in ("instances", "edge", "boards")] == ["by itself", None, "both"]


async def test_freezing_and_lifting_at_once_leaves_one_freeze_or_none(store: Store) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(freeze(store, ACME, reason=f"r{number}", actor="a", domains=("edge", "*")))
            tasks.create_task(lift(store, ACME, actor="b", domains=("edge",)))

    assert len([one for one in store.list(FREEZE) if one.spec.domains == ("edge",)]) <= 1
    assert len([one for one in store.list(FREEZE) if one.spec.domains == ("*",)]) == 1


async def test_a_freeze_of_no_domain_is_refused(store: Store) -> None:
    with pytest.raises(InvalidArgument, match="at least one domain"):
        await freeze(store, reason="r", actor="a", domains=())
    assert not store.list(FREEZE)
