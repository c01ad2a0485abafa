"""Several servers on one database, simulated: their promises hold in every history, and defects are found."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from support.shared.cluster_sim import TAKEOVER_SECONDS, Simulation, Violation
from support.shared.memory_engine import Defects, Link, MemoryDatabase, MemoryEngine
from support.shared.storekit import KINDS, put
from support.shared.virtual_loop import LoopClock, VirtualLoop, run

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store import StoreSettings
from fleetplane.kernel.store.engine import GroupAuthor, Superseded
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.store.servers.replica import Replica

SEEDS = int(os.environ.get("CLUSTER_SEEDS", "1500"))
"""Histories, of some 12 ms of processor time each on average; `make faults` runs more. With those of
`test_agents_simulation` they are 2,000."""
LONG_EVERY = 5
LONG_SECONDS, SHORT_SECONDS = 10.0, 4.0
"""Of simulated time. One in five lasts until servers that were cut off have given up and begun again; most
of what can go wrong between servers goes wrong within a few seconds."""
PORTIONS = 5
"""Into which they are divided, for those who work at the same time."""
LATE_SEEDS = 60
DEFECT_SEEDS = 500

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_history_breaks_what_several_servers_promise(portion: int) -> None:
    seeds, ends, seen = range(portion, SEEDS, PORTIONS), set[str](), Counter[str]()
    for seed in seeds:
        is_long = (seed // PORTIONS) % LONG_EVERY == 0
        simulation = Simulation(seed, seconds=LONG_SECONDS if is_long else SHORT_SECONDS)
        try:
            simulation.run()
        except (Violation, FleetplaneError) as error:
            pytest.fail(f"seed {seed}: {error}")
        ends |= set(simulation.ends)
        seen["unknown"] += simulation.told.unknown
        seen["terms"] += simulation.database.seats[-1].term
        seen["acknowledged"] += len(simulation.told.acknowledged)
        seen["looked up"] += simulation.told.refusals
        seen["swept"] += simulation.told.swept
        seen["lost"] += simulation.losses
        seen["alone"] += simulation.locked
        seen["reads"] += simulation.reads
        seen["moves"] += simulation.moves
        seen["keys"] += len(simulation.outside.told)
        seen["asked with keys"] += simulation.outside.asked
    # That there was anything to see: of each, some half of what there is on average.
    assert "Superseded" in ends
    least = {"unknown": 0.15, "terms": 1, "acknowledged": 12, "looked up": 2.5, "swept": 0.7}
    least |= {"lost": 10, "alone": 0.2, "reads": 3, "moves": 1.5}
    least |= {"keys": 1, "asked with keys": 3}
    assert {what for what, share in least.items() if seen[what] < share * len(seeds)} == set()


def test_the_same_seed_gives_the_same_history() -> None:
    runs = []
    for _ in range(2):
        simulation = Simulation(7, seconds=15)
        simulation.run()
        runs.append([(group.id, group.mark, group.author) for group in simulation.database.groups])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("delay_seconds", [0.05, 0.2, 0.4])
def test_no_history_breaks_it_however_late_the_database_answers(delay_seconds: float) -> None:
    for seed in range(LATE_SEEDS):
        try:
            Simulation(seed, delay_seconds=delay_seconds).run()
        except (Violation, FleetplaneError) as error:
            pytest.fail(f"seed {seed}: {error}")


FIRST = {"absence_is_failure": 205, "boot_is_not_checked": 37}
"""Where to begin to look, of the seeds that there are to look at."""
DELAYS = {"take_over_is_unconditional": 0.2, "lock_is_not_waited_for": 0.05}
"""How late the database answers where a defect shows only then."""


@pytest.mark.parametrize("defect", [field.name for field in fields(Defects)])
def test_a_defect_put_in_is_found(defect: str) -> None:
    first = FIRST.get(defect, 0)
    for seed in (*range(first, DEFECT_SEEDS), *range(first)):
        try:
            Simulation(seed, defects=Defects(**{defect: True}), delay_seconds=DELAYS.get(defect, 0.002)).run()
        except (Violation, FleetplaneError):
            return
    pytest.fail(f"{DEFECT_SEEDS} histories with the defect {defect}, and nothing was noticed")


def test_a_killed_server_is_replaced_within_ten_seconds() -> None:
    takeovers: list[float] = []
    for seed in range(10):
        simulation = Simulation(seed, trouble="kill")
        simulation.run()
        takeovers += simulation.takeovers
    assert len(takeovers) > 5
    assert max(takeovers) < TAKEOVER_SECONDS


def test_a_server_that_was_held_up_goes_on_if_nobody_took_over_meanwhile() -> None:
    """A start on a busy machine may hold the event loop for longer than a seat lasts."""

    async def work(others: int) -> bool:
        chance = random.Random(1)
        clock = LoopClock(chance)
        database = MemoryDatabase(clock.now_ns)
        settings = StoreSettings(path=Path("/nowhere"))
        engine = MemoryEngine(database, Link(chance=chance))
        one = await Replica.load(engine, settings, server="one", kinds=KINDS, clock=clock)
        try:
            async with one.active() as store:
                await put(store, "before")
                if others:  # took over while this process did nothing
                    database.enlist("two")
                    database.servers["one"].renewed_at_ns = 0
                    database.take_over(database.head.mark, GroupAuthor("two", 1), leader_lease.LIFE_SECONDS)
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop.hold(leader_lease.LIFE_SECONDS + 1)
                await asyncio.sleep(2 * leader_lease.LOOK_SECONDS)
                await put(store, "after")
                return True
        except Superseded:
            return False

    assert run(work(0))
    assert not run(work(1))
