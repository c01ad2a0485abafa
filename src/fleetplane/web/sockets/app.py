"""The ASGI application behind a WebSocket path: admission, limits, and an orderly end for all sockets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unavailable
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.rest.problems import Envelope, refusal
from fleetplane.web.rest.routes import Caller
from fleetplane.web.sockets import door
from fleetplane.web.sockets.conversation import Conversation


class SocketApp(ABC):
    """Checks origin and token, limits sockets in total and for each caller, closes all at shutdown."""

    def __init__(
        self,
        *,
        clock: Clock,
        authenticate: Callable[[str], Caller],
        sockets_limit: int,
        sockets_per_caller: int,
        origins: Collection[str] = (),
        envelope: Envelope = refusal,
    ) -> None:
        """`origins` are web pages, beside our own, that may listen; `*` stands for all."""
        self._clock = clock
        self._authenticate = authenticate
        self._limit = sockets_limit
        self._per_caller = sockets_per_caller
        self._origins = frozenset(origins)
        self._envelope = envelope
        self._sockets: set[Conversation[Any]] = set()
        self._by_caller: Counter[str] = Counter()
        self._draining = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} sockets={len(self._sockets)}>"

    def __len__(self) -> int:
        return len(self._sockets)

    @abstractmethod
    def converse(self, scope: Scope, receive: Receive, send: Send, token: str | None) -> Conversation[Any]:
        """The conversation with a client that was admitted."""

    def subprotocol(self, _scope: Scope) -> str | None:
        """The subprotocol that is agreed on; None where there is none."""
        return None

    def drain(self) -> None:
        """Close all sockets with the code that asks clients to reconnect soon."""
        self._draining = True
        for socket in tuple(self._sockets):
            socket.end(door.RESTARTING, "the server is shutting down")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await door.refuse_http(self._clock, send, envelope=self._envelope)
            return
        if scope["type"] != "websocket":
            return
        await receive()  # websocket.connect
        try:
            token, name = self._admit(scope)
        except FleetplaneError as error:
            await door.deny(error, self._clock, scope, send, envelope=self._envelope)
            return
        agreed = self.subprotocol(scope)
        socket = self.converse(scope, receive, send, token)
        self._sockets.add(socket)  # before anything is awaited: many may come at once
        self._by_caller[name] += 1
        try:
            await send({"type": "websocket.accept", **({"subprotocol": agreed} if agreed else {})})
            await socket.serve()
        finally:
            self._sockets.discard(socket)
            self._by_caller[name] -= 1
            if not self._by_caller[name]:
                del self._by_caller[name]

    def _admit(self, scope: Scope) -> tuple[str | None, str]:
        """The token, if the request has one, and the name under which the socket is counted."""
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after_seconds=1)
        headers: dict[bytes, bytes] = dict(scope["headers"])
        door.check_origin(headers, self._origins)
        if len(self._sockets) >= self._limit:
            raise Unavailable(f"{self._limit} sockets are open, the most there may be", retry_after_seconds=5)
        token = door.token_of(scope, headers)
        client = scope.get("client")
        name = f"address/{client[0] if client else 'unix'}"
        if token is not None:
            name = self._authenticate(token).name
        if self._by_caller[name] >= self._per_caller:
            raise ResourceExhausted(
                f"{self._per_caller} sockets are open for this caller, the most there may be"
            )
        return token, name
