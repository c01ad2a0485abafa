"""A server among several: it loads and follows the store, and writes once it is its turn."""

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
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower
from fleetplane.kernel.store.servers.read_index import ReadIndex
from fleetplane.kernel.store.servers.seat import Seat
from fleetplane.kernel.store.settings import StoreSettings
from fleetplane.kernel.store.store import Store

Meanwhile = Callable[["Standby"], Coroutine[Any, Any, None]]
"""What a server does while it stands by. It ends by being cancelled, and fails without consequences."""


class Standby:
    """One process of a server."""

    def __init__(self, store: Store, seat: Seat, index: ReadIndex, server: str, boot: int) -> None:
        self.store = store
        """To be read and watched from the beginning; refuses writes until it is active."""
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
        boot = await engine.enlist(server)
        store = await Store.loaded(engine, settings, kinds=kinds, clock=clock, audit_key=audit_key)
        store.shared = True
        follower = Follower(engine, store._applier, {kind.name: kind for kind in kinds})
        if bus is not None:
            store.bell = Doorbell(
                bus, store.lineage, clock, known=lambda: store._applier.mark.number, read=follower.catch_up
            )
            store._applier.wrote = store.bell.ring
        seat = Seat(engine, store._applier, follower, clock)
        return cls(store, seat, ReadIndex(engine, store._applier, follower, seat, clock), server, boot)

    @asynccontextmanager
    async def active(self, meanwhile: Meanwhile | None = None) -> AsyncIterator[Store]:
        """Wait for this server's turn; while inside, it is the one that writes.

        The store's `writing()` raises when another server may have taken over. `meanwhile` runs while this
        server stands by, and has ended before it is active.
        """
        async with _ringing(self.store), contextlib.AsyncExitStack() as standing_by:
            if meanwhile is not None:
                await standing_by.enter_async_context(_beside(meanwhile(self)))
            try:
                author = await self.seat.wait(self._server, self._boot)
                async with self.store.written(author, self.seat.keep, self.seat.watch):
                    await standing_by.aclose()
                    # Nobody else can write: what assumes a database of its own is right.
                    self.store.exclusive = True
                    yield self.store
            finally:
                self.store._hub.close()
                await self.seat.leave()


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
