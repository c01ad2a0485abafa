"""One server of several on a shared database: it loads and follows the store, and may become the leader.

The leader also raises the level of the store once all running servers have supported the next level for
a set time. Servers read of the new level before they write again (`level.py`), so none loses anything;
the wait lets an operator start a server of the older release again until then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import lineage
from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.notifiers.notifier import Bus, CommitNotifier
from fleetplane.kernel.store.notifiers.postgres import NotifyBus
from fleetplane.kernel.store.servers import leader_lease, level
from fleetplane.kernel.store.servers.engine import SharedEngine
from fleetplane.kernel.store.servers.follower import Follower
from fleetplane.kernel.store.servers.leader_lease import DatabaseClock, LeaderLease, ReadIndex
from fleetplane.kernel.store.settings import StoreSettings, place
from fleetplane.kernel.store.store import Store, first

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0
FORGET_SECONDS = 60.0
"""After the last write that sealed: a server that has not read it by then begins anew."""


class LevelKeeper:
    def __init__(self, store: Store, *, delays: bool = True) -> None:
        """Without a delay only in a new store, which no older server can have used."""
        self._store = store
        self._delay_seconds = store.level_delay_seconds if delays else 0.0
        self._possible: int | None = None
        """What all servers that run support."""
        self._since = 0.0
        """For how long they have, by the monotonic clock."""
        self._sealed: tuple[float, int] | None = None
        """When all that is stored was found sealed, and the revision then."""

    def __repr__(self) -> str:
        return f"<LevelKeeper level={self._store.level} possible={self._possible}>"

    async def run(self) -> NoReturn:
        """Look again and again, until cancelled."""
        while True:
            try:
                await self._look()
                await self._seal()
            except Unavailable as error:
                log.warning("store.level_not_raised", error=error.message)
            await self._store.clock.sleep(LOOK_SECONDS)

    async def _seal(self) -> None:
        """Seal what was stored before the level rose, and let go of its history once servers have read on."""
        now = self._store.clock.monotonic()
        if self._sealed is None:
            if self._store.seals:
                await self._store.seal_stored()
                self._sealed = now, self._store.revision
        elif now - self._sealed[0] >= FORGET_SECONDS:
            await self._store.forget_unsealed(self._sealed[1])

    async def _look(self) -> None:
        store, engine = self._store, self._store.shared_engine
        if engine is None or store.level >= store.levels.highest:
            return
        now, possible = (
            store.clock.monotonic(),
            level.common(await engine.supported(leader_lease.LIFE_SECONDS)),
        )
        if possible != self._possible:
            self._possible, self._since = possible, now
            if possible is not None and possible > store.level and self._delay_seconds:
                log.info("store.level_can_rise", to=possible, in_seconds=self._delay_seconds)
        if possible is not None and possible > store.level and now - self._since >= self._delay_seconds:
            await store.rise(possible)


Meanwhile = Callable[["Replica"], Coroutine[Any, Any, None]]
"""What a server does while it stands by. It ends by being cancelled, and fails without consequences."""


class Replica:
    """One process of a server."""

    def __init__(self, store: Store, seat: LeaderLease, index: ReadIndex, server: str, boot: int) -> None:
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
    ) -> Replica:
        kinds = list(kinds)
        boot = await engine.enlist(server, settings.levels)
        time = DatabaseClock(clock)
        store = await Store.loaded(engine, settings, kinds=kinds, clock=time, audit_key=audit_key)
        store.shared = True
        follower = Follower(engine, store._applier, store._kinds)
        if bus is not None:
            store.bell = CommitNotifier(
                bus, store.lineage, clock, known=lambda: store._applier.mark.number, read=follower.catch_up
            )
            store._applier.wrote = store.bell.ring
        store._writer.follower = follower
        seat = LeaderLease(engine, store._applier, follower, time)
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


@asynccontextmanager
async def opened(
    settings: StoreSettings,
    *,
    kinds: Iterable[AnyKind],
    clock: Clock,
    audit_key: Callable[[bool], bytes] | None = None,
    meanwhile: Meanwhile | None = None,
) -> AsyncIterator[Store]:
    """Load and follow; yields when this server is the one that writes. `meanwhile` runs until then.

    Refuses a database that is older than what this server has seen, as the mark in its data directory says.
    """
    engine = await PostgresEngine.open(
        settings.url, first_revision=settings.first_revision, levels=settings.levels
    )
    try:
        beside = lineage.MarkFile(settings.path)
        recorded = beside.read()
        if recorded is not None and recorded.lineage in await engine.replaced():
            recorded = None  # its owner gave that lineage up, for all servers
        is_new = await lineage.check_whole(engine, place(settings.url), recorded)
        key = audit_key(is_new) if audit_key is not None else b""
        standby = await Replica.load(
            engine,
            settings,
            server=settings.server,
            kinds=kinds,
            clock=clock,
            audit_key=key,
            bus=_bus(settings),
        )
        async with lineage.kept(beside) as keeper:
            keeper.follow(standby.store._recorded)
            async with standby.active(meanwhile) as store:
                yield store
    finally:
        await engine.close()


def _bus(settings: StoreSettings) -> Bus:
    if settings.bus is None:
        return NotifyBus(settings.url)
    from fleetplane.kernel.store.notifiers.nats import NatsBus

    return NatsBus(settings.bus)
