"""What one pass over a rollout costs, by the number of its targets.

Measured as in the server: facts from the subject, records from the store, the decision, and what is
written. Two kinds of pass: one in which nothing changed, and the first, which asks every target of a wave.
And what a rollout adds to a change: from its start until every target has confirmed, beside the time that
targets take.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import servers
from bench.figures import Effort, Row

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

SIZES = (10, 1_000, 10_000)
QUICK_SIZES = (10, 100)
SLACK = 1.5
"""How much more than so many times a rollout of so many times the size may take, for noise and caches."""


async def _passes(size: int, directory: Path, turns: int) -> tuple[float, float, float]:
    """The best time of a pass without news, the time of the one that asks, and of the whole rollout.

    The first is the processor's time: it is compared with a bound, and others may use the machine.
    """
    from support.fleet.simulated_subject import SimulatedAgent, SimulatedSubject

    from fleetplane.fleet.freeze import Freezes
    from fleetplane.fleet.rollouts.driver import key_of
    from fleetplane.fleet.rollouts.records import KINDS, status_of
    from fleetplane.fleet.rollouts.rollouts import Rollouts, Start
    from fleetplane.fleet.rollouts.rules.policy import Policy
    from fleetplane.fleet.rollouts.rules.states import RolloutPhase
    from fleetplane.kernel.freeze import FREEZE
    from fleetplane.kernel.reconcile import LEASE
    from fleetplane.kernel.store import Store, StoreSettings
    from fleetplane.sim.clock import VirtualClock

    clock = VirtualClock()
    settings = StoreSettings(path=directory / f"{size}.db")
    async with Store.open(settings, kinds=(*KINDS, FREEZE, LEASE), clock=clock) as store:
        subject = SimulatedSubject(clock, {f"agent-{at:05d}": SimulatedAgent() for at in range(size)})
        rollouts = Rollouts(store, clock, [subject], Freezes(store, clock))
        policy = Policy(waves=("rest",), soak_seconds=0.0)
        begun = time.perf_counter()
        rollout = await rollouts.start(
            Start(subject="sim.version", scope="tenant/a", to="2", policy=policy, actor="bench")
        )
        started = time.perf_counter()
        await rollouts.driver.pass_over(key_of(rollout))
        asking = time.perf_counter() - started
        measuring, best = time.perf_counter(), float("inf")
        for _ in range(turns):
            before = time.process_time()
            await rollouts.driver.pass_over(key_of(rollout))
            best = min(best, time.process_time() - before)
        begun += time.perf_counter() - measuring
        await clock.advance(5.0)
        while status_of(rollouts.book.get(rollout.name)).phase is not RolloutPhase.DONE:
            await rollouts.driver.pass_over(key_of(rollout))
        whole = time.perf_counter() - begun
    return best, asking, whole


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    sizes = QUICK_SIZES if quick else SIZES
    with servers.scratch() as directory:
        costs = {size: asyncio.run(_passes(size, directory, 2 if quick else 30)) for size in sizes}
    return [
        Row(
            figure=f"A pass over a rollout of {size:,} targets",
            ours=_shown(costs[size][0]),
            reference="" if before is None else f"{_shown(costs[before][0])} for {before:,}",
            ratio=None if before is None else costs[size][0] / costs[before][0],
            must_reach="" if before is None else f"at most {size // before * SLACK:g} ×",
            reached=before is None or costs[size][0] <= costs[before][0] * size / before * SLACK,
            note=f"asking all of them {_shown(costs[size][1])}, start to done {_shown(costs[size][2])}",
        )
        for before, size in zip((None, *sizes), sizes, strict=False)
    ]


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
