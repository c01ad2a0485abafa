"""From a commit on one server until a watch on another has it: with a bell, against looking twice a second.

Two stores in one process on a real PostgreSQL: one writes, at random times, the other stands by. Measured is
the time from the answer to the write until the event is there. The reference is the same store with no bus to
ring on.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from bench import servers
from bench.figures import Effort, Row, alone
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.notifiers.notifier import NatsSettings
from fleetplane.kernel.store.servers.replica import Replica
from tools.run_cluster import Cluster, Ports, free_port

MUST = 10.0
SAMPLES = 30
"""In each round."""
PAUSE_SECONDS = 0.5
"""At most, between two writes: as long as a look apart, so that writes come at any time between two."""


class Spec(msgspec.Struct, frozen=True):
    value: int = 0


THING: Kind[Spec, Spec] = Kind("thing", Spec, Spec)


@asynccontextmanager
async def pair(folder: Path, url: str, bus: NatsSettings | None) -> AsyncIterator[tuple[Store, Store]]:
    """One that writes, and one that stands by."""
    seen: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()

    async def meanwhile(standby: Replica) -> None:
        seen.set_result(standby)

    def opened(name: str) -> StoreSettings:
        return StoreSettings(path=folder / name / "store.db", url=url, server=name, bus=bus)

    async def stand_by() -> None:
        async with Store.open(opened("two"), kinds=[THING], clock=SystemClock(), meanwhile=meanwhile):
            raise AssertionError("it became active")

    async with Store.open(opened("one"), kinds=[THING], clock=SystemClock()) as active:
        waiting = asyncio.create_task(stand_by())
        try:
            yield active, (await seen).store
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def _rings(store: Store) -> bool:
    return store.bell is not None and store.bell.state.connected


async def delays(folder: Path, url: str, bus: NatsSettings | None, count: int, *, rings: bool) -> list[float]:
    """Of each write, in seconds."""
    found: list[float] = []
    async with pair(folder, url, bus) as (active, standby):
        while rings and not (_rings(active) and _rings(standby)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        watch = standby.watch(THING, after=standby.revision)
        for number in range(count):
            await asyncio.sleep(random.uniform(0, PAUSE_SECONDS))
            done = await active.transact(
                lambda draft, number=number: draft.put(THING, "bench", "x", spec=Spec(value=number)),  # type: ignore[misc]
                actor="bench",
                action="put",
                touches=[THING.key("bench", "x")],
            )
            answered = time.perf_counter()
            while watch.revision < done.revision:
                await watch.next(idle_seconds=5.0)
            found.append(time.perf_counter() - answered)
        watch.close()
    return found


def _p99(found: Sequence[float]) -> float:
    return sorted(found)[min(len(found) - 1, round(0.99 * len(found)))]


def measure(effort: Effort) -> Sequence[Row]:
    with servers.scratch() as directory, ExitStack() as stack:
        directory.chmod(0o755)
        cluster = Cluster(directory, Ports(0), stack)
        cluster.start_database()
        cluster.start_bus()
        url = cluster.environment["FLEETPLANE_STORE__URL"]
        token = cluster.environment["FLEETPLANE_BUS__TOKEN"]
        nats = NatsSettings(servers=[cluster.environment["FLEETPLANE_BUS__URL"]], token=token)
        nowhere = NatsSettings(servers=[f"nats://127.0.0.1:{free_port()}"])
        found: dict[str, list[float]] = {"looking": [], "NOTIFY": [], "NATS": []}
        count = max(3, min(SAMPLES, effort.updates))
        for round_ in range(effort.rounds):
            for name, bus in (("looking", nowhere), ("NOTIFY", None), ("NATS", nats)):
                place = directory / f"{name}-{round_}"
                found[name] += asyncio.run(delays(place, url, bus, count, rings=name != "looking"))
    rows: list[Row] = []
    reference = statistics.median(found["looking"])
    for name in ("NOTIFY", "NATS"):
        ours = statistics.median(found[name])
        rows.append(
            Row(
                figure=f"From a commit to another server's watch, {name}",
                ours=f"{ours * 1e3:.1f} ms",
                reference=f"{reference * 1e3:.0f} ms",
                ratio=reference / ours,
                must_reach=f"{MUST:g} ×",
                reached=reference / ours >= MUST,
                note=f"99th percentile {_p99(found[name]) * 1e3:.1f} ms,"
                f" looking {_p99(found['looking']) * 1e3:.0f} ms",
            )
        )
    return rows


if __name__ == "__main__":
    alone(measure, __doc__)
