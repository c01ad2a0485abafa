"""Rollouts that are begun or ordered while a server starts, or by somebody who leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.fleet.simulated_subject import SimulatedAgent, SimulatedSubject
from support.kernel.leaving import being_written

from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.records import KINDS, PolicySpec, status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

QUICK = Policy(waves=("rest",), soak_seconds=0.0, confirm_seconds=3600.0)
START = Start(subject="sim.version", scope="tenant/a", to="newest", policy=QUICK, actor="alice")
SECONDS = 60.0


class Site:
    def __init__(self, store: Store, clock: VirtualClock) -> None:
        self.store = store
        self.clock = clock
        subject = SimulatedSubject(self.clock, {f"agent-{at}": SimulatedAgent() for at in range(2)})
        self.rollouts = Rollouts(store, self.clock, [subject], Freezes(store, self.clock))
        self.rollouts.take_over()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.rollouts.run())
            yield
            task.cancel()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(SECONDS):
            while not is_so():
                await self.clock.advance(1.0)
                await asyncio.sleep(0.005)  # the disk's time is not the clock's: an hour of that is 18 s

    async def leaves(self, asking: asyncio.Task[object]) -> None:
        """Whoever asks goes away while what was asked for is being written."""
        await being_written(self.store)
        assert asking.cancel()

    def phases(self) -> list[RolloutPhase]:
        return [status_of(one).phase for one in self.rollouts.book.list()]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "fleetplane.db")
    async with Store.open(settings, kinds=(*KINDS, FREEZE, LEASE), clock=clock) as store:
        yield Site(store, clock)


async def test_a_rollout_goes_on_although_whoever_began_it_left(site: Site) -> None:
    async with site.running():
        await site.until(lambda: site.store.count(LEASE) == 2)
        await site.leaves(asyncio.create_task(site.rollouts.start(START)))
        await site.until(lambda: site.phases() == [RolloutPhase.DONE])


async def test_so_does_one_that_is_undone_by_somebody_who_left(site: Site) -> None:
    async with site.running():
        rollout = await site.rollouts.start(START)
        await site.until(lambda: status_of(site.rollouts.book.get(rollout.name)).settled is RolloutPhase.DONE)
        done = site.rollouts.book.get(rollout.name)
        undoing = RolloutVerb(verb="undo", actor="alice")
        await site.leaves(asyncio.create_task(site.rollouts.order(done, undoing)))
        await site.until(lambda: site.phases() == [RolloutPhase.ROLLED_BACK])


async def test_of_two_of_one_scope_the_second_is_refused_although_the_first_is_being_written(
    site: Site,
) -> None:
    await site.leaves(asyncio.create_task(site.rollouts.start(START)))
    with pytest.raises(FailedPrecondition, match=r"rollout .* to version 2 is"):
        await site.rollouts.start(START)
    assert len(site.phases()) == 1


async def test_a_policy_that_is_set_while_the_server_starts_is_followed(site: Site) -> None:
    await site.rollouts.set_policy("sim.version", "", PolicySpec(policy=QUICK), actor="alice")
    async with site.running():
        await site.until(lambda: site.phases() == [RolloutPhase.DONE])
