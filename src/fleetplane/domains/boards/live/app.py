"""The WebSocket application of `/ws`: which dialect a client gets."""

from __future__ import annotations

from fleetplane.domains.boards.live.socket import BoardSocketParts, EventsSocket, SocketDialect
from fleetplane.domains.boards.rest.common import envelope
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.sockets import door
from fleetplane.web.sockets.app import SocketApp

PATH = "/ws"
SOCKETS_LIMIT = 1000
SOCKETS_PER_CALLER = 10
SUBPROTOCOL = "events"
"""A client that offers it, or asks for `v=events`, gets the documented dialect."""


class BoardEventsApp(SocketApp):
    def __init__(self, parts: BoardSocketParts, *, sockets_limit: int = SOCKETS_LIMIT) -> None:
        super().__init__(
            clock=parts.clock,
            authenticate=parts.authenticate,
            sockets_limit=sockets_limit,
            sockets_per_caller=SOCKETS_PER_CALLER,
            envelope=envelope,
        )
        self._parts = parts

    def subprotocol(self, scope: Scope) -> str | None:
        return SUBPROTOCOL if SUBPROTOCOL in scope.get("subprotocols", ()) else None

    def converse(self, scope: Scope, receive: Receive, send: Send, token: str | None) -> EventsSocket:
        wanted = self.subprotocol(scope) or door.query_of(scope).get("v") == SUBPROTOCOL
        dialect = SocketDialect.EVENTS if wanted else SocketDialect.ENVELOPE
        return EventsSocket(self._parts, dialect=dialect, token=token, receive=receive, send=send)
