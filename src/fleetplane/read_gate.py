"""The gate before every call and every route of a server that shares its database with others.

Reads wait until memory is up to date, by the read index (`kernel/store/servers/read_index.py`). On a server
that stands by, everything that needs the active one is refused, naming it. The resource API is written to on
every server, so the active one asks the index for it, too. What it alone writes is in its memory once it was
acknowledged, for as long as its seat is certainly its own. It is asked for that much, because a process that
was stopped and is woken answers what waited in its sockets before it learns that it was replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fleetplane.kernel.errors import FleetplaneError, Unavailable
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.servers.read_index import FRESH_SECONDS
from fleetplane.kernel.store.servers.standby import Standby
from fleetplane.rpc import Needs
from fleetplane.web.apis import problems
from fleetplane.web.ops import READS_ONLY, App, Mount, Receive, Scope, Send

READING = frozenset({"GET", "HEAD", "OPTIONS"})
WRITTEN_ANYWHERE = "/apis/"
"""Below it lies what other servers write, too."""
Anywhere = Callable[[str, str], bool]
"""Whether a request, by its method and path, is carried out on servers that stand by."""


class StandsBy(Unavailable):
    """The call is for the active server."""

    reason = "STANDS_BY"


def elsewhere(standby: Standby) -> StandsBy:
    """The refusal of what only the active server does."""
    active = standby.seat.holder.server
    return StandsBy(
        f"this server stands by, and does not do this; {active} is active",
        hint=f"call {active}, or the balancer's address",
    )


class ReadGate:
    """For gRPC a `CallGate`; for routes see `mount`."""

    def __init__(self, standby: Standby, store: Store, *, writes: bool) -> None:
        """`store` is what domains read: with `store.exclusive` nobody else writes.

        `writes` says whether this server answers everything, or stands by.
        """
        self._standby = standby
        self._store = store
        self._writes = writes

    def __repr__(self) -> str:
        return f"<ReadGate {'writes' if self._writes else 'stands by'} {self._standby.index!r}>"

    @property
    def is_fresh(self) -> bool:
        """Whether reads are answered here, as far as is known without asking."""
        return self._standby.index.silent_seconds <= FRESH_SECONDS

    def elsewhere(self) -> StandsBy:
        return elsewhere(self._standby)

    def is_open(self, needs: Needs) -> bool:
        """Whether such a call may be answered as things are."""
        if needs is Needs.NOTHING:
            return True
        return self._store.exclusive and (needs is Needs.ACTIVE or self._standby.index.holds_seat)

    async def passed(self, needs: Needs) -> None:
        """Return once memory has what was acknowledged anywhere before this was asked."""
        if needs is Needs.ACTIVE and not self._writes:
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

    def mount(self, one: Mount, anywhere: Anywhere = lambda _method, _path: False) -> Mount:
        """The same routes behind the gate; refused as a whole where this server can answer none of them.

        They are mounted all the same: another application, at a shorter path, would say that there are none.
        """
        if one.needs is Needs.NOTHING:
            return one
        if one.needs is Needs.ACTIVE and not self._writes:
            return Mount(path=one.path, app=self._refusing)
        asks = one.path.startswith(WRITTEN_ANYWHERE)
        # Families of the domains show what is written there, by whichever server.
        shows = one.needs is Needs.STORE
        return replace(one, app=self._guarded(one.app, anywhere, asks=asks, shows=shows))

    async def _refusing(self, scope: Scope, _receive: Receive, send: Send) -> None:
        await _refuse(self.elsewhere(), scope, send)

    def _guarded(self, app: App, anywhere: Anywhere, *, asks: bool, shows: bool) -> App:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            method = scope["method"] if scope["type"] == "http" else ""
            needs = Needs.STORE
            if method not in READING and not anywhere(method, scope["path"]):
                needs = Needs.ACTIVE
            try:
                if asks or (shows and method in READING) or not self.is_open(needs):
                    await self.passed(needs)
            except FleetplaneError as error:
                await _refuse(error, scope, send)
                return
            if not self._writes:
                scope[READS_ONLY] = self.elsewhere
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
