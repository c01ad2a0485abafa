"""The door of `/ws`: who gets a socket, in which dialect, how many, and how all of them end. ASGI."""

from __future__ import annotations

from collections import Counter

from fleetplane.domains.boards.events_socket import Dialect, EventsSocket, Ground
from fleetplane.domains.boards.rest import envelope
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unavailable
from fleetplane.web import sockets
from fleetplane.web.gateway import Receive, Scope, Send

PATH = "/ws"
SOCKETS_LIMIT = 1000
SOCKETS_PER_CALLER = 10
SUBPROTOCOL = "events"
"""Whoever offers it, or asks for `v=events`, is told in the documented dialect."""


class EventsApp:
    def __init__(self, ground: Ground, *, sockets_limit: int = SOCKETS_LIMIT) -> None:
        self._ground = ground
        self._limit = sockets_limit
        self._sockets: set[EventsSocket] = set()
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
            socket.end(sockets.RESTARTING, "the server is shutting down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = self._ground.clock
        if scope["type"] == "http":
            await sockets.refuse_http(clock, send, envelope=envelope)
            return
        if scope["type"] != "websocket":
            return
        await receive()  # websocket.connect
        try:
            token, name = self._admit(scope)
        except FleetplaneError as error:
            await sockets.deny(error, clock, scope, send, envelope=envelope)
            return
        offered = SUBPROTOCOL in scope.get("subprotocols", ())
        wanted = offered or sockets.query_of(scope).get("v") == SUBPROTOCOL
        await send({"type": "websocket.accept", **({"subprotocol": SUBPROTOCOL} if offered else {})})
        socket = EventsSocket(
            self._ground, dialect=Dialect.EVENTS if wanted else Dialect.ENVELOPE, token=token,
            receive=receive, send=send,
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
        sockets.check_origin(headers, ())
        if len(self._sockets) >= self._limit:
            raise Unavailable(f"{self._limit} sockets are open, the most there may be", retry_after_seconds=5)
        token = sockets.token_of(scope, headers)
        client = scope.get("client")
        name = f"address/{client[0] if client else 'unix'}"
        if token is not None:
            name = self._ground.authenticate(token).name
        if self._by_caller[name] >= SOCKETS_PER_CALLER:
            raise ResourceExhausted(f"{SOCKETS_PER_CALLER} sockets are open for you, the most there may be")
        return token, name
