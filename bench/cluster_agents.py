"""How soon all daemons of a server that is killed are served by the others.

Three servers on one PostgreSQL and one NATS; the daemons are simulated, in this process, and come back as the
shipped one does: after a pause between 0.25 and 2.25 s, and again after 0.5 to 1.5 s if nobody answers. The
reference is what the same daemons took to connect to the same server, freshly started, at once and without
a pause. Both in each round, medians of all rounds. All processes share the machine's cores.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from bench import servers
from bench.figures import Effort, Row, alone
from bench.http2 import files_for

sys.path.insert(0, str(servers.ROOT / "tests"))

DAEMONS, FEW = 600, 12
ROUNDS = 3
SECONDS = 300.0
MUST_STANDBY, MUST_ACTIVE = 4.0, 12.0
"""Set before anything was measured. 600 daemons take 1.5 s at least, because a server begins 400 streams a
second. Coming back takes a pause of 2.25 s, for some a second one of 1.5 s as nobody answered, and 1.5 s:
5.3 s. If it was the active one, another takes its place 7 s later and opens its listeners anew, so that its
daemons come once more."""


async def _measure(directory: Path, number: int, rounds: int) -> dict[str, list[float]]:
    from support.cluster.daemons import Population, crowd
    from support.cluster.members import Member, ServerCluster, server_cluster
    from support.shared.postgres_server import running

    async def round_of(cluster: ServerCluster, victim: Member, people: Population) -> tuple[float, float]:
        begun = time.monotonic()
        async with crowd(cluster.members, people.identities, first=[victim]) as made:
            await made.all_served(SECONDS)
            connected = time.monotonic() - begun
            victim.is_wanted, was_active = False, cluster.active is victim
            begun = time.monotonic()
            victim.signal(signal.SIGKILL)
            await cluster.until(
                lambda: (
                    not made.at(victim)
                    and not made.unserved()
                    and (not was_active or (cluster.active or victim) is not victim)
                ),
                SECONDS,
            )
            return connected, time.monotonic() - begun

    found: dict[str, list[float]] = {"fresh": [], "standby": [], "active": []}
    limits = {
        "FLEETPLANE_LISTENERS__EDGE__TLS": "false",
        "FLEETPLANE_LISTENERS__EDGE__CONNECTIONS": str(2 * number + 200),
        "FLEETPLANE_LISTENERS__EDGE__CONNECTIONS_PER_ADDRESS": str(2 * number + 200),
    }
    people = Population(number, directory)
    with running() as postgres:
        async with server_cluster(directory, postgres, prepare=people.enrol, environment=limits) as cluster:
            for _ in range(rounds):
                for kind in ("standby", "active"):
                    await cluster.all_serve()
                    active = await cluster.the_active()
                    victim = active if kind == "active" else cluster.standbys[0]
                    connected, served = await round_of(cluster, victim, people)
                    found["fresh"].append(connected)
                    found[kind].append(served)
                    victim.is_wanted = True
    return found


def measure(effort: Effort) -> Sequence[Row]:
    number = DAEMONS if effort.gpus is None else FEW
    # The process that starts the servers is a module of the tests.
    found_at = {"PYTHONPATH": str(servers.ROOT / "tests")}
    with patch.dict(os.environ, found_at), files_for(2 * number), servers.scratch() as directory:
        directory.chmod(0o755)
        found = asyncio.run(_measure(directory, number, min(effort.rounds, ROUNDS)))
    fresh = statistics.median(found["fresh"])
    return [
        _row(
            f"{number} daemons of a killed server, served by two others",
            found["standby"],
            fresh,
            MUST_STANDBY,
        ),
        _row(
            f"{number} daemons of the killed active server, until another is active",
            found["active"],
            fresh,
            MUST_ACTIVE,
        ),
    ]


def _row(figure: str, ours: Sequence[float], reference: float, must: float) -> Row:
    seconds = statistics.median(ours)
    return Row(
        figure=figure,
        ours=f"{seconds:.1f} s",
        reference=f"{reference:.1f} s",
        ratio=seconds / reference,
        must_reach=f"at most {must:g} ×",
        reached=seconds / reference <= must,
        note="the reference: as many that connect to a fresh server at once",
    )


if __name__ == "__main__":
    alone(measure, __doc__)
