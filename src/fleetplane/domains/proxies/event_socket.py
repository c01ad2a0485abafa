"""`/v1/events`: one listener of the feed, over WebSocket.

One task reads what the client asks, one writes; replies wait in a bounded queue beside the
feed. Who the client is and what it may see is asked again before anything is sent, so that a
token that ends, or a membership, ends what it let in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import structlog

from fleetplane.domains.proxies.access import READ, Access, Caller
from fleetplane.domains.proxies.event_feed import EventFeed, Missed
from fleetplane.domains.proxies.event_interests import Interests, Subscription
from fleetplane.domains.proxies.events import Told
from fleetplane.domains.proxies.kinds import ORGANIZATION, WORKSPACE
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Compacted,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.web.gateway import Receive, Send
from fleetplane.web.times import spelled

log = structlog.get_logger(__name__)

FIRST_MESSAGE_SECONDS = 10.0
"""Within which a client that showed no token in the request must show one."""
RECHECK_SECONDS = 5.0
"""How late the end of a token is noticed on a quiet socket."""
REPLIES_LIMIT = 64
"""Replies waiting to be sent; a client that asks without reading is not read from any further."""
ERRORS_LIMIT = 10
READ_AT_ONCE = 64
"""Events sent before the client's right to them is looked at again."""

POLICY_VIOLATION = 1008
TOKEN_ENDED = 4401
RIGHTS_ENDED = 4403
RESTARTING = 1012
GONE = 0
"""The client left: there is nobody to tell."""

Authenticate = Callable[[str], Caller]


class Closed(Exception):  # the errors of the tree go to clients; this ends a socket
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class EventSocket:
    """One accepted connection."""

    def __init__(
        self,
        *,
        feed: EventFeed,
        access: Access,
        authenticate: Authenticate,
        clock: Clock,
        receive: Receive,
        send: Send,
        token: str | None,
    ) -> None:
        self._feed = feed
        self._access = access
        self._authenticate = authenticate
        self._clock = clock
        self._receive = receive
        self._send = send
        self._token = token
        self._interests = Interests()
        self._replies: deque[str] = deque()
        self._room = asyncio.Event()
        self._errors = 0
        self._position = feed.position
        self._seen = feed.revision
        """Everything up to this revision was told, or is missing with the client's knowledge."""
        self._replay: AsyncIterator[Told] | None = None
        self._replay_until = 0
        self._ending: Closed | None = None
        self._bell: asyncio.Event | None = None

    # Life.

    async def serve(self) -> None:
        """Until either side ends it."""
        try:
            if self._token is None:
                await self._introduce()
            with self._feed.bell() as self._bell:
                await self._converse()
        except Closed as closed:
            if closed.code != GONE:
                await self._send({"type": "websocket.close", "code": closed.code, "reason": closed.reason})

    def end(self, code: int, reason: str) -> None:
        self._ending = self._ending or Closed(code, reason)
        self._ring()

    async def _converse(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._listen())
            try:
                while self._ending is None:
                    await self._speak()
            except Closed as closed:
                self._ending = self._ending or closed
            reader.cancel()
        raise self._ending

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()

    async def _introduce(self) -> None:
        """The token as the first message, for those who do not want it in an address."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_SECONDS):
                message = await self._receive()
            asked = _decoded(message)
        except (TimeoutError, InvalidArgument):
            asked = {}
        token = asked.get("token")
        if asked.get("action") != "authenticate" or not isinstance(token, str):
            raise Closed(TOKEN_ENDED, "a token is required")
        self._token = token
        self._reply("authenticated", {"name": self._caller().name})

    # Writing.

    async def _speak(self) -> None:
        """Send what there is, then wait for more."""
        assert self._bell is not None
        self._bell.clear()
        caller = self._caller()
        while self._replies:
            await self._send_text(self._replies.popleft())
            self._room.set()
        if self._replay is not None:
            await self._speak_of_the_past(caller)
            return
        reading = self._feed.read(self._position, limit=READ_AT_ONCE)
        self._position = reading.position
        if isinstance(reading, Missed):
            self._tell_of_missing(reading.revision)
            return
        for one in reading.told:
            await self._tell(one, caller)
        if reading.told or self._replies:
            return
        self._seen = max(self._seen, self._feed.revision)
        try:
            async with asyncio.timeout(RECHECK_SECONDS):
                await self._bell.wait()
        except TimeoutError:
            return

    def _caller(self) -> Caller:
        assert self._token is not None
        try:
            return self._authenticate(self._token)
        except Unauthenticated as error:
            raise Closed(TOKEN_ENDED, error.message) from error

    async def _tell(self, one: Told, caller: Caller) -> None:
        self._seen = one.revision
        if not self._interests.wants(one.type, one.facts):
            return
        if self._access.may(caller, one.permission, one.scope):
            await self._send_text(one.text)
        else:
            self._check_filters(caller)

    def _check_filters(self, caller: Caller) -> None:
        """Who asked for a place by name, and may no longer read there, is told so by the end."""
        for subscription in self._interests.subscriptions:
            try:
                self._may_filter(subscription, caller)
            except PermissionDenied as error:
                raise Closed(RIGHTS_ENDED, error.message) from error

    def _tell_of_missing(self, revision: int) -> None:
        self._reply("events.missed", {"after": self._seen, "resumed_at": revision})
        self._seen = revision

    async def _speak_of_the_past(self, caller: Caller) -> None:
        """A few events of a replay; at its end the ring takes over."""
        assert self._replay is not None
        try:
            for _ in range(READ_AT_ONCE):
                one = await anext(self._replay, None)
                if one is None:
                    self._replay = None
                    break
                await self._tell(one, caller)
        except Compacted as error:
            self._replay = None
            self._complain("COMPACTED", error.message)
        if self._replay is None:
            self._go_on_after(self._replay_until)

    def _go_on_after(self, revision: int) -> None:
        position = self._feed.position_after(revision)
        self._seen = revision
        if position is None:
            self._tell_of_missing(self._feed.revision)
            position = self._feed.position
        self._position = position

    async def _send_text(self, text: str) -> None:
        await self._send({"type": "websocket.send", "text": text})

    def _reply(self, kind: str, data: dict[str, Any]) -> None:
        envelope = {"type": kind, "timestamp": spelled(self._clock.now_ns()), "data": data}
        self._replies.append(msgspec.json.encode(envelope).decode())

    def _complain(self, code: str, message: str) -> None:
        self._reply("error", {"code": code, "message": message})

    # Reading.

    async def _listen(self) -> None:
        """Never raises: what goes wrong ends the socket by way of its writer."""
        try:
            while True:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    raise Closed(GONE, "")
                await self._take(message)
                self._ring()
        except Closed as closed:
            self.end(closed.code, closed.reason)
        except Exception as error:
            log.error("proxies.events_failed", exc_info=error)
            self.end(1011, "internal error")

    async def _take(self, message: Any) -> None:
        while len(self._replies) >= REPLIES_LIMIT:
            self._room.clear()
            await self._room.wait()
        try:
            self._act(_decoded(message))
        except FleetplaneError as error:
            code = {InvalidArgument: "VALIDATION_ERROR", PermissionDenied: "FORBIDDEN"}.get(type(error))
            self._complain(code or error.reason, error.message)
            self._errors += 1
            if self._errors >= ERRORS_LIMIT:
                raise Closed(POLICY_VIOLATION, "too many errors") from error

    def _act(self, asked: dict[str, Any]) -> None:
        match asked.get("action"):
            case "subscribe":
                self._subscribe(asked)
            case "unsubscribe":
                ended = self._interests.unsubscribe(asked.get("id"), asked.get("events"))
                self._confirm(ended)
            case "resume":
                self._resume(asked.get("since"))
            case "ping":
                self._replies.append('{"type":"pong"}')
            case "authenticate":
                self._renew(asked.get("token"))
            case action:
                raise InvalidArgument(f"unknown action {str(action)[:64]!r}", field="action")

    def _subscribe(self, asked: dict[str, Any]) -> None:
        wish = Interests().subscribe(asked.get("events"), asked.get("filter"))
        self._may_filter(wish, self._caller())
        since = asked.get("since")
        if since is not None:
            _check_revision(since)
        self._confirm(self._interests.subscribe(asked.get("events"), asked.get("filter")))
        if since is not None:
            self._resume(since)

    def _may_filter(self, wish: Subscription, caller: Caller) -> None:
        for name, kind in (("workspace_id", WORKSPACE), ("organization_id", ORGANIZATION)):
            for identity in wish.filter.get(name, ()):
                scope = self._access.locate(kind, identity)
                if scope is None or not self._access.may(caller, READ, scope):
                    raise PermissionDenied(f"you may not read {name} {identity[:64]}")

    def _confirm(self, subscription: Subscription) -> None:
        filters = {
            name: values[0] if len(values) == 1 else values for name, values in subscription.filter.items()
        }
        self._reply(
            "subscription.updated",
            {
                "id": subscription.id or None,
                "events": subscription.events,
                "filter": filters,
                "revision": self._seen,
            },
        )

    def _resume(self, since: object) -> None:
        """Have everything after a revision told, again or for the first time."""
        revision = _check_revision(since)
        if revision > self._feed.revision:
            raise InvalidArgument(f"revision {revision} is in the future", field="since")
        position = self._feed.position_after(revision)
        if position is not None:
            self._replay, self._position, self._seen = None, position, revision
            return
        self._replay_until = self._feed.revision
        self._replay = self._feed.history(revision, self._replay_until)

    def _renew(self, token: object) -> None:
        """A newer token for the same caller keeps the socket open beyond the older one's end."""
        if not isinstance(token, str):
            raise InvalidArgument("token must be a text", field="token")
        try:
            renewed = self._authenticate(token)
        except Unauthenticated as error:
            raise InvalidArgument(error.message, field="token") from error
        if renewed.name != self._caller().name:
            raise InvalidArgument("the token belongs to someone else", field="token")
        self._token = token
        self._reply("authenticated", {"name": renewed.name})


def _check_revision(since: object) -> int:
    if not isinstance(since, int) or isinstance(since, bool) or since < 0:
        raise InvalidArgument("since must be a revision", field="since")
    return since


def _decoded(message: Any) -> dict[str, Any]:
    if message["type"] == "websocket.disconnect":
        raise Closed(GONE, "")
    try:
        asked = msgspec.json.decode(message.get("text") or message.get("bytes") or b"")
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    if not isinstance(asked, dict):
        raise InvalidArgument("a message must be an object")
    return asked
