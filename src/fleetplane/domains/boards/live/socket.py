"""The WebSocket application of `/ws`: one client, in either dialect, and the feed of events to all.

A client that came without a token may send one in its first 30 seconds, and gets no event before.
Each event is made once and posted to the mailbox of every listener that wants it. `events` decides what is
sent; `web.sockets.conversation` has what every socket has in common.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec
import psutil

from fleetplane.domains.boards.access import ADMIN, OPERATOR, READ
from fleetplane.domains.boards.calls.channels import asked_by
from fleetplane.domains.boards.kinds import BOARD, CLUSTER, SCOPE
from fleetplane.domains.boards.live.events import BoardEvent, SentStates, Topic, system_metrics
from fleetplane.domains.boards.logs.relay import LogsRelay
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE
from fleetplane.domains.boards.rest.common import BoardCaller, BoardGate, envelope
from fleetplane.domains.boards.wire import message_json as wire_json
from fleetplane.fleet.feeds.mailbox import Mailbox
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied, Unauthenticated
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.sockets import door
from fleetplane.web.sockets.conversation import SENT_AT_ONCE, Conversation, SocketApp, SocketClosed
from fleetplane.web.sockets.door import RIGHTS_ENDED

SYSTEM_SECONDS = 10.0
"""Between two messages about the server itself, while somebody wants them."""
KINDS: Collection[AnyKind] = (CLUSTER, BOARD, GPIO_DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedClient:
    """One client of the feed."""

    wants: Callable[[Topic], bool]
    mailbox: Mailbox[BoardEvent]


class EventFeed:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._memory = SentStates()
        self._listeners: set[FeedClient] = set()
        self.posted = 0
        """Events posted so far."""

    def __repr__(self) -> str:
        return f"<EventFeed listeners={len(self._listeners)} posted={self.posted}>"

    @contextmanager
    def joined(self, listener: FeedClient) -> Iterator[None]:
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.discard(listener)

    async def run(self) -> None:
        """Until cancelled."""
        async with Boundary() as tasks:
            for kind in KINDS:
                tasks.keep(f"boards/events/{kind.name}", partial(self._follow, kind))
            tasks.keep("boards/events/system", self._measure)

    async def _follow(self, kind: AnyKind) -> None:
        revision, found = self._store.snapshot(kind, SCOPE)
        self._memory.prime(found)
        async with self._store.watch(kind, SCOPE, after=revision) as watch:
            async for batch in watch:
                for event in batch.events:
                    for made in self._memory.events_of(event):
                        self._publish(made)

    async def _measure(self) -> None:
        process = psutil.Process()
        process.cpu_percent()  # the first answer is about nothing
        while True:
            await self._clock.sleep(SYSTEM_SECONDS)
            if not any(listener.wants(Topic.SYSTEM) for listener in self._listeners):
                continue
            self._publish(
                system_metrics(
                    cpu=process.cpu_percent(),
                    memory=round(process.memory_percent(), 3),
                    tasks=len(asyncio.all_tasks()),
                    at_ns=self._clock.now_ns(),
                )
            )

    def _publish(self, event: BoardEvent) -> None:
        self.posted += 1
        for listener in self._listeners:
            if listener.wants(event.topic):
                listener.mailbox.post(event)


PING_SECONDS = 54.0
LOGS_LIMIT = 4
"""Logs of boards that one listener follows."""
LOGS = "logs"


class SocketDialect(StrEnum):
    EVENTS = "events"
    """Dotted, as documented."""
    ENVELOPE = "envelope"
    """The dialect of known clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSocketParts:
    """What every socket of boards uses."""

    feed: EventFeed
    logs: LogsRelay
    gate: BoardGate
    authenticate: Callable[[str], BoardCaller]
    clock: Clock


class EventsSocket(Conversation[BoardCaller]):
    """One accepted connection."""

    failure_event = "boards.events_failed"
    token_seconds = 30.0
    token_comes_first = False
    message_limit = 16 * 1024

    def __init__(
        self,
        parts: BoardSocketParts,
        *,
        dialect: SocketDialect,
        token: str | None,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(
            authenticate=parts.authenticate, clock=parts.clock, receive=receive, send=send, token=token
        )
        self._parts = parts
        self._dialect = dialect
        # In the documented dialect a client gets every topic; known clients subscribe topic by topic.
        self._topics: set[Topic] = set(Topic) if dialect is SocketDialect.EVENTS else set()
        self._mailbox: Mailbox[BoardEvent] = Mailbox(bell=self.bell)
        self._followed: dict[int, asyncio.Task[None]] = {}
        self._pinged_at = parts.clock.monotonic()

    def listening(self) -> AbstractContextManager[object]:
        return self._parts.feed.joined(FeedClient(wants=self._wants, mailbox=self._mailbox))

    def _wants(self, topic: Topic) -> bool:
        return self.token is not None and topic in self._topics

    def check(self, caller: BoardCaller) -> None:
        if not self._parts.gate.may(caller, READ):
            raise SocketClosed(RIGHTS_ENDED, "this token may not read boards")

    # Sending.

    async def greet(self) -> None:
        if self._dialect is SocketDialect.ENVELOPE:
            await self.send_text(self._made("pong"))  # known clients wait for it

    async def send_events(self, _caller: BoardCaller) -> bool:
        if missed := self._mailbox.take_missed():
            await self.send_text(self._report_of_missed(missed))
        for _ in range(SENT_AT_ONCE):
            event = self._mailbox.take()
            if event is None:
                return False
            if self._dialect is SocketDialect.EVENTS and event.type:
                await self.send_text(event.dotted)
            elif self._dialect is SocketDialect.ENVELOPE and event.kind:
                await self.send_text(event.enveloped)
        return True

    async def idle(self) -> None:
        now = self._clock.monotonic()
        if self._dialect is SocketDialect.ENVELOPE and now - self._pinged_at >= PING_SECONDS:
            self._pinged_at = now
            await self.send_text(self._made("ping"))

    def _report_of_missed(self, missed: int) -> str:
        words = f"{missed} messages were dropped: they were not read fast enough"
        if self._dialect is SocketDialect.EVENTS:
            return self._made("events.missed", {"count": missed, "message": words})
        return self._made("error", {"code": 429, "message": words})

    def _made(self, kind: str, payload: Any = None, request_id: str = "") -> str:
        name = "data" if self._dialect is SocketDialect.EVENTS else "payload"
        body: dict[str, Any] = {"type": kind, "timestamp": spelled(self._clock.now_ns())}
        if payload is not None:
            body[name] = payload
        if request_id:
            body["request_id"] = request_id
        return msgspec.json.encode(body).decode()

    # Reading.

    def refusal(self, error: FleetplaneError) -> str:
        code = {Unauthenticated: 401, PermissionDenied: 403}.get(type(error), 400)
        return self._made("error", {"code": code, "message": error.message})

    async def act(self, said: dict[str, Any]) -> None:
        payload = said.get("payload") if said.get("payload") is not None else said.get("data")
        request_id = said.get("request_id")
        request_id = request_id[:128] if isinstance(request_id, str) else ""
        match said.get("type"):
            case "ping":
                self.reply(self._made("pong", request_id=request_id))
            case "pong":
                pass
            case "auth":
                self._introduce(payload, request_id)
            case "subscribe":
                self._subscribe(payload)
            case "unsubscribe":
                self._unsubscribe(payload)
            case kind:
                raise InvalidArgument(f"unknown message type {str(kind)[:64]!r}")

    def _introduce(self, payload: Any, request_id: str) -> None:
        token = payload.get("token") if isinstance(payload, dict) else None
        if not isinstance(token, str) or not token:
            raise InvalidArgument("auth needs a payload with a token")
        try:
            caller = self.admitted(token)
        except SocketClosed as refused:
            answer = {"success": False, "user_id": None, "role": None, "message": refused.reason}
            self.reply(self._made("auth", answer, request_id))
            self.count_error(refused)
            return
        self.token = token
        answer = {"success": True, "user_id": caller.name, "role": _role(caller), "message": "welcome"}
        self.reply(self._made("auth", answer, request_id))

    def _require_token(self) -> str:
        if self.token is None:
            raise Unauthenticated("authentication required")
        return self.token

    def _subscribe(self, payload: Any) -> None:
        topic = _topic(payload)
        token = self._require_token()
        if topic == LOGS:
            self._follow(payload, self.admitted(token))
        else:
            self._topics.add(_known(topic))

    def _unsubscribe(self, payload: Any) -> None:
        topic = _topic(payload)
        if topic != LOGS:
            self._topics.discard(_known(topic))
            return
        task = self._followed.pop(_board(payload), None)
        if task is not None:
            task.cancel()

    # Logs.

    def _follow(self, payload: Any, caller: BoardCaller) -> None:
        board = _board(payload)
        if board in self._followed and not self._followed[board].done():
            return
        self._followed = {number: task for number, task in self._followed.items() if not task.done()}
        if len(self._followed) >= LOGS_LIMIT:
            raise InvalidArgument(f"logs of {LOGS_LIMIT} boards are followed already, the most at once")
        wanted = _filter(payload, now_ns=self._clock.now_ns())
        self._followed[board] = self.beside(self._relay(board, wanted, caller))

    async def _relay(self, board: int, wanted: pb.LogFilter, caller: BoardCaller) -> None:
        """Send log entries as fast as the client reads; the board waits, and counts what it cannot keep."""
        reading = self._parts.logs.read(board, wanted, asked=asked_by(caller.principal))
        try:
            async with aclosing(reading) as entries:
                async for entry in entries:
                    if entry.message or entry.dropped:
                        data = {"node_id": board, **wire_json.plain(entry)}
                        await self.put(self._made("system.log.created", data))
        except FleetplaneError as error:
            answer = {"code": error.http_status, "message": f"logs of board {board}: {error.message}"}
            await self.put(self._made("error", answer))


def _topic(payload: Any) -> str:
    topic = payload.get("topic") if isinstance(payload, dict) else payload
    if not isinstance(topic, str):
        raise InvalidArgument("a topic is missing")
    return topic


def _known(topic: str) -> Topic:
    try:
        return Topic(topic)
    except ValueError:
        known = ", ".join([*Topic, LOGS])
        raise InvalidArgument(f"unknown topic {topic[:64]!r}; there are {known}") from None


def _board(payload: Any) -> int:
    board = payload.get("node_id") if isinstance(payload, dict) else None
    if not isinstance(board, int) or isinstance(board, bool) or board < 1:
        raise InvalidArgument("logs need a node_id")
    return board


def _filter(payload: dict[str, Any], *, now_ns: int) -> pb.LogFilter:
    """The filter of a board's logs: entries from now on that match."""
    level = str(payload.get("level") or "").upper()
    if level and level not in pb.LogEntry.LogLevel.keys():  # noqa: SIM118  # no mapping
        raise InvalidArgument(f"unknown level {level[:32]!r}")
    names: dict[str, list[str]] = {}
    for field in ("sources", "units"):
        given = payload.get(field) or []
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            raise InvalidArgument(f"{field} must be a list of texts")
        names[field] = given
    return pb.LogFilter(
        follow=True,
        since=timestamp(now_ns),
        min_level=level or None,
        sources=names["sources"],
        units=names["units"],
    )


def _role(caller: BoardCaller) -> str:
    for role, word in ((ADMIN, "admin"), (OPERATOR, "operator")):
        if role in caller.principal.roles:
            return word
    return "viewer"


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
