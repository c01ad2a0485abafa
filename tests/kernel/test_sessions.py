from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity.revocation import REVOCATION, Revocations
from fleetplane.kernel.sessions import ENDED, REVOKED, STOPPING, SUPERSEDED, Session, Sessions
from fleetplane.kernel.store import Store, StoreSettings

CLOCK = SystemClock()
DEADLINE_SECONDS = 60.0


def opened(sessions: Sessions, agent: str = "a", stream: str = "files", **more: Any) -> Session[int]:
    return sessions.open(agent, stream, **{"limit": 4, **more})


async def drained(session: Session[int]) -> list[int]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [message async for message in session]


async def test_messages_come_out_in_order_and_end_with_the_session() -> None:
    session = opened(Sessions())
    received: list[int] = []

    async def consume() -> None:
        received.extend([message async for message in session])

    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(consume())
        for number in range(3):
            assert session.offer(number)
            await asyncio.sleep(0)
        session.close(flush=True)
    assert received == [0, 1, 2]
    assert session.reason == ENDED


async def test_a_full_queue_refuses_and_counts() -> None:
    sessions = Sessions()
    session = opened(sessions)

    assert [session.offer(number) for number in range(6)] == [True] * 4 + [False] * 2
    assert (session.refused, sessions.statistics().refused, session.queued) == (2, 2, 4)


async def test_the_newer_session_wins() -> None:
    sessions = Sessions()
    older, other = opened(sessions), opened(sessions, stream="keys")
    older.offer(1)
    newer = opened(sessions)

    assert older.superseded
    assert await older.closed == SUPERSEDED
    assert await drained(older) == []
    assert not older.offer(2)
    assert sessions.get("a", "files") is newer
    assert other.is_open, "another stream of the same agent is another session"


async def test_the_end_of_a_superseded_session_leaves_the_newer_alone() -> None:
    sessions = Sessions()
    with opened(sessions) as older:
        newer = opened(sessions)
        assert older.superseded

    assert sessions.get("a", "files") is newer
    assert newer.is_open
    assert older.reason == SUPERSEDED, "the first reason stands"


async def test_leaving_the_block_ends_the_session() -> None:
    sessions = Sessions()
    with opened(sessions) as session:
        waiting = session.closed
    assert await waiting == ENDED
    assert await session.closed == ENDED
    assert sessions.get("a", "files") is None
    assert len(sessions) == 0


async def test_closing_drops_what_is_queued_unless_told_to_flush() -> None:
    sessions = Sessions()
    dropped, flushed = opened(sessions, "a"), opened(sessions, "b")
    for session in (dropped, flushed):
        session.offer(1)
        session.offer(2)
    dropped.close()
    assert sessions.close_all(flush=True) == 1

    assert await drained(dropped) == []
    assert await drained(flushed) == [1, 2]
    assert flushed.reason == STOPPING


async def test_only_those_that_fit_are_closed() -> None:
    sessions = Sessions()
    tenants = {name: opened(sessions, name, principal=name[0]) for name in ("x1", "x2", "y1")}

    assert sessions.close_where(lambda session: session.principal == "x", "asleep") == 2
    assert [tenants[name].reason for name in ("x1", "x2", "y1")] == ["asleep", "asleep", None]
    assert [session.agent for session in sessions] == ["y1"]


async def test_a_second_consumer_is_a_mistake() -> None:
    session = opened(Sessions())
    async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
        tasks.create_task(drained(session))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="consumer already"):
            await anext(session)
        session.close()


async def test_a_consumer_that_is_cancelled_loses_no_message() -> None:
    session = opened(Sessions())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(session)
    session.offer(1)

    assert await anext(session) == 1


async def test_there_is_a_most_of_open_sessions() -> None:
    sessions = Sessions(limit=2)
    opened(sessions, "a")
    opened(sessions, "b")

    with pytest.raises(ResourceExhausted):
        opened(sessions, "c")
    opened(sessions, "a")  # takes its own place
    with pytest.raises(InvalidArgument):
        opened(sessions, "a", limit=0)
    assert len(sessions) == 2


async def test_revoking_closes_matching_open_sessions_at_once(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "s.db")
    async with Store.open(settings, kinds=(REVOCATION,), clock=CLOCK) as store:
        revocations = Revocations(store, CLOCK)
        sessions = Sessions(revocations)
        mine = opened(sessions, "a", principal="agent/a", serial=7)
        same_name = opened(sessions, "a", "keys", principal="agent/a", serial=8)
        other = opened(sessions, "b", principal="agent/b", serial=9)
        ends: list[list[int]] = []

        async def consume() -> None:
            ends.append([message async for message in mine])

        async with asyncio.timeout(DEADLINE_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(consume())
            await asyncio.sleep(0)
            await revocations.revoke(serial=7, reason="leaked", actor="alice")
            assert mine.reason == REVOKED, "closed by the time that the revocation is acknowledged"
            await asyncio.sleep(0)
            assert ends == [[]], "its stream ends in the next turn of the loop"
        assert same_name.is_open

        await revocations.revoke(principal="agent/a", reason="stolen", actor="alice")
        assert same_name.reason == REVOKED
        assert other.is_open
        assert sessions.statistics().revoked == 2


async def test_who_is_revoked_cannot_open_a_session_it_was_about_to(tmp_path: Path) -> None:
    settings = StoreSettings(path=tmp_path / "s.db")
    async with Store.open(settings, kinds=(REVOCATION,), clock=CLOCK) as store:
        revocations = Revocations(store, CLOCK)
        sessions = Sessions(revocations)
        await revocations.revoke(serial=7, reason="leaked", actor="alice")

        with pytest.raises(Unauthenticated):
            opened(sessions, principal="agent/a", serial=7)
        assert len(sessions) == 0
