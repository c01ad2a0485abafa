"""What every bus owes that carries a bell: PostgreSQL's NOTIFY, and NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from support.shared import nats_server
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.storekit import DEADLINE_SECONDS

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store.notifiers.nats import NatsBus
from fleetplane.kernel.store.notifiers.notifier import Bus, BusKind, NatsSettings
from fleetplane.kernel.store.notifiers.postgres import NotifyBus

MINE, OTHER = "a" * 32, "b" * 32


@dataclass
class Rig:
    bus: Bus
    cut: Callable[[], Awaitable[None]]
    """End every connection from the other side."""
    nowhere: Bus


@pytest.fixture(params=[BusKind.NOTIFY, BusKind.NATS])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    nobody = f"127.0.0.1:{free_port()}"
    if request.param is BusKind.NATS:
        with nats_server.running(tmp_path) as nats:

            async def kill() -> None:
                nats.stop()

            nowhere = NatsBus(NatsSettings(servers=[f"nats://{nobody}"]))
            yield Rig(bus=NatsBus(NatsSettings(servers=[nats.url])), cut=kill, nowhere=nowhere)
        return
    postgres: PostgresServer = request.getfixturevalue("postgres")
    url = postgres.database()

    async def terminate() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await connection.close()

    yield Rig(
        bus=NotifyBus(url), cut=terminate, nowhere=NotifyBus(f"postgresql://postgres@{nobody}/postgres")
    )


class Ears:
    """Everything that was heard on a line."""

    def __init__(self) -> None:
        self.messages: list[bytes | None] = []
        self._more = asyncio.Event()

    def heard(self, found: bytes | None) -> None:
        self.messages.append(found)
        self._more.set()

    async def until(self, message: bytes) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while message not in self.messages:
                self._more.clear()
                await self._more.wait()


async def test_who_listens_hears_what_another_rings(rig: Rig) -> None:
    one, two = Ears(), Ears()
    async with rig.bus.line(MINE, one.heard) as ringing, rig.bus.line(MINE, two.heard) as listening:
        await ringing.ring(b"from one")
        await two.until(b"from one")
        await listening.ring(b"from two")
        await one.until(b"from two")
        await listening.check()


async def test_a_line_is_rung_and_checked_at_the_same_time(rig: Rig) -> None:
    ears = Ears()
    async with rig.bus.line(MINE, ears.heard) as line:
        await asyncio.gather(*(line.ring(b"%d" % number) for number in range(9)), line.check(), line.check())
        await asyncio.gather(*(ears.until(b"%d" % number) for number in range(9)))


async def test_installations_do_not_hear_each_other(rig: Rig) -> None:
    mine, other = Ears(), Ears()
    async with rig.bus.line(MINE, mine.heard) as ringing, rig.bus.line(OTHER, other.heard) as elsewhere:
        await ringing.ring(b"mine")
        await elsewhere.ring(b"other")
        await mine.until(b"mine")
        await other.until(b"other")  # what was rung before it would have come before it
        assert b"mine" not in other.messages
        await ringing.ring(b"last")
        await mine.until(b"last")
        assert b"other" not in mine.messages


async def test_a_line_that_is_cut_says_so_and_cannot_be_rung(rig: Rig) -> None:
    async with rig.bus.line(MINE, Ears().heard) as line:
        await rig.cut()
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert await line.lost()
        with pytest.raises(Unavailable):
            await line.ring(b"in vain")
        with pytest.raises(Unavailable):
            await line.check()


async def test_a_bus_that_is_not_there_is_unavailable(rig: Rig) -> None:
    with pytest.raises(Unavailable):
        async with rig.nowhere.line(MINE, Ears().heard):
            pass
