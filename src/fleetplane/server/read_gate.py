"""The gate before every call and every route of a server that shares its database with others.

Every server writes, so each asks the read index first (`kernel/store/servers/leader_lease.py`): what was
acknowledged anywhere before the call came is in memory when it is answered, tokens and rights included. On a
server that stands by, everything that needs the active one is refused, naming it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.servers.leader_lease import FRESH_SECONDS
from fleetplane.kernel.store.servers.replica import Replica
from fleetplane.rpc import Needs
from fleetplane.web.apis import problems
from fleetplane.web.ops import READS_ONLY, App, Mount, Receive, Scope, Send


class StandsBy(Unavailable):
    """The call is for the active server."""

    reason = "STANDS_BY"


def elsewhere(standby: Replica) -> StandsBy:
    """The refusal of what only the active server does."""
    if standby.seat.author.term:
        return StandsBy("this server is becoming the active one, and does not do this yet", hint="try again")
    active = standby.seat.holder.server
    return StandsBy(
        f"this server stands by, and does not do this; {active} is active",
        hint=f"call {active}, or the balancer's address",
    )


class ReadGate:
    """For gRPC a `CallGate`; for routes see `mount`."""

    def __init__(self, standby: Replica, store: Store, *, active: bool) -> None:
        """`store` is what domains are built on; `active` says whether this server answers everything."""
        self._standby = standby
        self._store = store
        self._active = active

    def lead(self) -> None:
        """Answer everything from now on."""
        self._active = True

    def __repr__(self) -> str:
        return f"<ReadGate {'active' if self._active else 'stands by'} {self._standby.index!r}>"

    @property
    def is_fresh(self) -> bool:
        """Whether reads are answered here, as far as is known without asking."""
        return self._standby.index.silent_seconds <= FRESH_SECONDS

    @property
    def may_lead(self) -> bool:
        """Whether nobody else can be the leader yet, by this server's own clock, if this one is."""
        return self._standby.index.holds_seat

    def elsewhere(self) -> StandsBy:
        return elsewhere(self._standby)

    def is_open(self, needs: Needs) -> bool:
        """Whether such a call may be answered as things are."""
        return needs is Needs.NOTHING

    async def passed(self, needs: Needs) -> None:
        """Return once memory has what was acknowledged anywhere before this was asked."""
        if needs is Needs.ACTIVE and not self._active:
            raise self.elsewhere()
        await self._standby.index.confirm()
        try:
            async with asyncio.timeout(FRESH_SECONDS):
                await self._store.refreshed()
        except TimeoutError:
            raise Unavailable(
                f"the database did not give a secret that has changed within {FRESH_SECONDS:.0f} seconds",
                hint="ask another server",
            ) from None

    @contextmanager
    def inside(self, needs: Needs) -> Iterator[None]:
        """Let a call write that may, on a server that stands by."""
        if needs is not Needs.WRITES:
            yield
            return
        with self._store.writing_here():
            yield

    def mount(self, one: Mount) -> Mount:
        """The same routes behind the gate; refused as a whole while this server can answer none of them.

        They are mounted all the same: another application, at a shorter path, would say that there are none.
        """
        if one.needs is Needs.NOTHING:
            return one
        guarded = replace(one, app=self._guarded(one.app, one.needs))
        return replace(guarded, listed=lambda: self._active) if one.needs is Needs.ACTIVE else guarded

    def _guarded(self, app: App, needs: Needs) -> App:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await self.passed(needs)
            except FleetplaneError as error:
                await _refuse(error, scope, send)
                return
            if not self._active:
                scope[READS_ONLY] = self.elsewhere
            with self.inside(needs):
                await app(scope, receive, send)

        return guarded


async def _refuse(error: FleetplaneError, scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": error.message[:100]})
        return
    refusal = problems.problem(error, "")
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    headers.append((b"content-length", str(len(refusal.body)).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
