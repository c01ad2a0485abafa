"""Three servers under load on all of them, while processes, networks and the database fail.

Writers, readers and watchers are at all servers through `/apis/v1`. Whatever happens: no acknowledged write
is lost, groups are numbered without gaps, every watcher has every event once on whichever servers it was,
reads are linearizable, and the audit log is what was written. See `support/cluster`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import failures
from support.cluster.load import Load, load
from support.cluster.members import an_hour_fast, server_cluster
from support.cluster.verdict import keeps_promises, keys_hold_everywhere, made_once, revoked_everywhere
from support.shared.postgres_server import PostgresServer, running

KILLS = int(os.environ.get("CLUSTER_KILLS", "0"))
FAILURES = int(os.environ.get("CLUSTER_FAILURES", "0"))
WITHOUT_BUS = int(os.environ.get("CLUSTER_FAILURES_WITHOUT_BUS", "0"))
KEYS = int(os.environ.get("CLUSTER_KEYS", "5"))
SEED = int(os.environ.get("CLUSTER_SEED", "1"))
SHORT = (
    failures.kill_active,
    failures.kill_standby,
    failures.stop_active,
    failures.silence_active,
    failures.cut_everything,
    failures.kill_database,
)


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    """Nobody else's: it is killed."""
    with running() as server:
        yield server


def _told(what: str, traffic: Load, begun: float) -> None:
    print(
        f"\n{what} in {time.monotonic() - begun:.0f} s: {len(traffic.acknowledged)} objects acknowledged,"
        f" {len(traffic.unknown)} unknown, {traffic.planned} plans with keys,"
        f" {len(traffic.history)} operations on registers,"
        f" {sum(len(one.events) for one in traffic.watchers)} events told"
        f" over {sum(sum(one.connections.values()) for one in traffic.watchers)} connections"
    )


@pytest.mark.timeout(900)
async def test_a_cluster_keeps_its_promises_whatever_fails(tmp_path: Path, database: PostgresServer) -> None:
    """One of its servers has a clock that is an hour fast."""
    chance, begun = random.Random(SEED), time.monotonic()
    async with server_cluster(tmp_path, database, own={"two": an_hour_fast(tmp_path)}) as cluster:
        await cluster.all_serve()  # of three that began at once on an empty database
        await made_once(cluster)
        bearer = await cluster.token("load", expires="30m")
        async with load(cluster, bearer, seed=SEED) as traffic:
            await traffic.goes_on()
            for fails in SHORT:
                await fails(traffic, chance)
            await keys_hold_everywhere(traffic, KEYS)
            seconds = await revoked_everywhere(traffic)
        await keeps_promises(traffic)
    _told(f"{len(SHORT)} failures", traffic, begun)
    print(f"{seconds:.2f} s after a token was revoked the last watch with it had ended")


@pytest.mark.skipif(not KILLS, reason="a long form, of `make faults`")
@pytest.mark.timeout(6 * 3600)
async def test_one_server_is_killed_every_few_seconds(tmp_path: Path, database: PostgresServer) -> None:
    chance, begun = random.Random(SEED), time.monotonic()
    async with server_cluster(tmp_path, database) as cluster:
        await cluster.all_serve()
        bearer = await cluster.token("load")
        async with load(cluster, bearer, seed=SEED) as traffic:
            await traffic.goes_on()
            for _ in range(KILLS):
                await failures.kill_anyone(traffic, chance)
        await keeps_promises(traffic)
    _told(f"{KILLS} servers killed", traffic, begun)


@pytest.mark.skipif(not FAILURES, reason="a long form, of `make faults`")
@pytest.mark.timeout(6 * 3600)
async def test_a_cluster_keeps_its_promises_in_whichever_order_things_fail(
    tmp_path: Path, database: PostgresServer
) -> None:
    chance, begun = random.Random(SEED), time.monotonic()
    async with server_cluster(tmp_path, database, own={"two": an_hour_fast(tmp_path)}) as cluster:
        await cluster.all_serve()
        bearer = await cluster.token("load")
        async with load(cluster, bearer, seed=SEED) as traffic:
            await traffic.goes_on()
            for number in range(FAILURES):
                if number % len(failures.ALL) == 0:
                    order = chance.sample(failures.ALL, len(failures.ALL))
                await order[number % len(failures.ALL)](traffic, chance)
        await keeps_promises(traffic)
    _told(f"{FAILURES} failures", traffic, begun)


@pytest.mark.skipif(not WITHOUT_BUS, reason="a long form, of `make faults`")
@pytest.mark.timeout(6 * 3600)
async def test_a_cluster_whose_bus_is_away_for_the_whole_run_keeps_its_promises(
    tmp_path: Path, database: PostgresServer
) -> None:
    """NATS ends before the servers have begun, and never comes back: they look for themselves."""
    chance, begun = random.Random(SEED), time.monotonic()
    other = [one for one in failures.ALL if one not in {failures.cut_bus, failures.restart_bus}]
    async with server_cluster(tmp_path, database) as cluster:
        cluster.nats.stop()
        await cluster.all_serve()
        bearer = await cluster.token("load")
        async with load(cluster, bearer, seed=SEED) as traffic:
            await traffic.goes_on()
            for number in range(WITHOUT_BUS):
                if number % len(other) == 0:
                    chance.shuffle(other)
                await other[number % len(other)](traffic, chance)
            seconds = await revoked_everywhere(traffic)
        await keeps_promises(traffic)
        assert all("bus.away" in one.log.read_text() for one in cluster.members)
        assert not any("bus.back" in one.log.read_text() for one in cluster.members)
    _told(f"{WITHOUT_BUS} failures without a bus", traffic, begun)
    print(f"{seconds:.2f} s after a token was revoked the last watch with it had ended")
