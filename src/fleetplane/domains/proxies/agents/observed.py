"""Logs and figures of proxies' agents, as the resource API tells them.

Agents send what NGINX and they themselves write; the server keeps it. Following means to look again, once a
second, for what was not told yet: lines have ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final

from fleetplane.domains.proxies.agents.ports import (
    LEVELS,
    AccessLogEntry,
    AgentLogQuery,
    ErrorLogEntry,
    ErrorQuery,
    ReportedRecords,
)
from fleetplane.fleet.figures import Figures
from fleetplane.fleet.resources.declaration import LogCall, LogLine
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.times import NS

ACCESS: Final = "access"
SOURCES: Final = (ACCESS, "nginx_error", "agent")
BACK_NS: Final = 7 * 86_400 * NS
"""How far back lines are looked for."""
LOOK_SECONDS: Final = 1.0
PAGE: Final = 200
"""Lines of one look at a log: what is told late, behind so many newer ones, is not followed."""
PAGES: Final = 10
"""Of one look: two thousand lines a second are followed, no more."""
TOLD_LIMIT: Final = 2 * PAGE * PAGES
MINUTE_NS: Final = 60 * NS


async def logs(call: LogCall) -> AsyncGenerator[LogLine, None]:
    """Requests, and what NGINX and the agent complain about, in order of time."""
    query, domain = call.query, call.domain
    if query.level and query.level not in LEVELS:
        raise InvalidArgument(f"is not one of {', '.join(LEVELS)}", field="level")
    if query.source and query.source not in SOURCES:
        raise InvalidArgument(f"is not one of {', '.join(SOURCES)}", field="source")
    reader = _LogFollower(call, domain.records)
    begun_ns = domain.clock.now_ns()
    # What is there is read as far as it could be met again, whether it is told or not.
    limit = PAGE * PAGES if query.follow else query.tail
    there = await reader.look(begun_ns, from_ns=begun_ns - BACK_NS, limit=limit)
    for line in there[len(there) - min(query.tail, len(there)) :]:
        yield line
    while query.follow:
        await domain.clock.sleep(LOOK_SECONDS)
        for line in await reader.look(
            domain.clock.now_ns(), from_ns=begun_ns - MINUTE_NS, limit=PAGE * PAGES
        ):
            yield line


class _LogFollower:
    """One reader of one agent's log, with what it was told."""

    def __init__(self, call: LogCall, records: ReportedRecords) -> None:
        self._agent, self._query = call.stored, call.query
        self._records = records
        self._told: OrderedDict[str, None] = OrderedDict()

    async def look(self, now_ns: int, *, from_ns: int, limit: int) -> Sequence[LogLine]:
        """What was not told yet, oldest first, at most the newest so many."""
        to_ns = now_ns + MINUTE_NS  # clocks of agents may run ahead
        found: list[tuple[str, LogLine]] = []
        if limit and self._query.source in ("", ACCESS) and not self._query.level:
            found += await self._page(ACCESS, from_ns, to_ns, limit)
        if limit and self._query.source != ACCESS:
            found += await self._page("", from_ns, to_ns, limit)
        # Pages begin with the newest; of one second, what was written first stays first.
        found.reverse()
        fresh = sorted(found, key=lambda one: one[0])[-limit:] if limit else []
        while len(self._told) > TOLD_LIMIT:
            self._told.popitem(last=False)
        return [line for _, line in fresh]

    async def _page(self, source: str, from_ns: int, to_ns: int, limit: int) -> list[tuple[str, LogLine]]:
        found: list[tuple[str, LogLine]] = []
        cursor = ""
        for _ in range(PAGES):
            entries, cursor = await self._entries(source, from_ns, to_ns, min(PAGE, limit), cursor)
            fresh = [one for one in entries if one.id not in self._told]
            found += [(one.timestamp, line) for one in fresh if self._fits(line := _line(one))]
            for one in fresh:
                self._told[one.id] = None
            if not fresh or not cursor or len(found) >= limit:
                break
        return found

    async def _entries(
        self, source: str, from_ns: int, to_ns: int, limit: int, cursor: str
    ) -> tuple[Sequence[AccessLogEntry | ErrorLogEntry], str]:
        agent = self._agent
        if source == ACCESS:
            page = await self._records.access_log(
                agent.scope,
                AgentLogQuery(from_ns=from_ns, to_ns=to_ns, limit=limit, agent_id=agent.name, cursor=cursor),
            )
            return page.entries, page.cursor
        severity = LEVELS.index(self._query.level or LEVELS[-1])
        errors = await self._records.error_log(
            agent.scope,
            ErrorQuery(
                from_ns=from_ns,
                to_ns=to_ns,
                limit=limit,
                severity=severity,
                agent_id=agent.name,
                source=self._query.source,
                cursor=cursor,
            ),
        )
        return errors.entries, errors.cursor

    def _fits(self, line: LogLine) -> bool:
        return self._query.contains.lower() in line.message.lower()


def _line(entry: AccessLogEntry | ErrorLogEntry) -> LogLine:
    if isinstance(entry, ErrorLogEntry):
        return LogLine(at=entry.timestamp, level=entry.level, source=entry.source, message=entry.message)
    return LogLine(at=entry.timestamp, level="", source=ACCESS, message=" ".join(_words(entry)))


def _words(entry: AccessLogEntry) -> Iterable[str]:
    yield entry.remote_addr or "-"
    yield entry.host or "-"
    yield f'"{entry.method} {entry.uri} {entry.protocol}"'
    yield str(entry.status)
    yield str(entry.body_bytes_sent)
    yield f"{entry.response_time_ms:g}ms"


async def figures(domain: Any, agents: Sequence[AnyResource]) -> Mapping[str, Figures]:
    """Traffic of the last minute; nothing of agents that are not connected."""
    now_ns = domain.clock.now_ns()
    found = {}
    for agent in agents:
        if not domain.is_connected(agent.name):
            continue
        told = await domain.records.traffic(
            agent.scope, {agent.name}, from_ns=now_ns - MINUTE_NS, to_ns=now_ns
        )
        values = {
            "requestsPerSecond": told.requests_per_second,
            "connections": float(told.active_connections),
            "errorPercent": 100 * told.error_rate,
        }
        found[agent.name] = Figures(at_ns=now_ns, values=values)
    return found
