"""When the level of a shared store rises: all servers that run have supported the next one for a while.

Runs on the active server. That everybody is able to is a courtesy to older servers, which could not go on;
what keeps them from losing anything is that they read of it before they write again (`level.py`). Until
the level has risen, a server of the older release can be started again; how long that is, at least, is a
setting.
"""

from __future__ import annotations

from typing import NoReturn

import structlog

from fleetplane.kernel.errors import Unavailable
from fleetplane.kernel.store.servers import level, seat
from fleetplane.kernel.store.store import Store

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
        now, possible = store.clock.monotonic(), level.common(await engine.supported(seat.LIFE_SECONDS))
        if possible != self._possible:
            self._possible, self._since = possible, now
            if possible is not None and possible > store.level and self._delay_seconds:
                log.info("store.level_can_rise", to=possible, in_seconds=self._delay_seconds)
        if possible is not None and possible > store.level and now - self._since >= self._delay_seconds:
            await store.rise(possible)
