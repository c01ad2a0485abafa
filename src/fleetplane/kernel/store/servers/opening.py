"""A store on a database that several servers share: opened once it is this server's turn to write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import lineage
from fleetplane.kernel.store.bells.bus import Bus
from fleetplane.kernel.store.bells.notify import NotifyBus
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.servers.standby import Meanwhile, Standby
from fleetplane.kernel.store.settings import StoreSettings, place
from fleetplane.kernel.store.store import Store


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
        standby = await Standby.load(
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
    from fleetplane.kernel.store.bells.nats_bus import NatsBus

    return NatsBus(settings.bus)
