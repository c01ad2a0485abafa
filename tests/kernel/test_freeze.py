from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.kernel import audit
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.freeze import FREEZE, Freeze, FreezeSpec, freeze, frozen, lift, sweep
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

NOW = 1000
ACME = "tenant/acme"
WEB = "tenant/acme/group/web"


def made(scope: str, expires_at_ns: int | None = None) -> Freeze:
    return Freeze(
        kind="freeze", scope=scope, name="freeze", uid="u", labels={}, status=None, conditions=(),
        revision=1, created_revision=1, generation=1, created_at_ns=0, updated_at_ns=0,
        spec=FreezeSpec(reason="r", actor="a", frozen_at_ns=0, expires_at_ns=expires_at_ns),
    )  # fmt: skip


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
