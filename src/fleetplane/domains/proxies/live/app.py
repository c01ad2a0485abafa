"""The WebSocket application of `/v1/events`, and one connection to it.

What the client may see is checked again before anything is sent, so a token or a membership that ends also
ends its events. `web.sockets.conversation` has what every socket has in common.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from fleetplane.domains.proxies.access import READ, Access, ProxyCaller
from fleetplane.domains.proxies.kinds.records import ORGANIZATION, WORKSPACE
from fleetplane.domains.proxies.live.events import ProxyEvent
from fleetplane.domains.proxies.live.subscriptions import EventLimits, Interests, Subscription
from fleetplane.fleet.feeds.ring import UNKNOWN_PART, WHOLE, EventRing, Missed, Place
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Compacted,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    Unauthenticated,
)
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.sockets.conversation import SENT_AT_ONCE, Conversation, SocketApp, SocketClosed
from fleetplane.web.sockets.door import RIGHTS_ENDED, TOKEN_ENDED

CURSOR_LIMIT = 64

Authenticate = Callable[[str], ProxyCaller]


class EventSocket(Conversation[ProxyCaller]):
    """One accepted connection."""

    failure_event = "proxies.events_failed"
    token_seconds = 10.0
    token_comes_first = True

    def __init__(
        self,
        *,
        feed: EventRing[ProxyEvent],
        access: Access,
        authenticate: Authenticate,
        clock: Clock,
        receive: Receive,
        send: Send,
        token: str | None,
        limits: EventLimits | None = None,
    ) -> None:
        super().__init__(authenticate=authenticate, clock=clock, receive=receive, send=send, token=token)
        self._limits = limits or EventLimits()
        self._feed = feed
        self._access = access
        self._interests = Interests(self._limits)
        self._position = feed.position
        self._seen = feed.revision
        """Everything up to this revision was sent, or is missing with the client's knowledge."""
        self._replay: AsyncIterator[ProxyEvent] | None = None
        self._replay_until = 0

    def listening(self) -> AbstractContextManager[object]:
        return self._feed.ringing(self.bell)

    # Sending.

    async def send_events(self, caller: ProxyCaller) -> bool:
        if self._replay is not None:
            await self._send_history(caller)
            return True
        reading = self._feed.read(self._position, limit=SENT_AT_ONCE)
        self._position = reading.position
        if isinstance(reading, Missed):
            self._report_missed(reading.revision)
            return True
        for one in reading.events:
            await self._send_event(one, caller)
        if not reading.events:
            self._seen = max(self._seen, self._feed.revision)
        return bool(reading.events)

    async def _send_event(self, one: ProxyEvent, caller: ProxyCaller) -> None:
        self._seen = one.revision
        if not self._interests.wants(one.type, one.facts):
            return
        if self._access.may(caller, one.permission, one.scope):
            await self.send_text(one.text)
        else:
            self._check_filters(caller)

    def _check_filters(self, caller: ProxyCaller) -> None:
        """Close the socket of a client that named a workspace or organisation it may no longer read."""
        for subscription in self._interests.subscriptions:
            try:
                self._may_filter(subscription, caller)
            except PermissionDenied as error:
                raise SocketClosed(RIGHTS_ENDED, error.message) from error

    def _report_missed(self, revision: int) -> None:
        self._reply("events.missed", {"after": self._seen, "resumed_at": revision})
        self._seen = revision

    async def _send_history(self, caller: ProxyCaller) -> None:
        """Send a few events of a replay; at its end the ring takes over."""
        assert self._replay is not None
        try:
            for _ in range(SENT_AT_ONCE):
                one = await anext(self._replay, None)
                if one is None:
                    self._replay = None
                    break
                await self._send_event(one, caller)
        except Compacted as error:
            self._replay = None
            self._complain("COMPACTED", error.message)
        if self._replay is None:
            self._go_on_after(self._replay_until)

    def _go_on_after(self, revision: int) -> None:
        position = self._feed.position_after((revision, WHOLE))
        self._seen = revision
        if position is None:
            self._report_missed(self._feed.revision)
            position = self._feed.position
        self._position = position

    def _reply(self, kind: str, data: dict[str, Any]) -> None:
        self.reply(self._message(kind, data))

    def _message(self, kind: str, data: dict[str, Any]) -> str:
        envelope = {"type": kind, "timestamp": spelled(self._clock.now_ns()), "data": data}
        return msgspec.json.encode(envelope).decode()

    def _complain(self, code: str, message: str) -> None:
        self._reply("error", {"code": code, "message": message})

    # Reading.

    def refusal(self, error: FleetplaneError) -> str:
        code = {InvalidArgument: "VALIDATION_ERROR", PermissionDenied: "FORBIDDEN"}.get(type(error))
        return self._message("error", {"code": code or error.reason, "message": error.message})

    async def act(self, asked: dict[str, Any]) -> None:
        if self.token is None:
            self._introduce(asked)
            return
        match asked.get("action"):
            case "subscribe":
                await self._subscribe(asked)
            case "unsubscribe":
                ended = self._interests.unsubscribe(asked.get("id"), asked.get("events"))
                self._confirm(ended)
            case "resume":
                await self._resume(asked.get("since"))
            case "ping":
                self.reply('{"type":"pong"}')
            case "authenticate":
                self._renew(asked.get("token"))
            case action:
                raise InvalidArgument(f"unknown action {str(action)[:64]!r}", field="action")

    async def _subscribe(self, asked: dict[str, Any]) -> None:
        wish = Interests(self._limits).subscribe(asked.get("events"), asked.get("filter"))
        self._may_filter(wish, self._present_caller())
        since = asked.get("since")
        if since is not None:
            _check_place(since)
        self._confirm(self._interests.subscribe(asked.get("events"), asked.get("filter")))
        if since is not None:
            await self._resume(since)

    def _may_filter(self, wish: Subscription, caller: ProxyCaller) -> None:
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

    async def _resume(self, since: object) -> None:
        """Send everything after a revision or an event, again or for the first time."""
        place = _check_place(since)
        revision, _ = place
        if not await self._feed.reached(revision):
            raise InvalidArgument(f"revision {revision} is in the future", field="since")
        position = self._feed.position_after(place)
        if position is not None:
            self._replay, self._position, self._seen = None, position, revision
            return
        self._replay_until = self._feed.revision
        self._replay = self._feed.history(place, self._replay_until)

    def _introduce(self, asked: dict[str, Any]) -> None:
        """The token as the first message, for clients that do not put it into the address."""
        token = asked.get("token")
        if asked.get("action") != "authenticate" or not isinstance(token, str):
            raise SocketClosed(TOKEN_ENDED, "a token is required")
        caller = self.admitted(token)
        self.token = token
        self._reply("authenticated", {"name": caller.name})

    def _present_caller(self) -> ProxyCaller:
        assert self.token is not None
        return self.admitted(self.token)

    def _renew(self, token: object) -> None:
        """A newer token for the same caller keeps the socket open beyond the older one's end."""
        if not isinstance(token, str):
            raise InvalidArgument("token must be a text", field="token")
        try:
            renewed = self._authenticate(token)
        except Unauthenticated as error:
            raise InvalidArgument(error.message, field="token") from error
        if renewed.name != self._present_caller().name:
            raise InvalidArgument("the token belongs to someone else", field="token")
        self.token = token
        self._reply("authenticated", {"name": renewed.name})


def _check_place(since: object) -> Place:
    """A revision, or the cursor of an event: up to and including that event."""
    if isinstance(since, int) and not isinstance(since, bool) and since >= 0:
        return since, UNKNOWN_PART
    if isinstance(since, str) and len(since) <= CURSOR_LIMIT and since.isascii():
        revision, _, part = since.partition(".")
        if revision.isdecimal() and part.isdecimal() and int(part) < WHOLE:
            return int(revision), int(part)
    raise InvalidArgument("since must be a revision, or the cursor of an event", field="since")


PATH = "/v1/events"


class ProxyEventsApp(SocketApp):
    def __init__(
        self,
        feed: EventRing[ProxyEvent],
        *,
        access: Access,
        authenticate: Authenticate,
        clock: Clock,
        origins: Collection[str] = (),
        limits: EventLimits | None = None,
    ) -> None:
        """`origins` are web pages, beside our own, that may listen; `*` stands for all."""
        limits = limits or EventLimits()
        super().__init__(
            clock=clock,
            authenticate=authenticate,
            sockets_limit=limits.sockets,
            sockets_per_caller=limits.sockets_per_caller,
            origins=origins,
        )
        self._feed = feed
        self._access = access
        self._let_in = authenticate
        self._limits = limits

    def converse(self, _scope: Scope, receive: Receive, send: Send, token: str | None) -> EventSocket:
        return EventSocket(
            feed=self._feed,
            access=self._access,
            authenticate=self._let_in,
            clock=self._clock,
            receive=receive,
            send=send,
            token=token,
            limits=self._limits,
        )
