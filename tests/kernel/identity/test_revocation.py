from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import revocation
from fleetplane.kernel.identity.revocation import REVOCATION, Revocations, Revoked
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

SERIAL = 2**159 + 7  # serials are up to 20 bytes
DEADLINE_SECONDS = 60.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    settings = StoreSettings(path=tmp_path / "s.db")
    async with Store.open(settings, kinds=(REVOCATION,), clock=clock) as opened:
        yield opened


@pytest.fixture
def revocations(store: Store, clock: VirtualClock) -> Revocations:
    return Revocations(store, clock)


async def test_a_revoked_certificate_is_refused_and_others_are_not(revocations: Revocations) -> None:
    revocations.check(serial=SERIAL, principal="agent/i-1")
    await revocations.revoke(serial=SERIAL, reason="key leaked", actor="alice")

    with pytest.raises(Unauthenticated, match="was revoked: key leaked") as refused:
        revocations.check(serial=SERIAL, principal="agent/i-1")
    assert refused.value.details["cause"] == "revoked"
    revocations.check(serial=SERIAL + 1, principal="agent/i-1")
    revocations.check()


async def test_a_revoked_principal_is_refused_whatever_it_presents(revocations: Revocations) -> None:
    await revocations.revoke(principal="agent/i-1", reason="stolen", actor="alice")

    for serial in (None, 1, 2):
        with pytest.raises(Unauthenticated, match="agent/i-1 was revoked"):
            revocations.check(serial=serial, principal="agent/i-1")
    revocations.check(serial=1, principal="agent/i-10")


async def test_a_revocation_outlives_a_restart_and_is_audited(tmp_path: Path, clock: VirtualClock) -> None:
    settings = StoreSettings(path=tmp_path / "restart.db")
    async with Store.open(settings, kinds=(REVOCATION,), clock=clock) as store:
        await Revocations(store, clock).revoke(serial=SERIAL, reason="r", actor="alice")
    async with Store.open(settings, kinds=(REVOCATION,), clock=clock) as store:
        with pytest.raises(Unauthenticated):
            Revocations(store, clock).check(serial=SERIAL)
        (entry,) = [audit.read(row) async for row in store.audit()]
    assert (entry.actor, entry.action) == ("alice", "identity.revoke")


async def test_subscribers_are_told_before_revoke_returns(revocations: Revocations) -> None:
    told: list[Revoked] = []
    stop = revocations.subscribe(told.append)
    await revocations.revoke(serial=SERIAL, reason="r", actor="a")
    assert told == [Revoked(serial=SERIAL, principal=None, reason="r")]

    await revocations.revoke(serial=SERIAL, reason="again", actor="b")
    assert told[1].reason == "r", "the first one stands"
    stop()
    await revocations.revoke(principal="p", reason="r", actor="a")
    assert len(told) == 2


async def test_a_revocation_made_elsewhere_is_told_too(store: Store, clock: VirtualClock) -> None:
    here, elsewhere = Revocations(store, clock), Revocations(store, clock)
    told = asyncio.Queue[Revoked]()
    here.subscribe(told.put_nowait)
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(here.run())
        await asyncio.sleep(0)
        await elsewhere.revoke(principal="agent/i-1", reason="r", actor="a")

        assert (await told.get()).principal == "agent/i-1"
        running.cancel()


async def test_a_lifted_revocation_no_longer_refuses(revocations: Revocations) -> None:
    await revocations.revoke(principal="p", reason="r", actor="a")

    assert await revocations.lift(principal="p", actor="a") is True
    assert await revocations.lift(principal="p", actor="a") is False
    revocations.check(principal="p")


async def test_what_has_ended_by_itself_is_purged(
    revocations: Revocations, store: Store, clock: VirtualClock
) -> None:
    ends = clock.now_ns() + 60 * 10**9
    for serial in range(1, revocation.SWEEP_BATCH + 3):
        await revocations.revoke(serial=serial, reason="r", actor="a", expires_at_ns=ends)
    await revocations.revoke(principal="p", reason="r", actor="a")
    assert await revocations.sweep() == 0
    await clock.advance(60)

    assert await revocations.sweep() == revocation.SWEEP_BATCH + 2
    assert [found.spec.principal for found in store.list(REVOCATION)] == ["p"]


@pytest.mark.parametrize(
    ("serial", "principal", "reason"),
    [(None, None, "r"), (1, "p", "r"), (None, "", "r"), (1, None, ""), (1, None, "r" * 1025)],
)
async def test_a_revocation_names_one_thing_and_a_reason(
    revocations: Revocations, serial: int | None, principal: str | None, reason: str
) -> None:
    with pytest.raises(InvalidArgument):
        await revocations.revoke(serial=serial, principal=principal, reason=reason, actor="a")


async def test_a_principal_is_revoked_and_accepted_again_within_someone_elses_transaction(
    store: Store, revocations: Revocations
) -> None:
    told: list[str | None] = []
    revocations.subscribe(lambda revoked: told.append(revoked.principal))
    key = revocation.revocation_key("edge/n-1")
    for _ in range(2):  # the second time changes nothing
        await store.transact(
            lambda draft: revocations.revoke_within(draft, "edge/n-1", reason="lost", actor="alice"),
            actor="alice",
            action="test",
            touches=[key],
        )
    assert told == []
    revocations.announce("edge/n-1")
    revocations.announce("edge/n-2")
    assert told == ["edge/n-1"]
    with pytest.raises(Unauthenticated):
        revocations.check(principal="edge/n-1")
    for _ in range(2):
        await store.transact(
            lambda draft: revocations.lift_within(draft, "edge/n-1"),
            actor="alice",
            action="test",
            touches=[key],
        )
    revocations.check(principal="edge/n-1")
