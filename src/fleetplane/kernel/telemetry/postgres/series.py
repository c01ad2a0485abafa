"""Which series there are, where their counters stand, and whose give way: shared with other servers.

What a server knows of a series is kept in memory. Other servers may have written points of it since: where a
counter stands is therefore asked anew for every batch, with one statement. A series is deleted when no day of
it is kept any more, which nobody can meet who writes to it today; one that gave way is known to be gone by
the generation, a number that every batch looks at. Quotas are counted again at every sweep, so that servers
together may exceed them by what came in a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetplane.kernel.telemetry.engine import SeriesState
from fleetplane.kernel.telemetry.postgres.link import transaction
from fleetplane.kernel.telemetry.series_quota import EVICT_SHARE, Admission, Admissions, SeriesQuota
from fleetplane.kernel.telemetry.values import TelemetryLimits

Key = tuple[str, str, str]
"""Scope, name and source."""

_COUNT: Final = "SELECT scope, source, count(*) FROM telemetry_series GROUP BY scope, source"
_GENERATION: Final = "SELECT generation FROM telemetry_meta"
_FIND: Final = (
    "SELECT s.id, s.scope, s.name, s.source, s.day FROM telemetry_series s"
    " JOIN unnest($1::text[], $2::text[], $3::text[]) AS w(scope, name, source)"
    " ON s.scope = w.scope AND s.name = w.name AND s.source = w.source"
)
_INSERT: Final = (
    "INSERT INTO telemetry_series (scope, name, source, day)"
    " SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::int4[])"
    " ON CONFLICT DO NOTHING RETURNING id, scope, name, source, day"
)
_TOUCH: Final = (
    "UPDATE telemetry_series s SET day = greatest(s.day, w.day)"
    " FROM unnest($1::int8[], $2::int4[]) AS w(id, day) WHERE s.id = w.id RETURNING s.id"
)
_LAST: Final = (
    "SELECT w.id, p.at_ns, p.value, p.base FROM unnest($1::int8[], $2::int8[]) AS w(id, after)"
    " CROSS JOIN LATERAL (SELECT at_ns, value, base FROM telemetry_points"
    " WHERE series = w.id AND at_ns > w.after ORDER BY at_ns DESC LIMIT 1) p"
)
_STALEST: Final = (
    "SELECT id, name FROM telemetry_series WHERE scope = $1 AND source = $2 ORDER BY day, id LIMIT $3"
)
_DROP_POINTS: Final = (
    "WITH gone AS (DELETE FROM telemetry_points WHERE series = ANY($1::int8[])"
    " RETURNING at_ns / 86400000000000 AS day) SELECT day, count(*) FROM gone GROUP BY day"
)


@dataclass(slots=True)
class _Known:
    state: SeriesState
    day: int
    """The newest that the database knows it was written on."""


class KnownSeries:
    def __init__(self, limits: TelemetryLimits) -> None:
        self._limits = limits
        self._known: dict[Key, _Known] = {}
        self._generation = -1
        self.quota = SeriesQuota(limits)
        self.evicted = 0
        """Of the batch."""
        self.unshared: Counter[tuple[int, int, str, str]] = Counter()
        """Points that gave way, by day, channel 0, scope and source."""

    def __repr__(self) -> str:
        return f"<KnownSeries {len(self._known)} of {self.quota.total}>"

    def forget(self) -> None:
        """What was learnt may not be so."""
        self._known.clear()

    async def count(self, connection: Any) -> None:
        quota = SeriesQuota(self._limits)
        for scope, source, number in await connection.fetch(_COUNT):
            quota.count(scope, source, number)
        self.quota = quota

    async def resolve(
        self, connection: Any, wanted: Mapping[Key, int], counters: Collection[Key], admissions: Admissions
    ) -> Mapping[Key, SeriesState]:
        """Where each series stands; without those that there is no room for. By key, its newest day."""
        self.evicted = 0
        generation = await connection.fetchval(_GENERATION)
        if generation != self._generation:
            self.forget()
            self._generation = generation
        await self._find(connection, [key for key in wanted if key not in self._known])
        await self._touch(connection, wanted)
        if missing := [key for key in wanted if key not in self._known]:
            await self._make(connection, missing, wanted, admissions)
        found = {key: self._known[key].state for key in wanted if key in self._known}
        await self._catch_up(connection, [found[key] for key in counters if key in found])
        return found

    async def _find(self, connection: Any, keys: Sequence[Key]) -> None:
        if keys:
            for number, *key, day in await connection.fetch(_FIND, *_columns(keys)):
                self._known[key[0], key[1], key[2]] = _Known(SeriesState(number), day)

    async def _touch(self, connection: Any, wanted: Mapping[Key, int]) -> None:
        """Note that series are written on a day for the first time."""
        first = {
            known.state.id: (key, day)
            for key, day in wanted.items()
            if (known := self._known.get(key)) is not None and known.day < day
        }
        if not first:
            return
        ids = sorted(first)
        there = await connection.fetch(_TOUCH, ids, [first[number][1] for number in ids])
        for (number,) in there:
            key, day = first.pop(number)
            self._known[key].day = day
        for key, _ in first.values():  # deleted since it was last written to
            del self._known[key]

    async def _make(
        self, connection: Any, missing: Sequence[Key], wanted: Mapping[Key, int], admissions: Admissions
    ) -> None:
        admitted = []
        for key in missing:
            scope, _, source = key
            found = admissions.admit(scope, source)
            if found is Admission.EVICT:
                await self._evict(connection, *self.quota.largest(), admissions)
            if found in (Admission.YES, Admission.EVICT):
                self.quota.count(scope, source)
                admitted.append(key)
        if not admitted:
            return
        admitted.sort()  # so that two servers do not wait for each other
        days = [wanted[key] for key in admitted]
        for number, *key, day in await connection.fetch(_INSERT, *_columns(admitted), days):
            self._known[key[0], key[1], key[2]] = _Known(SeriesState(number), day)
        await self._find(connection, [key for key in admitted if key not in self._known])

    async def _evict(self, connection: Any, scope: str, source: str, admissions: Admissions) -> None:
        """Drop the stalest series of a source that has more than others."""
        before = self.quota.of_source(scope, source)
        async with transaction(connection):
            rows = await connection.fetch(_STALEST, scope, source, max(1, int(before * EVICT_SHARE)))
            ids = [row["id"] for row in rows]
            for day, count in await connection.fetch(_DROP_POINTS, ids):
                self.unshared[day, 0, scope, source] += count
            await connection.execute("DELETE FROM telemetry_series WHERE id = ANY($1::int8[])", ids)
            self._generation = await connection.fetchval(
                "UPDATE telemetry_meta SET generation = generation + 1 RETURNING generation"
            )
        for row in rows:
            self._known.pop((scope, row["name"], source), None)
        # Without rows, what was counted is gone already: another server was first.
        self.quota.count(scope, source, -max(1, len(rows)))
        self.evicted += len(rows)
        admissions.evicted(scope, source, before=before)

    async def _catch_up(self, connection: Any, states: Iterable[SeriesState]) -> None:
        """Bring counters to the last point that any server has written."""
        by_id = {state.id: state for state in states}
        if not by_id:
            return
        ids = list(by_id)
        for number, at_ns, value, base in await connection.fetch(
            _LAST, ids, [by_id[number].at_ns for number in ids]
        ):
            state = by_id[number]
            state.at_ns, state.value, state.base = at_ns, value, base


def _columns(keys: Sequence[Key]) -> tuple[list[str], list[str], list[str]]:
    return [key[0] for key in keys], [key[1] for key in keys], [key[2] for key in keys]
