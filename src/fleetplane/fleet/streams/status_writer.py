"""Writing down in which state agents are, many at a time.

Whoever sees a change notes whose it is. Soon after, all that were noted are looked at and written
in one transaction: a fleet that comes back at once costs dozens of transactions, not thousands.
What is written follows from what is so at that moment, so notes may repeat and come late; a later
note about the same agent takes the place of an earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NoReturn, TypeVar

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError

N = TypeVar("N")

BATCH = 256
"""Records in one transaction, so that it never holds up other writers for long."""
GATHER_SECONDS = 0.05
"""How long the first of a batch waits for others."""
RETRY_SECONDS = 1.0
"""After the store refused: nothing is lost meanwhile, as what is so then is written then."""


class StatusWriter(Generic[N]):
    def __init__(
        self,
        clock: Clock,
        write: Callable[[Sequence[tuple[str, N]]], Awaitable[None]],
        *,
        failed: Callable[[int, FleetplaneError], None],
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        """`write` gets a batch of names with their notes; `failed` gets how many could not be written."""
        self._gather_seconds = gather_seconds
        self._clock = clock
        self._write = write
        self._failed = failed
        self._noted: dict[str, N] = {}
        """By name; bounded by the number of agents there are."""
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<StatusWriter noted={len(self._noted)}>"

    def note(self, name: str, note: N) -> None:
        """Something about this agent may be worth writing down."""
        self._noted[name] = note
        self._news.set()

    async def flush(self) -> None:
        """Write all that was noted now, or raise."""
        while self._noted:
            await self._write(self._taken())

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await self._news.wait()
            await self._clock.sleep(self._gather_seconds)
            self._news.clear()
            while self._noted:
                batch = self._taken()
                try:
                    await self._write(batch)
                except FleetplaneError as error:
                    self._failed(len(batch), error)
                    self._noted = {**dict(batch), **self._noted}
                    await self._clock.sleep(RETRY_SECONDS)

    def _taken(self) -> Sequence[tuple[str, N]]:
        taken = [(name, self._noted[name]) for name in tuple(self._noted)[:BATCH]]
        for name, _ in taken:
            del self._noted[name]
        return taken
