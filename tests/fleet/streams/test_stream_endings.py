"""A handler's work ends with its session, and only then is what follows the block reached."""

from __future__ import annotations

import asyncio

import pytest

from fleetplane.fleet.streams.presence import closed_error, until_closed
from fleetplane.kernel.errors import Conflict, Unauthenticated
from fleetplane.kernel.sessions import REVOKED, STOPPING, SUPERSEDED, Session, Sessions


def opened() -> Session[None]:
    return Sessions().open("agent", "reports", limit=1)


async def work(session: Session[None], seconds: float) -> str:
    async with until_closed(session):
        await asyncio.sleep(seconds)
        return "done"
    return f"closed: {session.reason}"


async def test_work_that_ends_by_itself_is_left_alone() -> None:
    assert await work(opened(), 0.0) == "done"


@pytest.mark.parametrize("reason", [SUPERSEDED, STOPPING, REVOKED])
async def test_work_is_left_as_soon_as_the_session_is_closed(reason: str) -> None:
    session = opened()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work(session, 60.0))
        await asyncio.sleep(0)
        session.close(reason)
    assert working.result() == f"closed: {reason}"


async def test_a_session_that_is_closed_already_ends_the_work_at_its_first_wait() -> None:
    session = opened()
    session.close(SUPERSEDED)
    assert await work(session, 60.0) == "closed: superseded"


async def test_the_works_own_errors_and_time_outs_pass() -> None:
    with pytest.raises(ZeroDivisionError):
        async with until_closed(opened()):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        async with until_closed(opened()), asyncio.timeout(0.001):
            await asyncio.sleep(60)


def test_what_the_caller_is_told() -> None:
    session = opened()
    session.close(REVOKED)
    assert isinstance(closed_error(session), Unauthenticated)
    other = opened()
    other.close(SUPERSEDED)
    assert isinstance(closed_error(other), Conflict)
