"""Agents that move between several servers, simulated: their commands' promises hold in every history, and
defects are found."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields

import pytest
from support.shared.agents_host import LedgerDefects
from support.shared.agents_sim import AgentSimulation
from support.shared.cluster_sim import Violation

from fleetplane.kernel.commands import OUTCOMES
from fleetplane.kernel.errors import FleetplaneError

SEEDS = int(os.environ.get("AGENT_SEEDS", "500"))
"""Histories, of some 20 ms of processor time each; `make faults` runs more."""
PORTIONS = 5
"""Into which they are divided, for those who work at the same time."""
LATE_SEEDS = 25
DEFECT_SEEDS = 500

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("portion", range(PORTIONS))
def test_no_history_breaks_what_is_promised_of_commands(portion: int) -> None:
    seeds, seen, ends = range(portion, SEEDS, PORTIONS), Counter[str](), set[str]()
    for seed in seeds:
        simulation = AgentSimulation(seed)
        try:
            simulation.run()
        except (Violation, FleetplaneError) as error:
            pytest.fail(f"seed {seed}: {error}")
        seen.update(simulation.judge.outcomes)
        seen["issued"] += len(simulation.issued.commands)
        seen["cancelled"] += simulation.issued.cancelled
        seen["recalled"] += simulation.recalled
        seen["sessions"] += simulation.judge.sessions
        seen["keys"] += len(simulation.outside.told)
        ends |= set(simulation.ends)
    # That there was anything to see: of each, some half of what there is on average.
    assert "Unavailable" in ends
    assert {outcome for outcome in OUTCOMES if not seen[outcome]} == set()
    least = {"issued": 4, "cancelled": 0.5, "recalled": 0.4, "sessions": 4, "keys": 0.5}
    assert {what for what, share in least.items() if seen[what] < share * len(seeds)} == set()


@pytest.mark.parametrize("delay_seconds", [0.05, 0.2])
def test_no_history_breaks_it_however_late_the_database_answers(delay_seconds: float) -> None:
    for seed in range(LATE_SEEDS):
        try:
            AgentSimulation(seed, delay_seconds=delay_seconds).run()
        except (Violation, FleetplaneError) as error:
            pytest.fail(f"seed {seed}: {error}")


def test_the_same_seed_gives_the_same_history() -> None:
    runs = []
    for _ in range(2):
        simulation = AgentSimulation(7)
        simulation.run()
        runs.append([(group.id, group.mark, group.author) for group in simulation.database.groups])
    assert runs[0] == runs[1]


DELAYS = {"new_session_of_an_older_one": 0.05}
"""How late the database answers where a defect shows mostly then."""


@pytest.mark.parametrize("defect", [field.name for field in fields(LedgerDefects)])
def test_a_defect_put_in_is_found(defect: str) -> None:
    delay_seconds = DELAYS.get(defect, 0.002)
    for seed in range(DEFECT_SEEDS):
        try:
            AgentSimulation(seed, defects=LedgerDefects(**{defect: True}), delay_seconds=delay_seconds).run()
        except (Violation, FleetplaneError):
            return
    pytest.fail(f"{DEFECT_SEEDS} histories with the defect {defect}, and nothing was noticed")
