"""The WebSocket application of `/v1/events`."""

from __future__ import annotations

from collections.abc import Collection

from fleetplane.domains.proxies.access import Access
from fleetplane.domains.proxies.live.events import ProxyEvent
from fleetplane.domains.proxies.live.socket import Authenticate, EventSocket
from fleetplane.domains.proxies.live.subscriptions import EventLimits
from fleetplane.fleet.feeds.ring import EventRing
from fleetplane.kernel.clock import Clock
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.sockets.conversation import SocketApp

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
