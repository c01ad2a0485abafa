"""The door of `/v1/events`: who gets a socket, how many, and how all of them end. ASGI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fleetplane.domains.proxies.access import Access
from fleetplane.domains.proxies.event_feed import EventFeed
from fleetplane.domains.proxies.event_socket import RESTARTING, Authenticate, EventSocket
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unavailable
from fleetplane.web import sockets
from fleetplane.web.gateway import Receive, Scope, Send

PATH = "/v1/events"
SOCKETS_LIMIT = 1000
"""Open at once; each takes about 100 KB with its compression window, 100 MB."""
SOCKETS_PER_CALLER = 10


class EventsApp:
    def __init__(
        self,
        feed: EventFeed,
        *,
        access: Access,
        authenticate: Authenticate,
        clock: Clock,
        origins: Collection[str] = (),
        sockets_limit: int = SOCKETS_LIMIT,
    ) -> None:
        """`origins` are web pages, beside our own, that may listen; `*` stands for all."""
        self._feed = feed
        self._access = access
        self._authenticate = authenticate
        self._clock = clock
        self._origins = frozenset(origins)
        self._limit = sockets_limit
        self._sockets: set[EventSocket] = set()
        self._by_caller: Counter[str] = Counter()
        self._draining = False

    def __repr__(self) -> str:
        return f"<EventsApp sockets={len(self._sockets)}>"

    def __len__(self) -> int:
        return len(self._sockets)

    def drain(self) -> None:
        """End all sockets in the way that tells clients to come back soon."""
        self._draining = True
        for socket in tuple(self._sockets):
            socket.end(RESTARTING, "the server is shutting down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await sockets.refuse_http(self._clock, send)
            return
        if scope["type"] != "websocket":
            return
        await receive()  # websocket.connect
        try:
            token, name = self._admit(scope)
        except FleetplaneError as error:
            await sockets.deny(error, self._clock, scope, send)
            return
        await send({"type": "websocket.accept"})
        socket = EventSocket(
            feed=self._feed, access=self._access, authenticate=self._authenticate, clock=self._clock,
            receive=receive, send=send, token=token,
        )  # fmt: skip
        self._sockets.add(socket)
        self._by_caller[name] += 1
        try:
            await socket.serve()
        finally:
            self._sockets.discard(socket)
            self._by_caller[name] -= 1
            if not self._by_caller[name]:
                del self._by_caller[name]

    def _admit(self, scope: Scope) -> tuple[str | None, str]:
        """The token, if the request has one, and whom to count the socket for."""
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after_seconds=1)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        sockets.check_origin(headers, self._origins)
        if len(self._sockets) >= self._limit:
            raise Unavailable(f"{self._limit} sockets are open, the most there may be", retry_after_seconds=5)
        token = sockets.token_of(scope, headers)
        client = scope.get("client")
        name = f"address/{client[0] if client else 'unix'}"
        if token is not None:
            name = self._authenticate(token).name
        if self._by_caller[name] >= SOCKETS_PER_CALLER:
            raise ResourceExhausted(f"{SOCKETS_PER_CALLER} sockets are open for you, the most there may be")
        return token, name
