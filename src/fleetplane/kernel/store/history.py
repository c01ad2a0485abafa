"""How much of the past is kept for watches to resume from: so many revisions, bytes and days.

The writer trims by revisions as it goes. What the log weighs, and how old it is, is looked at once a
minute, beside the writer; it is then trimmed in small steps, so that no commit is slow.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store.store import Store

log = structlog.get_logger(__name__)

LOOK_SECONDS = 60.0
SLACK = 0.9
"""Trimmed to this share of the bytes, so that not every look has to."""
STEP_REVISIONS = 2000
DAY_NS = 86_400 * 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryBounds:
    size_bytes: int
    age_days: float


class HistoryKeeper:
    def __init__(self, store: Store, clock: Clock, bounds: HistoryBounds) -> None:
        self._store = store
        self._clock = clock
        self._bounds = bounds

    def __repr__(self) -> str:
        return f"<HistoryKeeper {self._bounds}>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            try:
                await self.sweep()
            except Exception as error:  # one that we cannot explain is a defect: its place is wanted
                known = isinstance(error, FleetplaneError)
                log.warning("store.history_not_trimmed", error=str(error), exc_info=None if known else error)

    async def sweep(self) -> int:
        """Trim what is too much or too old; returns how many revisions went."""
        begin = self._store.statistics().compacted
        horizon = min(max(await self._by_size(), await self._by_age(), begin), self._store.revision)
        for step in range(begin, horizon, STEP_REVISIONS):
            await self._store.compact(min(step + STEP_REVISIONS, horizon) + 1)
            await asyncio.sleep(0)
        return horizon - begin

    async def _by_size(self) -> int:
        size = await self._store.history_bytes()
        if size <= self._bounds.size_bytes:
            return 0
        return await self._store.history_horizon(size - round(self._bounds.size_bytes * SLACK))

    async def _by_age(self) -> int:
        """The revision of the last entry that is too old, by the audit log: it knows when everything was."""
        oldest_ns = self._clock.now_ns() - round(self._bounds.age_days * DAY_NS)
        low, high, found = 1, self._store.audit_head().seq, 0
        while low <= high:
            middle = (low + high) // 2
            row = await self._store.audit_row(middle)
            if row is None:  # archived, and so older
                low = middle + 1
                continue
            entry = audit.read(row)
            if entry.at_ns < oldest_ns:
                low, found = middle + 1, entry.revision
            else:
                high = middle - 1
        return found
