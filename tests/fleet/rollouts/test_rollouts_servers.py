"""Rollouts among several servers: any starts and orders, the active one drives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from support.fleet.simulated_subject import SimulatedAgent, SimulatedSubject
from support.shared import virtual_loop
from support.shared.presence_rig import until
from support.shared.three_stores import three_stores

from fleetplane.fleet.freeze import Freezes
from fleetplane.fleet.rollouts.driver import LOOK_SECONDS
from fleetplane.fleet.rollouts.records import KINDS, Rollout, status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts, RolloutVerb, Start
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import RolloutPhase
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.freeze import FREEZE
from fleetplane.kernel.reconcile import LEASE
from fleetplane.kernel.store import Store

QUICK = Policy(waves=("rest",), soak_seconds=0.0, confirm_seconds=3600.0)
START = Start(subject="sim.version", scope="tenant/a", to="newest", policy=QUICK, actor="alice")


class Site:
    def __init__(self, store: Store, agents: dict[str, SimulatedAgent]) -> None:
        self.store = store
        clock = store.clock
        self.rollouts = Rollouts(store, clock, [SimulatedSubject(clock, agents)], Freezes(store, clock))

    async def start(self) -> Rollout:
        with self.store.writing_here():
            return await self.rollouts.start(START)

    async def order(self, rollout: Rollout, verb: str) -> Rollout:
        with self.store.writing_here():
            return await self.rollouts.order(rollout, RolloutVerb(verb=verb, actor="bob"))

    def phases(self) -> list[RolloutPhase]:
        return [status_of(one).phase for one in self.rollouts.book.list()]


def played(scene: Callable[[Sequence[Site]], Awaitable[None]], **agents: SimulatedAgent) -> None:
    async def play() -> None:
        async with three_stores((*KINDS, FREEZE, LEASE)) as stores:
            sites = [Site(store, agents or {"one": SimulatedAgent()}) for store in stores]
            sites[0].rollouts.take_over()
            running = asyncio.create_task(sites[0].rollouts.run())
            try:
                await scene(sites)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    virtual_loop.run(play())


def test_a_rollout_that_is_started_elsewhere_is_driven_without_delay_and_seen_everywhere() -> None:
    async def scene(sites: Sequence[Site]) -> None:
        await asyncio.sleep(5 * LOOK_SECONDS)
        begun = asyncio.get_running_loop().time()
        await sites[1].start()
        await until(lambda: sites[0].phases() and sites[0].phases() != [RolloutPhase.PLANNED])
        assert asyncio.get_running_loop().time() - begun < LOOK_SECONDS / 2
        await until(lambda: sites[2].phases() == [RolloutPhase.DONE])

    played(scene)


def test_of_servers_that_start_a_rollout_of_one_scope_at_once_one_does() -> None:
    async def scene(sites: Sequence[Site]) -> None:
        done = await asyncio.gather(*(site.start() for site in sites), return_exceptions=True)
        refused = [error for error in done if isinstance(error, BaseException)]
        assert [type(error) for error in refused] == [FailedPrecondition, FailedPrecondition]
        (winner,) = [one for one in done if not isinstance(one, BaseException)]
        assert all(winner.name in str(error) for error in refused)
        assert len(sites[0].phases()) == 1

    played(scene, one=SimulatedAgent(applies_seconds=600.0))


def test_a_rollout_is_paused_and_resumed_on_any_server() -> None:
    async def scene(sites: Sequence[Site]) -> None:
        rollout = await sites[1].start()
        await until(sites[2].phases)
        await sites[2].order(rollout, "pause")
        await until(lambda: sites[0].phases() == [RolloutPhase.PAUSED])
        await sites[1].store.confirmed()
        await sites[1].order(rollout, "resume")
        await until(lambda: sites[2].phases() == [RolloutPhase.DONE])

    played(scene, one=SimulatedAgent(applies_seconds=30.0))


def test_a_rollout_that_another_server_has_followed_up_is_not_undone() -> None:
    async def scene(sites: Sequence[Site]) -> None:
        first = await sites[1].start()
        await until(lambda: sites[1].phases() == [RolloutPhase.DONE] == sites[2].phases())
        for site in sites:
            (subject,) = site.rollouts.subjects.values()
            assert isinstance(subject, SimulatedSubject)
            subject.latest = "3"
        await sites[2].start()
        # This server may not have read of it yet; the transaction has.
        with pytest.raises(FailedPrecondition, match="came after it"):
            await sites[1].order(first, "undo")

    played(scene)
