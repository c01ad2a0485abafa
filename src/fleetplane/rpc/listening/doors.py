"""The door of a listener: every request passes, is named for the watchdog, and is counted for its connection.

Requests whose caller is not known yet have a budget of their own, of which little goes a long way: a request
that waits costs a hundred times what it took to send.

What an HTTP server cannot tell about a connection (whether it asks for anything at all, how much of
what it sends reaches an application) is noted here, so that `warden` can tell a quiet channel from one
that floods or trickles.
"""

from __future__ import annotations

import time
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final

from fleetplane.kernel.networks import network_of, wider_network_of
from fleetplane.kernel.stalls import LIMIT_SECONDS, LOOK_SECONDS, Watchdog

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]

TLS_1_3: Final = 0x0304
CONNECTION: Final = "fleetplane.connection"
"""Where a scope has its `Visit`."""
HANDLER: Final = "fleetplane.handler"
"""Where a scope has the name of what serves it, once that is known; from a table, never from a caller."""
_COUNTED: Final = "fleetplane.unknown"
"""Where a scope says that it is counted in `Strangers`."""
UNKNOWN_PER_CONNECTION: Final = 100
UNKNOWN_PER_ADDRESS: Final = 512
"""Requests under way whose caller is not known, at 6 to 10 KB each: 5 MB for what one address can send."""
UNKNOWN_PER_SITE: Final = 1024
"""Of all addresses of what one customer of a provider may have."""
UNKNOWN_IN_ALL: Final = 4096
"""In the process: 40 MB."""
UNKNOWN_PER_NEWCOMER: Final = 8
"""That a site may have even then, up to twice as many in all: a crowd shuts out nobody who is not of it."""
REFUSED_PER_CONNECTION: Final = 512
"""After which it is cut: it does not want to be told."""
TOO_MANY_UNKNOWN: Final = "too many calls are open whose callers are not known yet"
_now: Final = time.monotonic
VISITS_KEPT: Final = 1024
"""Connections that are noted where nobody looks which of them are gone; those at rest are then forgotten."""
VISITS_TENDED: Final = 65_536
"""Where `warden` does, every second: far more than a listener holds."""


class Visit:
    """What one TCP connection has asked for so far."""

    __slots__ = (
        "active_at",
        "address",
        "body_bytes",
        "condemned",
        "known",
        "open",
        "per_address",
        "refused",
        "requests",
        "strangers",
        "unknown",
    )

    def __init__(
        self, address: str = "", strangers: Strangers | None = None, *, per_address: int = 0
    ) -> None:
        self.address = address
        self.per_address = per_address
        """Connections that the operator grants an address, such as a balancer's; as many unknown callers."""
        self.strangers = strangers
        self.known = False
        """Whether one of its callers has shown who it is."""
        self.unknown = 0
        """Requests under way that are counted in `strangers`."""
        self.refused = 0
        """Requests that were one too many there."""
        self.requests = 0
        self.open = 0
        self.body_bytes = 0
        """Of requests, as far as applications have taken them."""
        self.active_at = _now()
        """When a request last ended, or the first began."""
        self.condemned = ""
        """Why the connection is to be cut, if it is."""


class Strangers:
    """The budget of requests under way of unknown callers: by connection, address, site and in all.

    A caller is known once its token, certificate or signature was verified. One that only this machine can
    be is known once its message is there.
    """

    def __init__(self) -> None:
        self._of_address: Counter[str] = Counter()
        self._of_site: Counter[str] = Counter()
        self.open = 0
        self.refused = 0

    def __repr__(self) -> str:
        return f"<Strangers open={self.open} refused={self.refused}>"

    def enter(self, visit: Visit) -> bool:
        """Count a request; False if there are too many."""
        address, site = network_of(visit.address), wider_network_of(visit.address)
        limit = UNKNOWN_IN_ALL * (2 if self._of_site[site] < UNKNOWN_PER_NEWCOMER else 1)
        if (
            visit.unknown >= UNKNOWN_PER_CONNECTION
            or self._of_address[address] >= max(UNKNOWN_PER_ADDRESS, visit.per_address)
            or self._of_site[site] >= max(UNKNOWN_PER_SITE, visit.per_address)
            or self.open >= limit
        ):
            self.refused += 1
            visit.refused += 1
            if visit.refused >= REFUSED_PER_CONNECTION:
                visit.condemned = "unknown"
            return False
        visit.unknown += 1
        self._of_address[address] += 1
        self._of_site[site] += 1
        self.open += 1
        return True

    def leave(self, visit: Visit) -> None:
        visit.unknown -= 1
        self.open -= 1
        for counts, name in (
            (self._of_address, network_of(visit.address)),
            (self._of_site, wider_network_of(visit.address)),
        ):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


def enter_unknown(scope: Scope) -> bool:
    """Count a request that waits and whose caller is not known; False if there are too many of them."""
    visit: Visit | None = scope.get(CONNECTION)
    if visit is None or visit.known or visit.strangers is None:
        return True
    if not visit.strangers.enter(visit):
        return False
    scope[_COUNTED] = True
    return True


def leave_unknown(scope: Scope) -> None:
    """Count a request no more: its caller is known, or it has ended."""
    if scope.pop(_COUNTED, False):
        visit: Visit = scope[CONNECTION]
        assert visit.strangers is not None
        visit.strangers.leave(visit)


def recognise(scope: Scope) -> None:
    """Record that a caller has shown who it is: nothing of its connection is counted from now on."""
    visit: Visit | None = scope.get(CONNECTION)
    if visit is not None:
        visit.known = True
        leave_unknown(scope)


class ListenerMiddleware:
    """An ASGI application around a listener's own."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        name: str,
        watchdog: Watchdog | None = None,
        tls13_only: bool = False,
        counts_bodies: bool = False,
        per_address: int = 0,
    ) -> None:
        """`counts_bodies` where the application does not do it itself, as the gRPC layer does."""
        self._counts_bodies = counts_bodies
        self._per_address = per_address
        self.name = name
        self._app = app
        self.watchdog = watchdog or Watchdog()
        self._tls13_only = tls13_only
        self.names: Callable[[Scope], str] = getattr(app, "handler_name", lambda _scope: "")
        self.visits: dict[tuple[str, int], Visit] = {}
        """By the peer's address and port."""
        self.tended = False
        """Whether `warden` forgets those that are gone."""
        self.strangers = Strangers()
        """Its own, until `warden` gives all of a process one."""
        self.old_tls = 0
        """Requests refused because their connection is not TLS 1.3."""

    def __repr__(self) -> str:
        return f"<Door {self.name} visits={len(self.visits)}>"

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Serve one request. Most end in their first step, which is taken with nothing set up for more."""
        began = _now()
        dog = self.watchdog
        if began - dog.looked_at >= LOOK_SECONDS:
            dog.look()
        visit: Visit | None = None
        client = scope.get("client")
        if client is not None and client[0]:
            visit = self.visits.get(client) or self._new_visit(client)
            if visit is not None:
                visit.requests += 1
                visit.open += 1
                scope[CONNECTION] = visit
                if self._counts_bodies:
                    receive = _counted(receive, visit)
        served: Any
        if self._tls13_only and scope["extensions"].get("tls", {}).get("tls_version") != TLS_1_3:
            served = self._refuse_old_tls(scope, send, visit)
        else:
            served = self._app(scope, receive, send)
        try:
            try:
                waiting = served.send(None)
            except StopIteration:
                return
            finally:
                if (seconds := _now() - began) >= LIMIT_SECONDS:
                    dog.report(self._handler(scope), seconds)
            await self._rest(served, waiting, scope)
        finally:
            if visit is not None:
                visit.open -= 1
                visit.active_at = _now()

    @types.coroutine
    def _rest(self, served: Any, waiting: Any, scope: Scope) -> Generator[Any, Any, None]:
        """What is left of a request whose first step is taken, each step of it timed."""
        dog = self.watchdog
        while True:
            step = served.send
            given: Any
            try:
                given = yield waiting
            except GeneratorExit:
                served.close()
                raise
            except BaseException as error:
                step, given = served.throw, error
            began = _now()
            if began - dog.looked_at >= LOOK_SECONDS:
                dog.look()
            try:
                waiting = step(given)
            except StopIteration:
                return
            finally:
                if (seconds := _now() - began) >= LIMIT_SECONDS:
                    dog.report(self._handler(scope), seconds)

    def _handler(self, scope: Scope) -> str:
        return scope.get(HANDLER) or self.names(scope) or self.name

    def _new_visit(self, client: tuple[str, int]) -> Visit | None:
        if len(self.visits) >= (VISITS_TENDED if self.tended else VISITS_KEPT):
            for peer in [peer for peer, visit in self.visits.items() if not visit.open]:
                del self.visits[peer]
            if len(self.visits) >= VISITS_TENDED:
                return None
        visit = self.visits[client] = Visit(client[0], self.strangers, per_address=self._per_address)
        return visit

    async def _refuse_old_tls(self, scope: Scope, send: Any, visit: Visit | None) -> None:
        """The HTTP server knows no lowest version, so the connection ends with its first request."""
        self.old_tls += 1
        headers = [
            (b"content-type", b"application/grpc"),
            (b"grpc-status", b"16"),
            (b"grpc-message", b"this listener speaks TLS 1.3 only"),
        ]
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        if visit is not None:
            visit.condemned = "tls"


def _counted(receive: Receive, visit: Visit) -> Receive:
    async def receiving() -> Any:
        event = await receive()
        said = event.get("body") or event.get("bytes") or event.get("text") or b""
        visit.body_bytes += len(said)
        return event

    return receiving
