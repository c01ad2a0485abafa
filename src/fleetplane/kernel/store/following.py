"""Following one kind from now on, for whoever may fall behind and begins again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from fleetplane.kernel.errors import Compacted
from fleetplane.kernel.events import EventBatch
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store.store import Store
from fleetplane.kernel.watch import Watch

Begin = Callable[[Watch], Awaitable[None] | None]


async def follow(
    store: Store,
    kind: AnyKind,
    scope: str = "",
    *,
    begin: Begin | None = None,
    again: Begin | None = None,
) -> AsyncGenerator[EventBatch]:
    """Everything that changes from now on, until cancelled.

    `begin` looks at what is there already, and again whenever more has happened than is kept: what it does
    not see comes afterwards. It is given the watch that has just been opened. `again` is for those who look
    in the second case only.
    """
    look = begin
    while True:
        with store.watch(kind, scope) as watch:
            if look is not None and (looking := look(watch)) is not None:
                await looking
            look = again or begin
            try:
                async for batch in watch:
                    yield batch
            except Compacted:
                continue
            return
