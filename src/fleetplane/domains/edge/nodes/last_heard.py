"""When a node was last heard by any of several servers on one database.

Workers report by single calls, which a balancer spreads, and a daemon's heartbeats are known to the server
that has its stream. Each server writes down whom it hears and reads what all have written, every few seconds;
in between it answers from memory. On a database file there is nobody else, and nothing to be known.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import NoReturn

import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

READ_SECONDS = 5.0


class LastHeard:
    def __init__(self, store: Store, clock: Clock, *, channel: str) -> None:
        self._heard = LastSeen(store, clock, channel=channel) if store.shared else None
        self._clock = clock
        self._channel = channel
        self._at_ns: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<LastHeard {self._channel} {len(self._at_ns)}>"

    @property
    def is_shared(self) -> bool:
        """Whether other servers hear nodes, too."""
        return self._heard is not None

    def note(self, node_id: str) -> None:
        """The node was heard here, now."""
        if self._heard is not None:
            self._heard.note(node_id)

    def at_ns(self, node_id: str) -> int | None:
        """When any server heard it, as of some seconds ago; None if none did, or there are no others."""
        return self._at_ns.get(node_id)

    def is_settled(self, term_seconds: float) -> bool:
        """Whether a node that nobody heard for so long is silent, as far as other servers are concerned."""
        return self._heard is None or self._heard.is_settled(term_seconds)

    async def run_here(self) -> None:
        """Write and read, until cancelled."""
        if self._heard is None:
            await asyncio.get_running_loop().create_future()
            return
        async with Boundary() as tasks:
            tasks.keep(f"{self._channel}/heard", self._heard.run_here)
            tasks.keep(f"{self._channel}/last-heard", partial(self._read, self._heard))

    async def _read(self, heard: LastSeen) -> NoReturn:
        while True:
            try:
                seconds = await heard.read()
            except FleetplaneError as error:
                log.warning("edge.last_heard_not_read", channel=self._channel, error=error.message)
            else:
                now_ns = self._clock.now_ns()
                self._at_ns = {node_id: now_ns - round(ago * 1e9) for node_id, ago in seconds.items()}
            await self._clock.sleep(READ_SECONDS)
