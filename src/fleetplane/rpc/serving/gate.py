"""The gate before calls: whether what this server has in memory is new enough for an answer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fleetplane.rpc.methods import Needs


class CallGate(Protocol):
    """Where several servers share a database, one may have acknowledged what another has not seen yet."""

    def is_open(self, needs: Needs) -> bool:
        """Whether such a call may be answered as things are, without waiting for anything."""
        ...

    async def passed(self, needs: Needs) -> None:
        """Return once it may be answered; raises `Unavailable` if this is not the server to answer it."""
        ...

    def inside(self, needs: Needs) -> AbstractContextManager[None]:
        """What such a call may do, for as long as it is answered."""
        ...
