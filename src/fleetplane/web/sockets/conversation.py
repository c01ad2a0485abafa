"""WebSockets: the ASGI application of a path, and each open one with a task that reads and a task that sends.

What every socket has in common: the token comes with the request or in a message soon after; who the
client is, and whether it may still read, is checked before anything is sent and every five seconds; replies
wait in a bounded queue, and a client that sends without reading is not read from any further; ten refused
messages end the socket; codes say why it ended. Messages and dialects are the domain's.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unauthenticated, Unavailable
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.rest.problems import Envelope, refusal
from fleetplane.web.rest.routes import Caller
from fleetplane.web.sockets import door
from fleetplane.web.sockets.door import INTERNAL_ERROR, POLICY_VIOLATION, TOKEN_ENDED

log = structlog.get_logger(__name__)

C = TypeVar("C", bound=Caller)

RECHECK_SECONDS = 5.0
"""How late the end of a token is noticed on a socket over which nothing is sent."""
REPLIES_LIMIT = 64
"""Replies waiting to be sent."""
SENT_AT_ONCE = 64
"""Messages between two checks of whether the client may still read them."""
ERRORS_LIMIT = 10
GONE = 0
"""The client left: no close message is sent."""


class SocketClosed(Exception):  # the errors of the tree go to clients; this ends a socket
    """The socket is to be closed with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Conversation(ABC, Generic[C]):
    """One accepted connection. `serve` runs it; a domain says what messages mean."""

    failure_event: ClassVar[str]
    """What the log calls an error of ours while a message was handled."""
    token_seconds: ClassVar[float]
    """Within which a client that came without a token must send one."""
    token_comes_first: ClassVar[bool]
    """Whether any other first message ends a socket that has no token."""
    message_limit: ClassVar[int] = door.MESSAGE_LIMIT

    def __init__(
        self,
        *,
        authenticate: Callable[[str], C],
        clock: Clock,
        receive: Receive,
        send: Send,
        token: str | None,
    ) -> None:
        self.token = token
        self.bell = asyncio.Event()
        """Set whenever there is something to send."""
        self._authenticate = authenticate
        self._clock = clock
        self._receive = receive
        self._send = send
        self._replies: deque[str] = deque()
        self._room = asyncio.Event()
        self._errors = 0
        self._began = clock.monotonic()
        self._ending: SocketClosed | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self._tasks: asyncio.TaskGroup

    # The domain's part.

    @abstractmethod
    async def act(self, message: dict[str, Any]) -> None:
        """Do what the client asks; a `FleetplaneError` is answered with `refusal`."""

    @abstractmethod
    def refusal(self, error: FleetplaneError) -> str:
        """The message for a request that was refused."""

    @abstractmethod
    async def send_events(self, caller: C) -> bool:
        """Send a few of the events that wait for this client; whether there may be more at once."""

    def check(self, caller: C) -> None:
        """Raise `SocketClosed` once the caller may not read here any more."""

    async def greet(self) -> None:
        """Send what every client gets first."""

    async def idle(self) -> None:
        """Called whenever the socket has waited for something to send."""

    def listening(self) -> AbstractContextManager[object]:
        """Entered for as long as the socket is open."""
        return nullcontext()

    # Its life.

    async def serve(self) -> None:
        """Until either side ends it."""
        with self.listening():
            async with asyncio.TaskGroup() as self._tasks:
                reader = self._tasks.create_task(self._read())
                await self._write_until_the_end()
                reader.cancel()
                for task in self._beside:
                    task.cancel()
        assert self._ending is not None
        if self._ending.code != GONE:
            await self._send(
                {"type": "websocket.close", "code": self._ending.code, "reason": self._ending.reason}
            )

    def end(self, code: int, reason: str) -> None:
        """Close it soon, with this code; the first reason stands."""
        self._ending = self._ending or SocketClosed(code, reason)
        self.bell.set()

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something for as long as the socket is open."""
        task = self._tasks.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    # Sending.

    async def _write_until_the_end(self) -> None:
        try:
            await self.greet()
            while self._ending is None:
                self.bell.clear()
                caller = self._checked()
                await self._send_replies()
                busy = caller is not None and await self.send_events(caller)
                if not busy and not self._replies and self._ending is None:
                    await self._wait()
        except SocketClosed as closed:
            self._ending = self._ending or closed

    async def _send_replies(self) -> None:
        for _ in range(SENT_AT_ONCE):
            if not self._replies:
                return
            text = self._replies.popleft()
            self._room.set()
            await self.send_text(text)

    async def _wait(self) -> None:
        seconds = RECHECK_SECONDS
        if self.token is None:
            seconds = min(seconds, max(0.0, self._token_deadline - self._clock.monotonic()))
        try:
            async with asyncio.timeout(seconds):
                await self.bell.wait()
        except TimeoutError:
            pass
        await self.idle()

    async def send_text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    def reply(self, text: str) -> None:
        """Queue a message for this client alone; from the task that sends, or while a request is handled."""
        self._replies.append(text)
        self.bell.set()

    async def put(self, text: str) -> None:
        """Queue a message for this client alone, once there is room for it."""
        await self._wait_for_room()
        self.reply(text)

    async def _wait_for_room(self) -> None:
        while len(self._replies) >= REPLIES_LIMIT:
            self._room.clear()
            await self._room.wait()

    # Who it is.

    @property
    def _token_deadline(self) -> float:
        return self._began + self.token_seconds

    def _checked(self) -> C | None:
        """The caller, as of now; None while there is still time to send a token."""
        if self.token is not None:
            return self.admitted(self.token)
        if self._clock.monotonic() >= self._token_deadline:
            raise _token_required()
        return None

    def admitted(self, token: str) -> C:
        """Whose token it is; raises `SocketClosed` for one that is not good or may not read here."""
        try:
            caller = self._authenticate(token)
        except Unauthenticated as error:
            raise SocketClosed(TOKEN_ENDED, error.message) from error
        self.check(caller)
        return caller

    # Reading.

    async def _read(self) -> None:
        """Never raises: what goes wrong ends the socket by way of the task that sends."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    raise SocketClosed(GONE, "")
                await self._wait_for_room()
                await self._handle(message)
                self.bell.set()
        except SocketClosed as closed:
            self.end(closed.code, closed.reason)
        except Exception as error:
            log.error(self.failure_event, exc_info=error)
            self.end(INTERNAL_ERROR, "internal error")

    async def _handle(self, message: Any) -> None:
        try:
            await self.act(door.decode_message(message, limit=self.message_limit))
        except FleetplaneError as error:
            if self.token is None and self.token_comes_first:
                raise _token_required() from error
            self.reply(self.refusal(error))
            self.count_error(error)

    def count_error(self, cause: Exception) -> None:
        """End the socket after ten refused messages."""
        self._errors += 1
        if self._errors >= ERRORS_LIMIT:
            raise SocketClosed(POLICY_VIOLATION, "too many errors") from cause


def _token_required() -> SocketClosed:
    return SocketClosed(TOKEN_ENDED, "a token is required")


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
