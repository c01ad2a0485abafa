"""What has ended by itself is forgotten, every hour, whatever goes wrong meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from fleetplane.kernel.errors import StorageFull
from fleetplane.kernel.freeze import FREEZE, freeze
from fleetplane.kernel.identity import enrolment
from fleetplane.kernel.identity.revocation import REVOCATION, Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.server.housekeeping import FIRST_SECONDS, INTERVAL_SECONDS, Chore, chores, keep_house
from fleetplane.sim.clock import VirtualClock

DAY = 86_400


class Counted:
    """A chore that fails as often as it is told to."""

    def __init__(self, name: str, failures: int = 0) -> None:
        self.name = name
        self.failures = failures
        self.done = 0
        self.tried = 0

    async def sweep(self) -> int:
        self.tried += 1
        if self.tried <= self.failures:
            raise StorageFull("the disk is full")
        self.done += 1
        return 1

    @property
    def chore(self) -> Chore:
        return Chore(name=self.name, sweep=self.sweep)


@asynccontextmanager
async def keeping(clock: VirtualClock, *kept: Chore) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_house(kept, clock))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_every_chore_is_done_soon_after_the_start_and_then_every_hour() -> None:
    clock, one, other = VirtualClock(), Counted("one"), Counted("other")
    async with keeping(clock, one.chore, other.chore):
        await clock.advance(FIRST_SECONDS - 1)
        assert one.done == 0
        await clock.advance(1)
        assert (one.done, other.done) == (1, 1)
        await clock.advance(10 * INTERVAL_SECONDS)
        assert (one.done, other.done) == (11, 11)


async def test_a_chore_that_fails_is_tried_again_sooner_and_holds_up_no_other() -> None:
    clock, broken, sound = VirtualClock(), Counted("broken", failures=3), Counted("sound")
    with structlog.testing.capture_logs() as logged:
        async with keeping(clock, broken.chore, sound.chore):
            await clock.advance(FIRST_SECONDS + INTERVAL_SECONDS / 2)
            assert (broken.tried, broken.done) == (4, 1)
            assert sound.tried == 1
    failed = [entry for entry in logged if entry["event"] == "housekeeping.failed"]
    assert [entry["chore"] for entry in failed] == ["broken"] * 3
    assert failed[0]["retry_seconds"] < failed[1]["retry_seconds"] < failed[2]["retry_seconds"]
    assert {entry["error"] for entry in failed} == {"the disk is full"}


async def test_what_is_over_goes_and_what_holds_stays(tmp_path: Path) -> None:
    clock = VirtualClock()
    soon_ns = clock.now_ns() + 10 * 10**9
    settings = StoreSettings(path=tmp_path / "state.db")
    async with Store.open(settings, kinds=KERNEL_KINDS, clock=clock) as store:
        revocations = Revocations(store, clock)
        await revocations.revoke(serial=1, reason="lost", actor="test", expires_at_ns=soon_ns)
        await revocations.revoke(serial=2, reason="lost", actor="test")
        await freeze(store, "tenant/a", reason="update", actor="test", expires_at_ns=soon_ns)
        await freeze(store, "tenant/b", reason="update", actor="test")

        def redeemed(draft: Draft) -> None:
            for token, expires_at_ns in (("short", soon_ns), ("for-ever", enrolment.FOREVER)):
                enrolment.redeem(
                    draft, purpose="test", token_digest=token, key_digest="k", expires_at_ns=expires_at_ns
                )

        await store.transact(redeemed, actor="test", action="test", touches=())
        for _ in range(2):
            await clock.advance(DAY / 2)
        for chore in chores(store, clock):
            assert await chore.sweep() == 1, chore.name
            assert await chore.sweep() == 0, chore.name

        assert [found.spec.serial for found in store.list(REVOCATION)] == ["2"]
        assert [found.scope for found in store.list(FREEZE)] == ["tenant/b"]
        left = [claim.value for claim, _ in store.claims(enrolment.REDEMPTION)]
        assert left == ["for-ever"]
