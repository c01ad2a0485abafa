"""`/ws`: one listener, in either dialect. See `events` for what they are told.

A listener shows who it is with its request or in its first words, and hears nothing before. Who it
is, and whether it may look, is asked again while it listens, so that a token that ends, ends what it
let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
import structlog

from fleetplane.domains.boards import wire_json
from fleetplane.domains.boards.access import ADMIN, OPERATOR, READ
from fleetplane.domains.boards.asking import asked_by
from fleetplane.domains.boards.event_feed import EventFeed, Mailbox
from fleetplane.domains.boards.events import Told, Topic
from fleetplane.domains.boards.logs_relay import LogsRelay
from fleetplane.domains.boards.rest import Caller, Gatekeeper
from fleetplane.domains.boards.wire import moment
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied, Unauthenticated
from fleetplane.web.gateway import Receive, Send
from fleetplane.web.sockets import POLICY_VIOLATION, RIGHTS_ENDED, TOKEN_ENDED
from fleetplane.web.times import spelled

log = structlog.get_logger(__name__)

PING_SECONDS = 54.0
AUTH_SECONDS = 30.0
"""Within which one who came without a token must show one."""
RECHECK_SECONDS = 5.0
"""How late the end of a token is noticed."""
SENT_AT_ONCE = 64
"""Messages between two looks at whether the listener may still hear them."""
MESSAGE_LIMIT = 16 * 1024
ERRORS_LIMIT = 10
LOGS_LIMIT = 4
"""Logs of boards that one listener follows."""
GONE = 0
LOGS = "logs"


class Dialect(StrEnum):
    EVENTS = "events"
    """Dotted, as documented."""
    ENVELOPE = "envelope"
    """As known clients speak."""


class Closed(Exception):  # the errors of the tree go to clients; this ends a socket
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What every socket stands on."""

    feed: EventFeed
    logs: LogsRelay
    gate: Gatekeeper
    authenticate: Callable[[str], Caller]
    clock: Clock


class EventsSocket:
    """One accepted connection."""

    def __init__(
        self, ground: Ground, *, dialect: Dialect, token: str | None, receive: Receive, send: Send
    ) -> None:
        self._ground = ground
        self._dialect = dialect
        self._token = token
        self._receive = receive
        self._send = send
        # All that is documented is told to whoever listens for it; known clients ask topic by topic.
        self._topics: set[Topic] = set(Topic) if dialect is Dialect.EVENTS else set()
        self._mailbox = Mailbox(self._wants)
        self._followed: dict[int, asyncio.Task[None]] = {}
        self._errors = 0
        self._ending: Closed | None = None
        self._checked_at = float("-inf")
        self._began = self._pinged_at = ground.clock.monotonic()
        self._tasks: asyncio.TaskGroup

    # Life.

    async def serve(self) -> None:
        """Until either side ends it."""
        self._ground.feed.join(self._mailbox)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                reader = self._tasks.create_task(self._listen())
                await self._speak_until_the_end()
                reader.cancel()
                for task in self._followed.values():
                    task.cancel()
        finally:
            self._ground.feed.leave(self._mailbox)
        assert self._ending is not None
        if self._ending.code != GONE:
            await self._send(
                {"type": "websocket.close", "code": self._ending.code, "reason": self._ending.reason}
            )

    def end(self, code: int, reason: str) -> None:
        self._ending = self._ending or Closed(code, reason)
        self._mailbox.bell.set()

    def _wants(self, topic: Topic) -> bool:
        return self._token is not None and topic in self._topics

    # Speaking.

    async def _speak_until_the_end(self) -> None:
        try:
            if self._dialect is Dialect.ENVELOPE:
                await self._say("pong")  # known clients wait for it
            while self._ending is None:
                self._check()
                await self._speak()
                await self._wait()
        except Closed as closed:
            self._ending = self._ending or closed

    async def _speak(self) -> None:
        if missed := self._mailbox.take_missed():
            await self._tell_of_missing(missed)
        for _ in range(SENT_AT_ONCE):
            message = self._mailbox.take()
            if message is None:
                return
            await self._pass_on(message)

    async def _pass_on(self, message: Told | str) -> None:
        if isinstance(message, str):
            await self._text(message)
        elif self._dialect is Dialect.EVENTS and message.type:
            await self._text(message.dotted)
        elif self._dialect is Dialect.ENVELOPE and message.kind:
            await self._text(message.enveloped)

    async def _wait(self) -> None:
        if len(self._mailbox) or self._ending is not None:
            return
        self._mailbox.bell.clear()
        try:
            async with asyncio.timeout(RECHECK_SECONDS):
                await self._mailbox.bell.wait()
        except TimeoutError:
            pass
        now = self._ground.clock.monotonic()
        if self._dialect is Dialect.ENVELOPE and now - self._pinged_at >= PING_SECONDS:
            self._pinged_at = now
            await self._say("ping")

    def _check(self) -> None:
        """That the listener is still somebody who may look."""
        now = self._ground.clock.monotonic()
        if self._token is None:
            if now - self._began > AUTH_SECONDS:
                raise Closed(TOKEN_ENDED, "a token is required")
            return
        if now - self._checked_at >= RECHECK_SECONDS:
            self._admit(self._token)
            self._checked_at = now

    def _admit(self, token: str) -> Caller:
        try:
            caller = self._ground.authenticate(token)
        except Unauthenticated as error:
            raise Closed(TOKEN_ENDED, error.message) from error
        if not self._ground.gate.may(caller, READ):
            raise Closed(RIGHTS_ENDED, "this token may not look at boards")
        return caller

    async def _tell_of_missing(self, missed: int) -> None:
        words = f"{missed} messages were dropped: they were not read fast enough"
        if self._dialect is Dialect.EVENTS:
            await self._text(self._made("events.missed", {"count": missed, "message": words}))
        else:
            await self._say("error", {"code": 429, "message": words})

    async def _say(self, kind: str, payload: Any = None, request_id: str = "") -> None:
        await self._text(self._made(kind, payload, request_id))

    def _made(self, kind: str, payload: Any = None, request_id: str = "") -> str:
        name = "data" if self._dialect is Dialect.EVENTS else "payload"
        body: dict[str, Any] = {"type": kind, "timestamp": spelled(self._ground.clock.now_ns())}
        if payload is not None:
            body[name] = payload
        if request_id:
            body["request_id"] = request_id
        return msgspec.json.encode(body).decode()

    async def _text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    # Listening.

    async def _listen(self) -> None:
        """Never raises: what goes wrong ends the socket by way of its speaker."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    raise Closed(GONE, "")
                await self._take(message)
        except Closed as closed:
            self.end(closed.code, closed.reason)
        except Exception as error:
            log.error("boards.events_failed", exc_info=error)
            self.end(1011, "internal error")

    async def _take(self, message: Any) -> None:
        try:
            await self._act(_decoded(message))
        except FleetplaneError as error:
            code = {Unauthenticated: 401, PermissionDenied: 403}.get(type(error), 400)
            await self._mailbox.put(self._made("error", {"code": code, "message": error.message}))
            self._errors += 1
            if self._errors >= ERRORS_LIMIT:
                raise Closed(POLICY_VIOLATION, "too many errors") from error

    async def _act(self, said: dict[str, Any]) -> None:
        payload = said.get("payload") if said.get("payload") is not None else said.get("data")
        request_id = said.get("request_id")
        request_id = request_id[:128] if isinstance(request_id, str) else ""
        match said.get("type"):
            case "ping":
                await self._mailbox.put(self._made("pong", request_id=request_id))
            case "pong":
                pass
            case "auth":
                await self._introduce(payload, request_id)
            case "subscribe":
                self._subscribe(payload)
            case "unsubscribe":
                self._unsubscribe(payload)
            case kind:
                raise InvalidArgument(f"unknown message type {str(kind)[:64]!r}")

    async def _introduce(self, payload: Any, request_id: str) -> None:
        token = payload.get("token") if isinstance(payload, dict) else None
        if not isinstance(token, str) or not token:
            raise InvalidArgument("auth needs a payload with a token")
        try:
            caller = self._admit(token)
        except Closed as refused:
            told = {"success": False, "user_id": None, "role": None, "message": refused.reason}
            await self._mailbox.put(self._made("auth", told, request_id))
            self._errors += 1
            if self._errors >= ERRORS_LIMIT:
                raise Closed(POLICY_VIOLATION, "too many errors") from refused
            return
        self._token, self._checked_at = token, self._ground.clock.monotonic()
        told = {"success": True, "user_id": caller.name, "role": _role(caller), "message": "welcome"}
        await self._mailbox.put(self._made("auth", told, request_id))

    def _require_token(self) -> str:
        if self._token is None:
            raise Unauthenticated("authentication required")
        return self._token

    def _subscribe(self, payload: Any) -> None:
        topic = _topic(payload)
        token = self._require_token()
        if topic == LOGS:
            self._follow(payload, self._admit(token))
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

    def _follow(self, payload: Any, caller: Caller) -> None:
        board = _board(payload)
        if board in self._followed and not self._followed[board].done():
            return
        self._followed = {number: task for number, task in self._followed.items() if not task.done()}
        if len(self._followed) >= LOGS_LIMIT:
            raise InvalidArgument(f"logs of {LOGS_LIMIT} boards are followed already, the most at once")
        wanted = _filter(payload, now_ns=self._ground.clock.now_ns())
        self._followed[board] = self._tasks.create_task(self._relay(board, wanted, caller))

    async def _relay(self, board: int, wanted: pb.LogFilter, caller: Caller) -> None:
        """As fast as the listener reads: the board waits, and counts what it cannot keep."""
        reading = self._ground.logs.read(board, wanted, asked=asked_by(caller.principal))
        try:
            async with aclosing(reading) as entries:
                async for entry in entries:
                    if entry.message or entry.dropped:
                        data = {"node_id": board, **wire_json.plain(entry)}
                        await self._mailbox.put(self._made("system.log.created", data))
        except FleetplaneError as error:
            told = {"code": error.http_status, "message": f"logs of board {board}: {error.message}"}
            await self._mailbox.put(self._made("error", told))


def _decoded(message: Any) -> dict[str, Any]:
    raw = message.get("text") or message.get("bytes") or b""
    if len(raw) > MESSAGE_LIMIT:
        raise InvalidArgument(f"a message has at most {MESSAGE_LIMIT} characters")
    try:
        said = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if not isinstance(said, dict):
        raise InvalidArgument("a message must be an object")
    return said


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
    """What is to be told of a board's logs: none from before, and all from now on that fits."""
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
        follow=True, since=moment(now_ns), min_level=level or None, sources=names["sources"],
        units=names["units"],
    )  # fmt: skip


def _role(caller: Caller) -> str:
    for role, word in ((ADMIN, "admin"), (OPERATOR, "operator")):
        if role in caller.principal.roles:
            return word
    return "viewer"
