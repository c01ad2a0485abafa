"""Three servers are upgraded to the next release one after the other, and back, under load on all of them.

Whatever is acknowledged meanwhile is kept, as `support/cluster/verdict.py` says; what the next release brings
is written once no server of this one runs, and then none of this one starts any more.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster.load import Load, load
from support.cluster.members import ServerCluster, server_cluster
from support.cluster.releases import (
    NEXT_LEVEL,
    is_next,
    refused,
    replaced,
    risen,
    schema_of,
    sealed_from_its_level_on,
)
from support.cluster.verdict import keeps_promises
from support.shared.postgres_server import PostgresServer, running

from fleetplane.kernel.store.engines.postgres_servers import seen
from fleetplane.kernel.store.schema import SCHEMA_REVISION
from fleetplane.kernel.store.servers.level import SUPPORTED

UPGRADES = int(os.environ.get("CLUSTER_UPGRADES", "0"))
SEED = int(os.environ.get("CLUSTER_SEED", "1"))
DELAY_SECONDS = "4"
"""Besides the six for which a server counts as running that is not heard of: long enough for one that is held
up, on a busy machine."""


@pytest.fixture
def database() -> Iterator[PostgresServer]:
    with running() as server:
        yield server


async def _not_risen(cluster: ServerCluster) -> None:
    """Every server says what its release supports, and nobody writes more than the older one reads."""
    found = {one.name: one for one in await seen(cluster.url)}
    expected = {one.name: NEXT_LEVEL if is_next(one) else SUPPORTED.highest for one in cluster.members}
    assert {name: one.supported_level for name, one in found.items()} == expected
    assert {one.level for one in found.values()} == {SUPPORTED.highest}


async def _to_the_end(traffic: Load) -> None:
    """Whoever is not upgraded yet is."""
    cluster = traffic.cluster
    for one in cluster.members:
        if not is_next(one):
            await replaced(traffic, one, next_release=True)
    await risen(cluster)
    await traffic.goes_on()


async def _none_goes_back(cluster: ServerCluster) -> None:
    said = await refused(cluster["three"])
    assert f"the store is at level {NEXT_LEVEL}, and this program supports {SUPPORTED}:" in said
    assert "start the release that the other servers run" in said


@pytest.mark.timeout(900)
async def test_servers_are_upgraded_one_after_the_other_and_back_until_the_last_one_is(
    tmp_path: Path, database: PostgresServer
) -> None:
    begun = time.monotonic()
    delay = {"FLEETPLANE_STORE__LEVEL_DELAY_SECONDS": DELAY_SECONDS}
    async with server_cluster(tmp_path, database, environment=delay) as cluster:
        await cluster.all_serve()
        bearer = await cluster.token("load")
        async with load(cluster, bearer, seed=SEED, workers=3, watchers=2, pause_seconds=0.3) as traffic:
            await traffic.goes_on()
            assert await schema_of(cluster) == SCHEMA_REVISION
            await replaced(traffic, cluster["one"], next_release=True)
            assert await schema_of(cluster) == "next"
            await replaced(traffic, cluster["two"], next_release=True)
            await _not_risen(cluster)
            await replaced(traffic, cluster["two"], next_release=False)  # on the newer schema
            await _not_risen(cluster)
            await _to_the_end(traffic)
        await _none_goes_back(cluster)
        before, after = await sealed_from_its_level_on(cluster)
        assert before
        assert after
        await keeps_promises(traffic)
    seconds = time.monotonic() - begun
    print(f"\nupgraded in {seconds:.0f} s: {before} changes before the level rose, {after} after")


@pytest.mark.skipif(not UPGRADES, reason="a long form, of `make faults`")
@pytest.mark.timeout(6 * 3600)
async def test_a_cluster_goes_back_and_forth_between_releases_in_any_order(
    tmp_path: Path, database: PostgresServer
) -> None:
    """Servers are upgraded, taken back and killed at random while one of the older release runs."""
    begun, chance = time.monotonic(), random.Random(SEED)
    delay = {"FLEETPLANE_STORE__LEVEL_DELAY_SECONDS": "30"}
    async with server_cluster(tmp_path, database, environment=delay) as cluster:
        await cluster.all_serve()
        bearer = await cluster.token("load")
        async with load(cluster, bearer, seed=SEED) as traffic:
            await traffic.goes_on()
            for _ in range(UPGRADES):
                one = chance.choice(cluster.members)
                is_last = not any(not is_next(other) for other in cluster.members if other is not one)
                await replaced(traffic, one, next_release=not is_last and not is_next(one))
                if chance.random() < 0.3:
                    await cluster.kill(chance.choice(cluster.members))
                    await traffic.goes_on()
                await _not_risen(cluster)
            await _to_the_end(traffic)
        await _none_goes_back(cluster)
        before, after = await sealed_from_its_level_on(cluster)
        await keeps_promises(traffic)
    print(
        f"\n{UPGRADES} servers replaced in {time.monotonic() - begun:.0f} s:"
        f" {len(traffic.acknowledged)} objects acknowledged, {len(traffic.unknown)} unknown,"
        f" {len(traffic.history)} operations on registers,"
        f" {sum(len(one.events) for one in traffic.watchers)} events told"
        f" over {sum(sum(one.connections.values()) for one in traffic.watchers)} connections;"
        f" {before} changes before the level rose, {after} after"
    )
