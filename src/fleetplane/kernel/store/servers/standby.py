"""A server among several: it loads and follows the store, writes, and is active once it is its turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store.bells.bus import Bus
from fleetplane.kernel.store.bells.doorbell import Doorbell
from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower
from fleetplane.kernel.store.servers.level_keeper import LevelKeeper
from fleetplane.kernel.store.servers.read_index import ReadIndex
from fleetplane.kernel.store.servers.seat import Seat
from fleetplane.kernel.store.servers.time import DatabaseClock
from fleetplane.kernel.store.settings import StoreSettings
from fleetplane.kernel.store.store import Store, first

Meanwhile = Callable[["Standby"], Coroutine[Any, Any, None]]
"""What a server does while it stands by. It ends by being cancelled, and fails without consequences."""


class Standby:
    """One process of a server."""

    def __init__(self, store: Store, seat: Seat, index: ReadIndex, server: str, boot: int) -> None:
        self.store = store
        """To be read, watched and written to from the beginning."""
        self.seat = seat
        self.index = index
        """To be asked before something is read."""
        self._server = server
        self._boot = boot

    def __repr__(self) -> str:
        return f"<Standby {self._server} boot={self._boot}>"

    @classmethod
    async def load(
        cls,
        engine: SharedEngine,
        settings: StoreSettings,
        *,
        server: str,
        kinds: Iterable[AnyKind],
        clock: Clock,
        audit_key: bytes = b"",
        bus: Bus | None = None,
    ) -> Standby:
        kinds = list(kinds)
        boot = await engine.enlist(server, settings.levels)
        time = DatabaseClock(clock)
        store = await Store.loaded(engine, settings, kinds=kinds, clock=time, audit_key=audit_key)
        store.shared = True
        follower = Follower(engine, store._applier, store._kinds)
        if bus is not None:
            store.bell = Doorbell(
                bus, store.lineage, clock, known=lambda: store._applier.mark.number, read=follower.catch_up
            )
            store._applier.wrote = store.bell.ring
        store._writer.follower = follower
        seat = Seat(engine, store._applier, follower, time)
        seat.author = GroupAuthor(server, boot)
        await seat.renew()  # before anything is dated
        index = ReadIndex(engine, store._applier, follower, seat, time)
        store._confirm = index.confirm
        return cls(store, seat, index, server, boot)

    @asynccontextmanager
    async def active(self, meanwhile: Meanwhile | None = None) -> AsyncIterator[Store]:
        """Write, and wait for this server's turn; while inside, it is the active one.

        The store's `writing()` raises when another server may have taken over. `meanwhile` runs while this
        server stands by, and has ended before it is active.
        """
        store = self.store
        turn = asyncio.get_running_loop().create_future()
        try:
            guest = GroupAuthor(self._server, self._boot)
            async with _ringing(store), store.written(guest, lambda: self._sit(turn)):
                async with contextlib.AsyncExitStack() as standing_by:
                    if meanwhile is not None:
                        await standing_by.enter_async_context(_beside(meanwhile(self)))
                    await asyncio.wait([turn, store._writing], return_when=asyncio.FIRST_COMPLETED)
                if store._writing.done():
                    store._writing.result()
                async with store.led():
                    store.exclusive = True  # the others that write run no controllers
                    yield store
        finally:
            store._hub.close()
            await self.seat.leave()

    async def _sit(self, turn: asyncio.Future[None]) -> None:
        """Wait for this server's turn, say so, and keep the seat until it is lost."""
        self.store._writer.author = await self.seat.wait(self._server, self._boot)
        self.store.succeeds = self.seat.has_stood_by
        if not turn.done():
            turn.set_result(None)
        await first(self.seat.keep, self.seat.watch, self.seat.follow, self._rise)

    async def _rise(self) -> None:
        """See that the level rises once every server supports it, for as long as this one is active."""
        await LevelKeeper(self.store, delays=self.seat.author.term > 1).run()


@asynccontextmanager
async def _ringing(store: Store) -> AsyncIterator[None]:
    if store.bell is None:
        yield
        return
    async with _beside(store.bell.run(), "bell"):
        yield


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None], name: str = "standing-by") -> AsyncIterator[None]:
    """Do something from entry to exit."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
