"""Edge daemons at three servers on one PostgreSQL, while servers die, start, and hear of things late.

The daemons are simulated (`support/cluster/daemons.py`); servers, database and bus are real. What was written
of each daemon is read from the database's log, past all servers.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cluster.daemons import Book, Crowd, Line, Population, RoamingDaemon, book, crowd
from support.cluster.members import Member, ServerCluster, server_cluster
from support.edge.edge_signer import Identity
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import rough_network

from fleetplane.domains.edge.kinds import NodeState

DAEMONS = int(os.environ.get("CLUSTER_DAEMONS", "60"))
RUNS = int(os.environ.get("CLUSTER_RUNS", "1"))
"""Over all daemons, each with servers that die meanwhile."""
SEED = int(os.environ.get("CLUSTER_SEED", "1"))
SECONDS = 60.0 + DAEMONS / 10
"""What is waited for at most; many daemons take their time on a small machine."""
PROMISED_SECONDS = 10.0
"""Who is back within this time after its server died was never away: at least that, by the documentation."""
DAWDLES_SECONDS = 8.0
"""Longer than it takes until the others know that a server is gone."""
SETTINGS = {
    "FLEETPLANE_LISTENERS__EDGE__TLS": "false",
    "FLEETPLANE_LISTENERS__EDGE__CONNECTIONS": str(2 * DAEMONS + 200),
    "FLEETPLANE_LISTENERS__EDGE__CONNECTIONS_PER_ADDRESS": str(2 * DAEMONS + 200),
}


@dataclass(slots=True)
class Scene:
    cluster: ServerCluster
    crowd: Crowd
    book: Book
    operator: str
    chance: random.Random
    others: Sequence[Identity]
    """Of two daemons that the test plays itself."""

    async def all_are_where_it_is_written(self) -> None:
        """Every daemon is served, and the database names its server and says that it is connected."""
        await self.crowd.all_served(SECONDS)
        await self.book.until(
            lambda: not self.crowd.unserved() and not self.book.misplaced(self.crowd.daemons),
            "of daemons something else is written than where they are",
            SECONDS,
        )

    async def ask(self, member: Member, method: str, path: str, body: Any, key: str) -> httpx.Response | None:
        headers = {
            "authorization": f"Bearer {self.operator}",
            "accept": "application/json",
            "idempotency-key": key,
        }
        try:
            async with httpx.AsyncClient(base_url=f"http://{member.web}", timeout=20) as client:
                answer = await client.request(method, path, json=body, headers=headers)
        except (httpx.TransportError, httpx.StreamError):
            return None
        return None if answer.status_code >= 500 else answer

    async def run(self, target: Any, tag: str, deadline_seconds: float) -> Any:
        return await self.insist(
            "POST",
            "/v1/edge/fleet/invoke",
            {
                "target": target,
                "tool": "cmd.run",
                "args": {"command": tag},
                "policy": {
                    "mode": "parallel",
                    "max_concurrency": max(DAEMONS // 3, 1),
                    "failure_policy": "continue",
                    "per_target_deadline_secs": deadline_seconds,
                },
            },
        )

    async def over(self, run: Any) -> Any:
        """The run when every target has ended."""
        begun = time.monotonic()
        path = f"/v1/edge/fleet/runs/{run['fleet_command_id']}"
        while (told := await self.insist("GET", path))["outcome"] == "running":
            assert time.monotonic() - begun < 2 * SECONDS, told["summary"]
            await asyncio.sleep(0.5)
        return told

    async def insist(self, method: str, path: str, body: Any = None) -> Any:
        """The answer of the first server that gives one."""
        begun, key = time.monotonic(), str(uuid.uuid4())
        while True:
            for member in self.cluster.members:
                if member.serves and (answer := await self.ask(member, method, path, body, key)) is not None:
                    assert answer.status_code < 300, answer.text
                    return answer.json()
            assert time.monotonic() - begun < SECONDS, f"nobody answers {method} {path}"
            await asyncio.sleep(0.2)


@asynccontextmanager
async def scene(folder: Path, postgres: PostgresServer) -> AsyncIterator[Scene]:
    people = Population(DAEMONS + 2, folder)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(
            server_cluster(folder, postgres, later=["four"], prepare=people.enrol, environment=SETTINGS)
        )
        await cluster.all_serve()
        read = await stack.enter_async_context(book(cluster.url))
        everybody = people.identities
        daemons = await stack.enter_async_context(crowd(cluster.members, everybody[:DAEMONS], seed=SEED))
        made = Scene(cluster, daemons, read, people.operator, random.Random(SEED), everybody[DAEMONS:])
        await made.all_are_where_it_is_written()
        yield made


@pytest.mark.timeout(3600)
async def test_daemons_are_served_by_the_others_while_servers_die(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    async with scene(tmp_path, postgres) as made:
        await _a_server_dies_and_another_starts(made)
        for number in range(RUNS):
            await _servers_die_during_a_run(made, number)
        await _a_daemon_moves_while_its_old_stream_half_lives(made)


async def _a_server_dies_and_another_starts(made: Scene) -> None:
    """Only who did not come back in time is ever written as disconnected."""
    cluster, daemons = made.cluster, made.crowd.daemons
    victim = await cluster.the_active()
    truant, dawdler = made.crowd.at(victim)[:2]
    truant.stays_away = dawdler.stays_away = True
    victim.is_wanted = False
    begun = time.monotonic()
    victim.signal(signal.SIGKILL)
    fourth = cluster["four"]
    fourth.is_wanted = True
    fourth.start()
    stayed = {truant, dawdler}
    await cluster.until(lambda: set(made.crowd.at(victim)) <= stayed and not made.crowd.unserved(), SECONDS)
    served = time.monotonic() - begun
    await cluster.until(lambda: time.monotonic() - begun >= DAWDLES_SECONDS)
    dawdler.stays_away = False
    await made.all_are_where_it_is_written()
    await cluster.until(lambda: fourth.serves)
    # Which shows that those who came back had their time as well.
    await made.book.until(
        lambda: made.book.states[truant.node_id][-1] is NodeState.DISCONNECTED,
        "the daemon that stays away is still written as connected",
        SECONDS,
    )
    await made.all_are_where_it_is_written()
    late = {one.node_id for one in daemons if one.away_seconds >= PROMISED_SECONDS} | {truant.node_id}
    flipped = {name for name, states in made.book.states.items() if states not in ([], [NodeState.CONNECTED])}
    assert flipped <= late, f"{len(flipped - late)} came back in time and are written as having been away"
    truant.stays_away = False
    victim.is_wanted = True
    await made.all_are_where_it_is_written()
    assert made.book.states[truant.node_id][-1] is NodeState.CONNECTED
    print(f"\n{len(daemons)} daemons were served {served:.1f} s after the active server was killed")


async def _servers_die_during_a_run(made: Scene, number: int) -> None:
    """Every target has an outcome, and none did it twice."""
    cluster = made.cluster
    await cluster.all_serve()
    await made.all_are_where_it_is_written()
    made.crowd.work_seconds = (0.5, 2.0)
    tag, begun = f"run {number}", time.monotonic()
    before = sum(made.crowd.done.values())
    run = await made.run("all", tag, deadline_seconds=20 + DAEMONS / 50)
    assert run["targets_resolved"] == DAEMONS, run
    active = await cluster.the_active()
    standby = made.chance.choice([one for one in cluster.members if one is not active])
    for wanted, victim in ((before + DAEMONS // 6, standby), (before + DAEMONS // 3, active)):
        await _done(made, wanted)
        await cluster.kill(victim)
    told = await made.over(run)
    outcomes = {one["node_id"]: one["outcome"] for one in told["per_node"]}
    assert outcomes.keys() == {one.node_id for one in made.crowd.daemons}
    assert sum(told["summary"].values()) == DAEMONS, told["summary"]
    assert max(made.crowd.done.values()) == 1, "a command was carried out twice"
    assert max(made.crowd.done_by.values()) == 1, "a target was told twice, under two ids"
    did = {name for args, name in made.crowd.done_by if tag in args}
    ok = {name for name, outcome in outcomes.items() if outcome == "ok"}
    assert ok <= did, "said to be done, and was not"
    print(f"{tag}: {told['summary']} in {time.monotonic() - begun:.1f} s; {len(did)} daemons did it")


async def _done(made: Scene, number: int) -> None:
    await made.cluster.until(lambda: sum(made.crowd.done.values()) >= number, SECONDS)


async def _a_daemon_moves_while_its_old_stream_half_lives(made: Scene) -> None:
    """The newest stream wins, and the late end of the old one changes nothing."""
    cluster, read = made.cluster, made.book
    await cluster.all_serve()
    await made.all_are_where_it_is_written()
    made.crowd.work_seconds = (0.0, 0.0)
    new = await cluster.the_active()
    old = made.chance.choice(cluster.standbys)
    mover, leaver = (RoamingDaemon(one, made.crowd) for one in made.others)
    async with rough_network(old.edge) as network:
        # The old server learns that the daemon has moved, and nothing reaches the daemon's old connection.
        first = await _moved(made, mover, network.address, old)
        network.hold()
        second = await _moved(made, mover, new.edge, new)
        await cluster.until(lambda: _has_ended(old, mover, 1), SECONDS)
        first.beat()
        network.heal()
        await cluster.until(first.ended.is_set, SECONDS)
        # The old connection ends while its server does not know yet that the daemon has moved.
        await _moved(made, mover, network.address, old)
        await cluster.until(second.ended.is_set, SECONDS)
        old.database.hold()
        old.bus.hold()
        last = await _moved(made, mover, new.edge, new)
        written = read.presences[mover.node_id]
        network.cut_all()
    old.heal()
    await cluster.until(lambda: _has_ended(old, mover, 2), SECONDS)
    # A server writes of daemons in turn: after this one, nothing of the other is left to write.
    (await _moved(made, leaver, old.edge, old)).close()
    await read.until(
        lambda: read.states[leaver.node_id][-1] is NodeState.DISCONNECTED, "its end is not written", SECONDS
    )
    assert read.presences[mover.node_id] == written
    assert read.states[mover.node_id] == [NodeState.CONNECTED]
    assert last.is_open
    told = await made.over(await made.run({"Node": mover.node_id}, "moved", deadline_seconds=SECONDS))
    assert told["summary"]["ok"] == 1, told
    assert [count for (args, _), count in made.crowd.done_by.items() if "moved" in args] == [1]
    last.close()


async def _moved(made: Scene, daemon: RoamingDaemon, address: str, member: Member) -> Line:
    """A new stream of the daemon, once the database names its server."""
    line = await daemon.dial(address)
    assert line is not None, member.told()
    daemon.line, daemon.server = line, member.name
    await made.book.until(lambda: not made.book.misplaced([daemon]), "the new stream is not written", SECONDS)
    return line


def _has_ended(member: Member, daemon: RoamingDaemon, times: int) -> bool:
    """Whether the server is done with so many streams of the daemon."""
    ends = ("edge.moved", "edge.disconnected")
    told = member.told().splitlines()
    return sum(daemon.node_id in line and any(end in line for end in ends) for line in told) >= times
