"""Ending a handler's work as soon as its session is closed: by a revocation, a newer stream or shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fleetplane.kernel.errors import Conflict, FleetplaneError, Unauthenticated
from fleetplane.kernel.sessions.sessions import REVOKED, Session


@asynccontextmanager
async def until_closed(session: Session[Any]) -> AsyncIterator[None]:
    """Leave the block, cleanly, as soon as the session is closed, whatever it is waiting for.

    A block that came to its own end has returned or raised; what follows the block is then reached
    only if the session was closed first.
    """
    limit = asyncio.timeout(None)

    def end(_closed: asyncio.Future[str]) -> None:
        limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with limit:
            session.closed.add_done_callback(end)
            try:
                yield
            finally:
                session.closed.remove_done_callback(end)
    except TimeoutError:
        if not limit.expired():
            raise


def closed_error(session: Session[Any]) -> FleetplaneError:
    """What to tell the caller of a stream whose session was closed, where that is an error."""
    if session.reason == REVOKED:
        return Unauthenticated("the certificate was revoked", details={"cause": "revoked"})
    return Conflict(f"the stream was ended: {session.reason}")
