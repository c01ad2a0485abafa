"""Servers that follow the log look at it when another one rings; without a bell they are late, and no worse.

The server that stands by looks by itself once, and then never again: what it shows later, it was rung for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.shared import nats_server
from support.shared.nats_server import NatsServer
from support.shared.postgres_server import PostgresServer
from support.shared.storekit import DEADLINE_SECONDS, KINDS, SCOPE, THING, flat, put, taken, told

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.notifiers import notifier as doorbell
from fleetplane.kernel.store.notifiers.nats import SUBJECT
from fleetplane.kernel.store.notifiers.notifier import (
    BusKind,
    CommitNotifier,
    NatsSettings,
    NotifierCounts,
    message,
)
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.store.servers.replica import Replica

FAR = 10**18


class LooksOnce(SystemClock):
    """The clock of a server whose poll takes for ever."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == leader_lease.LOOK_SECONDS:
            self.looked.set()
            await asyncio.Event().wait()
        await super().sleep(seconds)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


def bell(store: Store) -> CommitNotifier:
    assert store.bell is not None
    return store.bell


def is_connected(store: Store) -> bool:
    return bell(store).state.connected


@asynccontextmanager
async def pair(
    folder: Path,
    url: str,
    nats: NatsServer | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    looks: bool = False,
    answer_seconds: float = DEADLINE_SECONDS,
) -> AsyncIterator[tuple[Store, Store]]:
    """An active server, and one that stands by and does not look any more, unless it `looks`."""
    monkeypatch.setattr(leader_lease, "LIFE_SECONDS", 10 * DEADLINE_SECONDS)  # however late anything is
    monkeypatch.setattr(leader_lease, "GIVE_UP_SECONDS", 9 * DEADLINE_SECONDS)
    monkeypatch.setattr(doorbell, "LAST_RETRY_SECONDS", 0.5)
    # A bell that is given up is not rung again.
    monkeypatch.setattr(doorbell, "ANSWER_SECONDS", answer_seconds)
    bus = None if nats is None else NatsSettings(servers=[nats.url])
    settings = [
        StoreSettings(path=folder / name / "store.db", url=url, server=name, bus=bus)
        for name in ("one", "two")
    ]
    seen: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()

    async def meanwhile(standby: Replica) -> None:
        seen.set_result(standby)

    async def stand_by(clock: SystemClock) -> None:
        async with Store.open(settings[1], kinds=KINDS, clock=clock, meanwhile=meanwhile):
            raise AssertionError("it must not become active")

    async with Store.open(settings[0], kinds=KINDS, clock=SystemClock()) as active:
        clock = LooksOnce()
        waiting = asyncio.create_task(stand_by(SystemClock() if looks else clock))
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                standby = await seen
                if not looks:
                    await clock.looked.wait()
            yield active, standby.store
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("kind", [BusKind.NOTIFY, BusKind.NATS])
async def test_a_watch_on_a_standby_hears_of_a_write_without_looking(
    kind: BusKind, tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nats_server.running(tmp_path) as nats:
        used = nats if kind is BusKind.NATS else None
        async with pair(tmp_path, postgres.database(), used, monkeypatch) as (active, standby):
            await until(lambda: is_connected(active) and is_connected(standby))
            assert bell(standby).state.kind is kind
            watch = standby.watch(THING, after=standby.revision)
            for value in range(5):
                done = await put(active, "x", value)
                found = flat(await taken(watch, done.revision))
                assert [event[2] for event in told(found)][-1] == value
            watch.close()


async def test_nats_may_be_killed_and_come_back(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nats_server.running(tmp_path) as nats:
        async with pair(tmp_path, postgres.database(), nats, monkeypatch) as (active, standby):
            await until(lambda: is_connected(active) and is_connected(standby))
            nats.stop()
            await until(lambda: not is_connected(active) and not is_connected(standby))
            await until(
                lambda: "NATS" in bell(active).state.trouble or nats.url in bell(active).state.trouble
            )
            await bell(standby)._read()  # after its look at connecting, which may still be under way
            done = await put(active, "meanwhile", 1)  # written as ever, and not shown there
            assert standby.revision < done.revision
            nats.start()
            # Back on the bus it looks once: what was rung meanwhile, nobody knows.
            await until(lambda: standby.get(THING, SCOPE, "meanwhile") is not None)
            await until(lambda: is_connected(active) and is_connected(standby))
            await put(active, "afterwards", 1)
            await until(lambda: standby.get(THING, SCOPE, "afterwards") is not None)


async def test_a_bus_that_was_never_there_costs_latency_only(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = NatsServer(tmp_path)
    async with pair(tmp_path, postgres.database(), away, monkeypatch, looks=True) as (active, standby):
        for value in range(20):
            await put(active, f"x{value}", value)
        await until(lambda: standby.count(THING) == 20)
        await until(lambda: away.url in bell(standby).state.trouble)
        assert not is_connected(active)
        assert bell(active).counts == NotifierCounts(coalesced=19)
        assert bell(standby).counts == NotifierCounts()


async def test_a_hostile_publisher_costs_a_few_reads(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "IDLE_SECONDS", DEADLINE_SECONDS)  # none after the first that found nothing
    with nats_server.running(tmp_path) as nats:
        async with pair(tmp_path, postgres.database(), nats, monkeypatch) as (active, standby):
            await until(lambda: is_connected(active) and is_connected(standby))
            mine, counts = standby.lineage, bell(standby).counts
            subject = f"{SUBJECT}{mine}"
            await until(lambda: counts.reads == 1)  # the look after connecting
            nats.publish(subject, b"x" * 900_000)
            await until(lambda: counts.dropped == 1)
            garbage = [
                b"",
                b"\xff\x00" * 50,
                b"0" * 129,
                f"{mine} -1".encode(),
                f"{mine} {10**19}".encode(),
                f"{mine}  7".encode(),
                f"{mine} 7\n".encode(),
                message("b" * 32, FAR),
                f"{mine} ٣".encode(),
            ]
            for one in garbage:  # one at a time: all are looked at, and none is dropped
                before = counts.ignored
                nats.publish(subject, one)
                await until(lambda before=before: counts.ignored > before)  # type: ignore[misc]
            nats.publish(subject, b"x", headers=b"NATS/1.0 \xff\xff\xff\r\n\r\n")
            nats.publish(subject, message(mine, 0))
            await until(lambda: counts.known > 0)
            assert counts.heard == 0
            nats.publish(subject, *[message(mine, FAR)] * 5000)
            await until(lambda: counts.heard > 0)
            done = await put(active, "x", 1)
            await until(lambda: counts.heard + counts.known + counts.ignored > len(garbage) + 2)
            assert counts.reads <= 3
            assert is_connected(standby)
            monkeypatch.setattr(doorbell, "IDLE_SECONDS", 0.0)
            assert done.revision > 0


async def test_a_nats_that_hangs_is_given_up_and_found_again(
    tmp_path: Path, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbell, "CHECK_SECONDS", 0.2)
    with nats_server.running(tmp_path) as nats:
        async with pair(tmp_path, postgres.database(), nats, monkeypatch, answer_seconds=2.0) as (
            active,
            standby,
        ):
            await until(lambda: is_connected(active) and is_connected(standby))
            nats.freeze()
            await until(lambda: not is_connected(active) and not is_connected(standby))
            await put(active, "meanwhile", 1)
            nats.thaw()
            await until(lambda: standby.get(THING, SCOPE, "meanwhile") is not None)
