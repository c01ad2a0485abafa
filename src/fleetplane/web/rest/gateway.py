"""What every request under a prefix passes before it reaches its route.

A bare ASGI application around another: gives the request its id, finds out who calls, counts
it against the caller's rate, bounds its body, and puts the customary headers on every answer,
also on those that no route gave. Knows no framework.

The rate is a sliding window in two numbers for each caller: requests of this minute, and those of the
minute before, weighted by the part of it that lies within the last sixty seconds. In metrics neither
caller nor path is a label: both are unbounded.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Generic

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unauthenticated
from fleetplane.kernel.networks import network_of
from fleetplane.rpc.listening.doors import TOO_MANY_UNKNOWN, enter_unknown, leave_unknown
from fleetplane.web.rest.bodies import BODY_LIMIT_BYTES
from fleetplane.web.rest.problems import Code, Envelope, Problem, Refusal, Rejected, TooSlow, refusal
from fleetplane.web.rest.routes import C, Gate, Headers

CALLERS_LIMIT = 50_000
"""Callers remembered; about 200 bytes each. The one heard from longest ago is forgotten first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """The answer to one request, and the headers' numbers."""

    allowed: bool
    limit: int
    remaining: int
    reset_seconds: float
    """Until the window has emptied enough for one more, or, while there is room, has emptied."""


@dataclass(slots=True)
class _Count:
    window: int
    current: int = 0
    previous: int = 0


class RestRate:
    def __init__(
        self, limit: int, *, window_seconds: float = 60.0, callers_limit: int = CALLERS_LIMIT
    ) -> None:
        self._limit = limit
        self._window = window_seconds
        self._callers_limit = callers_limit
        self._counts: OrderedDict[str, _Count] = OrderedDict()
        self.refused = 0

    def __repr__(self) -> str:
        return f"<RateLimit {self._limit}/{self._window:g}s callers={len(self._counts)}>"

    def take(self, caller: str, *, now: float) -> Allowance:
        """Count one request, unless it is one too many."""
        count = self._count(caller, now)
        elapsed = now - count.window * self._window
        used = count.current + count.previous * (1 - elapsed / self._window)
        if used + 1 > self._limit:
            self.refused += 1
            wait = self._wait(count, used, elapsed)
            return Allowance(allowed=False, limit=self._limit, remaining=0, reset_seconds=wait)
        count.current += 1
        remaining = max(0, math.floor(self._limit - used - 1))
        return Allowance(
            allowed=True, limit=self._limit, remaining=remaining, reset_seconds=self._window - elapsed
        )

    def _wait(self, count: _Count, used: float, elapsed: float) -> float:
        excess = used + 1 - self._limit
        if count.previous and excess <= count.previous * (1 - elapsed / self._window):
            return excess * self._window / count.previous
        # Then this window must end, and its own count drain far enough in the next.
        drained = max(0.0, (count.current + 1 - self._limit) / max(1, count.current))
        return self._window - elapsed + drained * self._window

    def _count(self, caller: str, now: float) -> _Count:
        window = math.floor(now / self._window)
        count = self._counts.pop(caller, None)
        if count is None:
            count = _Count(window)
        elif count.window != window:
            count.previous = count.current if count.window == window - 1 else 0
            count.current, count.window = 0, window
        self._counts[caller] = count
        if len(self._counts) > self._callers_limit:
            self._counts.popitem(last=False)
        return count


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

REQUESTS_PER_MINUTE = 1000
ARRIVAL = "fleetplane.arrival"
"""The key in an ASGI scope under which the rest of the server finds what was found out here."""

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,64}")
BODY_START_SECONDS = 10.0
BODY_RATE_BYTES = 10 * 1024
"""A second, on the average: a body of the greatest length takes less than two minutes."""
BODY_SECONDS = 120.0
_TOO_LONG = Problem(field="", message=f"The body is longer than {BODY_LIMIT_BYTES} bytes", code=Code.TOO_LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival(Generic[C]):
    request_id: str
    address: str
    caller: C | None
    refused: Unauthenticated | None
    """Why there is no caller."""
    headers: Headers


class Gateway(Generic[C]):
    def __init__(
        self,
        app: App,
        gate: Gate[C],
        clock: Clock,
        *,
        requests_per_minute: int = REQUESTS_PER_MINUTE,
        envelope: Envelope = refusal,
    ) -> None:
        self._envelope = envelope
        self._app = app
        self._gate = gate
        self._clock = clock
        self.rate = RestRate(requests_per_minute)
        self.answers: Counter[int] = Counter()
        """By the first digit of their status."""

    def __repr__(self) -> str:
        return f"<Gateway {self.rate!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        arrival = self._arrival(scope, headers)
        allowance = self.rate.take(
            arrival.caller.name if arrival.caller else f"address/{network_of(arrival.address)}",
            now=self._clock.now_ns() / 1e9,
        )
        send = self._with_headers(send, arrival.request_id, allowance, tls=scope.get("scheme") == "https")
        if (error := _unwelcome(headers, allowance)) is not None:
            await _send(send, self._envelope(error, arrival.request_id))
            return
        scope[ARRIVAL] = arrival
        known: Any = scope  # ASGI's own word for it
        if arrival.caller is None and not enter_unknown(known):
            error = ResourceExhausted(TOO_MANY_UNKNOWN, retry_after_seconds=1)
            await _send(send, self._envelope(error, arrival.request_id))
            return
        try:
            await self._app(scope, _bounded(receive), send)
        finally:
            leave_unknown(known)

    def _arrival(self, scope: Scope, headers: dict[bytes, bytes]) -> Arrival[C]:
        client = scope.get("client")
        caller, refused = None, None
        crumbs = [value for name, value in scope["headers"] if name == b"cookie"]
        if len(crumbs) > 1:  # which HTTP/2 may send one by one
            headers = {**headers, b"cookie": b"; ".join(crumbs)}
        shown = Headers(headers, method=scope["method"], secure=scope.get("scheme") == "https")
        try:
            caller = self._gate.authenticate(shown)
        except Unauthenticated as error:
            refused = error
        given = headers.get(b"x-request-id", b"")
        request_id = (
            given.decode("ascii")
            if _REQUEST_ID.fullmatch(given)
            else f"req-{self._clock.token_bytes(9).hex()}"
        )
        return Arrival(
            request_id=request_id,
            address=client[0] if client and client[0] else "unix",
            caller=caller,
            refused=refused,
            headers=shown,
        )

    def _with_headers(self, send: Send, request_id: str, allowance: Allowance, *, tls: bool) -> Send:
        reset = self._clock.now_ns() // 1_000_000_000 + int(allowance.reset_seconds) + 1
        extra = [
            (b"x-request-id", request_id.encode()),
            (b"x-ratelimit-limit", str(allowance.limit).encode()),
            (b"x-ratelimit-remaining", str(allowance.remaining).encode()),
            (b"x-ratelimit-reset", str(reset).encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        if tls:
            extra.append((b"strict-transport-security", b"max-age=31536000"))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers[message["status"] // 100] += 1
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        return sending


AnyGateway = Gateway[Any]


def _unwelcome(headers: dict[bytes, bytes], allowance: Allowance) -> FleetplaneError | None:
    if not allowance.allowed:
        return ResourceExhausted(
            f"more than {allowance.limit} requests a minute", retry_after_seconds=allowance.reset_seconds
        )
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length[:12]) > BODY_LIMIT_BYTES:
        return Rejected(_TOO_LONG)
    return None


def _bounded(receive: Receive) -> Receive:
    """A body that says nothing of its length is counted as it comes, and must come at some pace."""
    seen, began, whole = 0, asyncio.get_running_loop().time(), False

    async def receiving() -> Message:
        nonlocal seen, whole
        if whole:  # what is received now is that the caller has left
            return await receive()
        try:
            async with asyncio.timeout_at(began + body_seconds(seen)):
                message = await receive()
        except TimeoutError:
            raise TooSlow(f"the body came too slowly: {seen} bytes in {body_seconds(seen):.0f} s") from None
        if message["type"] == "http.disconnect":
            raise TooSlow("the client left before the end of the body")
        whole = not message.get("more_body")
        if "body" not in message:  # as ASGI allows, and not everyone expects
            return {**message, "body": b""}
        seen += len(message["body"])
        if seen > BODY_LIMIT_BYTES:
            raise Rejected(_TOO_LONG)
        return message

    return receiving


def body_seconds(seen: int) -> float:
    """How long a body of which so much is here may have taken: a start, a least rate, and an end."""
    return min(BODY_START_SECONDS + seen / BODY_RATE_BYTES, BODY_SECONDS)


async def _send(send: Send, answer: Refusal) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})


class GatewayCollector(Collector):
    def __init__(self, gateway: AnyGateway, *, domain: str) -> None:
        self._gateway = gateway
        self._domain = domain

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "fleetplane_web_answers",
            "Answers of the REST API by class of status.",
            labels=["domain", "status"],
        )
        for status, count in sorted(self._gateway.answers.items()):
            answers.add_metric([self._domain, f"{status}xx"], count)
        yield answers
        refused = CounterMetricFamily(
            "fleetplane_web_rate_limited", "Requests beyond their caller's rate.", labels=["domain"]
        )
        refused.add_metric([self._domain], self._gateway.rate.refused)
        yield refused
