"""Logs of proxies' agents as the resource API tells them: in order, whole, each line once."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from fleetplane.domains.proxies.agents import observed
from fleetplane.domains.proxies.agents.ports import (
    AccessLogEntry,
    AgentLogQuery,
    ErrorLogEntry,
    ErrorLogPage,
    ErrorQuery,
    LogPage,
)
from fleetplane.fleet.resources.declaration import LogCall, LogLine
from fleetplane.fleet.resources.declaration import LogQuery as Asked
from fleetplane.kernel.errors import InvalidArgument


def request(number: int, second: int) -> AccessLogEntry:
    return AccessLogEntry(
        id=f"a{number}",
        agent_id="agent",
        timestamp=f"2026-11-16T04:00:{second:02}Z",
        remote_addr="::1",
        method="GET",
        uri=f"/{number}",
        protocol="HTTP/1.1",
        host="h",
        status=200,
        body_bytes_sent=1,
        response_time_ms=2.0,
        user_agent="",
        referer="",
        request_id="",
    )


def complaint(number: int, second: int, message: str = "it hurts") -> ErrorLogEntry:
    return ErrorLogEntry(
        id=f"e{number}",
        agent_id="agent",
        timestamp=f"2026-11-16T04:00:{second:02}Z",
        level="error",
        message=message,
        source="nginx_error",
    )


class Records:
    """What agents reported, newest first, page by page."""

    def __init__(self) -> None:
        self.requests: list[AccessLogEntry] = []
        self.complaints: list[ErrorLogEntry] = []

    async def access_log(self, _workspace: str, query: AgentLogQuery) -> LogPage:
        entries, cursor = _page(self.requests, query.limit, query.cursor)
        return LogPage(entries=entries, total=len(self.requests), cursor=cursor)

    async def error_log(self, _workspace: str, query: ErrorQuery) -> ErrorLogPage:
        entries, cursor = _page(self.complaints, query.limit, query.cursor)
        return ErrorLogPage(entries=entries, total=len(self.complaints), cursor=cursor)


def _page(entries: list[Any], limit: int, cursor: str) -> tuple[Sequence[Any], str]:
    start = int(cursor or 0)
    page = entries[::-1][start : start + limit]
    return page, str(start + limit) if start + limit < len(entries) else ""


class Clock:
    def __init__(self, records: Records, arriving: list[list[AccessLogEntry]]) -> None:
        self._records, self._arriving = records, arriving

    def now_ns(self) -> int:
        return 10**18

    async def sleep(self, _seconds: float) -> None:
        """Time passes, and something arrives with it."""
        self._records.requests += self._arriving.pop(0)


def call(records: Records, query: Asked, arriving: list[list[AccessLogEntry]] | None = None) -> LogCall:
    domain = SimpleNamespace(records=records, clock=Clock(records, arriving or []))
    stored: Any = SimpleNamespace(scope="w", name="agent")
    return LogCall(domain=domain, stored=stored, query=query, actor="me")


async def read(made: LogCall, number: int | None = None) -> list[str]:
    found: list[LogLine] = []
    async with aclosing(observed.logs(made)) as lines:
        async for line in lines:
            found.append(line)
            if len(found) == number:
                break
    return [f"{line.source} {line.message}" for line in found]


def uris(told: list[str]) -> list[str]:
    return [text.split('"')[1].split()[1] for text in told]


async def test_requests_and_complaints_come_in_order_of_time_the_last_so_many() -> None:
    records = Records()
    records.requests = [request(1, 1), request(2, 1), request(3, 3)]
    records.complaints = [complaint(1, 2)]
    told = await read(call(records, Asked(tail=3, follow=False)))
    assert [one.split()[0] for one in told] == ["access", "nginx_error", "access"]
    assert '"GET /2 HTTP/1.1" 200 1 2ms' in told[0]
    assert await read(call(records, Asked(tail=0, follow=False))) == []


async def test_what_comes_is_told_once_and_nothing_that_was_there_is_told_late() -> None:
    records = Records()
    records.requests = [request(number, 0) for number in range(5)]
    arriving = [[], [request(5, 1), request(6, 1)], [], [request(7, 2)]]
    told = await read(call(records, Asked(tail=1, follow=True), arriving), 4)
    assert uris(told) == ["/4", "/5", "/6", "/7"]


async def test_more_than_a_page_at_once_is_told_whole() -> None:
    records, number = Records(), observed.PAGE + 50
    arriving = [[request(one, 1) for one in range(number)]]
    told = await read(call(records, Asked(tail=0, follow=True, source="access"), arriving), number)
    assert uris(told) == [f"/{one}" for one in range(number)]


async def test_lines_are_chosen_by_source_text_and_level() -> None:
    records = Records()
    records.requests, records.complaints = [request(1, 1)], [complaint(1, 2), complaint(2, 3, "All WELL")]
    assert await read(call(records, Asked(tail=9, follow=False, source="access"))) != []
    assert len(await read(call(records, Asked(tail=9, follow=False, level="error")))) == 2
    assert await read(call(records, Asked(tail=9, follow=False, contains="all well"))) == [
        "nginx_error All WELL"
    ]
    for wrong in (Asked(tail=1, follow=False, level="loud"), Asked(tail=1, follow=False, source="kernel")):
        with pytest.raises(InvalidArgument):
            await read(call(records, wrong))
