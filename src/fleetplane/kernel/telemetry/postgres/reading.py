"""Questions to PostgreSQL, each bounded in time and in what it returns."""

# ruff: noqa: S608  # names of tables are constants, values are parameters
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from fleetplane.kernel.telemetry.postgres import summing
from fleetplane.kernel.telemetry.postgres.encoding import text
from fleetplane.kernel.telemetry.postgres.link import SNAPSHOT, PostgresLink, transaction
from fleetplane.kernel.telemetry.postgres.schema import LINES, POINTS
from fleetplane.kernel.telemetry.questions import check_buckets, moment, page_start
from fleetplane.kernel.telemetry.summaries import FoundSummary, cover
from fleetplane.kernel.telemetry.values import (
    MOMENT_LIMIT_NS,
    FoundLine,
    LinePage,
    LineQuery,
    PointBucket,
    Sample,
)
from fleetplane.kernel.values.times import NS

_SERIES: Final = (
    "telemetry_series s WHERE s.scope = $1 AND s.name = $2 AND ($3::text[] IS NULL OR s.source = ANY($3))"
)
_LAST: Final = (
    f"SELECT p.at_ns, p.value + p.base AS value FROM {POINTS} p WHERE p.series = s.id"
    " AND p.at_ns >= %s AND p.at_ns < %s ORDER BY p.at_ns %s LIMIT %s"
)
_LATEST: Final = (
    "SELECT s.source, f.at_ns, f.value FROM telemetry_series s CROSS JOIN LATERAL"
    f" ({_LAST % ('$4', '$5', 'DESC', '$6')}) f WHERE {_SERIES.split(' WHERE ')[1]}"
    " ORDER BY s.source, f.at_ns DESC"
)
_GROWTH: Final = (
    "SELECT s.source, l.value - coalesce(b.value, f.value) FROM telemetry_series s"
    f" CROSS JOIN LATERAL ({_LAST % ('$4', '$5', 'DESC', '1')}) l"
    f" LEFT JOIN LATERAL ({_LAST % ('$6', '$4', 'DESC', '1')}) b ON true"
    f" LEFT JOIN LATERAL ({_LAST % ('$4', '$5', 'ASC', '1')}) f ON b.value IS NULL"
    f" WHERE {_SERIES.split(' WHERE ')[1]}"
)
_BUCKETS: Final = (
    f"SELECT (at_ns - $4) / $6 AS bucket, count(*), sum(value), min(value), max(value) FROM {POINTS}"
    f" WHERE series = ANY(ARRAY(SELECT s.id FROM {_SERIES})) AND at_ns >= $4 AND at_ns < $5"
    " GROUP BY bucket ORDER BY bucket"
)
_CHANNEL: Final = "SELECT id FROM telemetry_channels WHERE scope = $1 AND stream = $2"
_READ: Final = (
    "SELECT at, source, subject, body FROM telemetry_summaries"
    " WHERE channel = $1 AND width = $2 AND at >= $3 AND at < $4 ORDER BY at"
)


class Questions:
    def __init__(self, link: PostgresLink) -> None:
        self._link = link

    def __repr__(self) -> str:
        return f"<Questions {self._link!r}>"

    async def latest(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        count: int,
    ) -> Mapping[str, Sequence[Sample]]:
        found: dict[str, list[Sample]] = {}
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_LATEST, *named, moment(from_ns), moment(to_ns), count)
        for source, at_ns, value in rows:
            found.setdefault(source, []).append(Sample(at_ns=at_ns, value=value))
        return found

    async def growth(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        lookback_ns: int,
    ) -> Mapping[str, float]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_GROWTH, *named, from_ns, to_ns, from_ns - lookback_ns)
        return dict(rows)

    async def buckets(
        self,
        scope: str,
        series: str,
        sources: Collection[str] | None,
        *,
        from_ns: int,
        to_ns: int,
        width_ns: int,
    ) -> Sequence[PointBucket]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        check_buckets(from_ns, to_ns, width_ns)
        named = _named(scope, series, sources)
        async with self._link.held() as ask:
            rows = await ask.fetch(_BUCKETS, *named, from_ns, to_ns, min(width_ns, MOMENT_LIMIT_NS))
        return [
            PointBucket(
                at_ns=from_ns + index * width_ns, count=count, total=total, lowest=lowest, highest=highest
            )
            for index, count, total, lowest, highest in rows
        ]

    async def summaries(
        self, scope: str, stream: str, *, from_ns: int, to_ns: int, step_seconds: int
    ) -> Sequence[FoundSummary]:
        from_ns, to_ns = moment(from_ns), moment(to_ns)
        found: list[FoundSummary] = []
        async with self._link.held() as ask, transaction(ask, SNAPSHOT):
            channel = await ask.fetchval(_CHANNEL, text(scope), text(stream))
            if channel is None:
                return []
            folded = (await summing.hold_folded(ask, [channel], hold=False))[channel]
            parts = cover(from_ns // NS, -(-to_ns // NS), folded, step_seconds=step_seconds)
            for width, start, stop in parts:
                found += [
                    FoundSummary(width_seconds=width, at_seconds=at, source=name, subject=subject, body=body)
                    for at, name, subject, body in await ask.fetch(_READ, channel, width, start, stop)
                ]
        return found

    async def lines(self, query: LineQuery) -> LinePage:
        last_ns, last_mark = page_start(query)
        async with self._link.held() as ask, transaction(ask, SNAPSHOT):
            channel = await ask.fetchval(_CHANNEL, text(query.scope), text(query.stream))
            if channel is None:
                return LinePage(lines=(), total=0, cursor="")
            matches, given = _matches(query, channel)
            total = await ask.fetchval(f"SELECT count(*) {matches}", *given)
            here = len(given)
            rows = await ask.fetch(
                f"SELECT at_ns, mark, source, body {matches} AND at_ns <= ${here + 1}"
                f" AND (at_ns, mark) < (${here + 1}, ${here + 2}::int8)"
                f" ORDER BY at_ns DESC, mark DESC LIMIT ${here + 3}",
                *given,
                last_ns,
                last_mark,
                query.limit + 1,
            )
        more, rows = len(rows) > query.limit, rows[: query.limit]
        cursor = f"{rows[-1]['at_ns']}.{rows[-1]['mark']}" if more else ""
        found = [FoundLine(source=row["source"], at_ns=row["at_ns"], body=row["body"]) for row in rows]
        return LinePage(lines=found, total=total, cursor=cursor)


def _named(scope: str, series: str, sources: Collection[str] | None) -> tuple[str, str, Sequence[str] | None]:
    return text(scope), text(series), None if sources is None else [text(one) for one in sources]


def _matches(query: LineQuery, channel: int) -> tuple[str, list[Any]]:
    """Only what is asked for: without further conditions the index alone answers a count."""
    given: list[Any] = [channel, moment(query.from_ns), moment(query.to_ns)]
    wanted = f"FROM {LINES} WHERE channel = $1 AND at_ns >= $2 AND at_ns < $3"
    if query.code_low > 0 or query.code_high < MOMENT_LIMIT_NS:
        given += [moment(query.code_low), moment(query.code_high)]
        wanted += f" AND code BETWEEN ${len(given) - 1} AND ${len(given)}"
    for column in ("source", "subject", "action"):
        if asked := getattr(query, column):
            given.append(text(asked))
            wanted += f" AND {column} = ${len(given)}"
    return wanted, given
