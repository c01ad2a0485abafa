"""The short way for unary calls whose answer lies ready as bytes.

What makes a call costly is not its answer but what is set up so that it can wait: for the rest of
its request, for its handler, for room in the client's window, and be ended meanwhile by a
deadline, a departure or a stop. A call that never waits needs none of it. A servicer may therefore
offer, beside a method's coroutine, a plain function that answers at once or says that it cannot.

The short way serves a call only if nothing about it is unusual and nothing in it has to be waited
for. Whenever that turns out not to be so, even between two pieces of the answer, the call goes on
the ordinary way, which is given what was received and sent so far and so neither misses nor
repeats anything. Whatever may refuse, fail, wait or be logged is decided there and nowhere else.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Generator
from dataclasses import replace
from typing import Any, Final

from fleetplane.kernel.errors import PermissionDenied
from fleetplane.rpc.listening.doors import CONNECTION
from fleetplane.rpc.serving.call import BoundMethod, House
from fleetplane.rpc.serving.connection import FixedPrincipal, Scope
from fleetplane.rpc.serving.exchange import OK_TRAILERS, PLAIN_START, Event, Receive, Send
from fleetplane.rpc.serving.framing import IDENTITY, PREFIX_BYTES, Framed, prefix
from fleetplane.rpc.serving.handlers import ImmediateAnswer
from fleetplane.rpc.serving.status import BadTimeout, parse_timeout

_DONE: Final = object()


class Shortcut:
    """The short way of one method."""

    __slots__ = ("_answer", "_gate", "_house", "_limit", "_limits", "_method", "_monotonic", "_statistics")

    def __init__(self, house: House, method: BoundMethod, answer: ImmediateAnswer) -> None:
        self._house = house
        self._gate = house.gate
        self._method = method
        self._answer = answer
        self._limits = house.limits
        self._limit = method.limit_bytes - PREFIX_BYTES
        self._monotonic = house.clock.monotonic
        self._statistics = method.statistics

    @classmethod
    def of(cls, house: House, method: BoundMethod) -> Shortcut | None:
        """The short way, if the method offers one and admits every caller alike."""
        answer, row, authenticate = method.handler.immediate, method.row, method.authenticate
        if answer is None or method.limiter is not None or row.concurrency is not None:
            return None
        if not isinstance(authenticate, FixedPrincipal):
            return None
        try:
            if row.permission is not None:
                house.access.check(authenticate.principal, row.permission, authenticate.principal.scope)
        except PermissionDenied:
            return None
        return cls(house, method, answer)

    def serve(self, scope: Scope, receive: Receive, send: Send) -> Handover | None:
        """Serve the call and return None; or return how it goes on the ordinary way."""
        started = self._monotonic()
        house, limits, headers = self._house, self._limits, scope["headers"]
        fields = dict(headers)
        size = 0
        for name, value in headers:
            size += len(name) + len(value)
        if (
            house.draining
            or len(house.calls) >= limits.active_calls
            or scope["method"] != "POST"
            or fields.get(b"content-type") != b"application/grpc"
            or fields.get(b"te") != b"trailers"
            or "http.response.trailers" not in scope["extensions"]
            or len(headers) > limits.metadata_fields
            or size > limits.metadata_bytes
            or (b"grpc-encoding" in fields and fields[b"grpc-encoding"] != IDENTITY)
            or (b"grpc-timeout" in fields and not _is_ahead(fields[b"grpc-timeout"]))
            or (self._gate is not None and not self._gate.is_open(self._method.row.needs))
        ):
            return Handover(self._method, receive, send)
        request = self._request(receive, send)
        if isinstance(request, Handover):
            return request
        if CONNECTION in scope:
            scope[CONNECTION].body_bytes += len(request)
        try:
            answer = self._answer(request, fields)
        except Exception as error:
            return Handover(self._asked(error), receive, send, read=[_whole(request)])
        if answer is None:
            return Handover(self._method, receive, send, read=[_whole(request)])
        sent = 0
        pending: Awaitable[Any]
        try:
            body = {"type": "http.response.body", "body": answer.body, "more_body": False}
            for event in (PLAIN_START, body, OK_TRAILERS):
                steps = send(event).__await__()
                waiting = next(steps, _DONE)
                if waiting is not _DONE:
                    pending = _rest(steps, waiting)
                    break
                sent += 1
            else:
                self._statistics.served(answer.messages, self._monotonic() - started)
                return None
        except Exception as error:
            pending = _failing(error)
        return Handover(
            self._asked(answer), receive, send, read=[_whole(request)], sent=sent, pending=pending
        )

    def _request(self, receive: Receive, send: Send) -> bytes | Handover:
        """The message of a request that is here already and is one plain frame.

        Such a request comes as one event, or as one and another that says that it was the last.
        """
        first: Event | None = None
        while True:
            try:
                steps = receive().__await__()
                waiting = next(steps)
            except StopIteration as done:
                last: Event = done.value
            except Exception as error:
                return Handover(self._method, receive, send, read=_given(first), pending=_failing(error))
            else:
                pending = _rest(steps, waiting)
                return Handover(self._method, receive, send, read=_given(first), pending=pending)
            if first is not None or not last.get("more_body"):
                break
            first = last
        frame: bytes = (first or last).get("body", b"")
        size = len(frame) - PREFIX_BYTES
        if (
            last["type"] != "http.request"
            or last.get("more_body")
            or (first is not None and last.get("body"))
            or not 0 <= size <= self._limit
            # No flags and this length: the five bytes of the prefix, read as one number.
            or frame[:PREFIX_BYTES] != size.to_bytes(PREFIX_BYTES, "big")
        ):
            return Handover(self._method, receive, send, read=[*_given(first), last])
        return frame[PREFIX_BYTES:]

    def _asked(self, outcome: Framed | Exception) -> BoundMethod:
        """The method for one call whose servicer has been asked already."""

        async def known(_request: Any, _context: Any) -> Framed:
            if isinstance(outcome, Framed):
                return outcome
            raise outcome

        return replace(self._method, handler=replace(self._method.handler, behaviour=known, deserialize=None))


class Handover:
    """A call that goes on the ordinary way, and its transport as it looks from there.

    What was received comes again, and what was sent already is not sent twice.
    """

    __slots__ = ("_pending", "_read", "_receive", "_send", "_sent", "method")

    def __init__(
        self,
        method: BoundMethod,
        receive: Receive,
        send: Send,
        *,
        read: list[Event] | None = None,
        sent: int = 0,
        pending: Awaitable[Any] | None = None,
    ) -> None:
        self.method = method
        self._receive = receive
        self._send = send
        self._read = read or []
        self._sent = sent
        """Pieces of the answer that the transport has taken."""
        self._pending = pending
        """The rest of what the transport was asked last, if it did not do that at once."""

    async def receive(self) -> Event:
        if self._read:
            return self._read.pop(0)
        event: Event = await (self._take_pending() or self._receive())
        return event

    async def send(self, event: Event) -> None:
        if self._sent:
            self._sent -= 1
        else:
            await (self._take_pending() or self._send(event))

    def _take_pending(self) -> Awaitable[Any] | None:
        pending, self._pending = self._pending, None
        return pending


def _is_ahead(timeout: bytes) -> bool:
    try:
        return parse_timeout(timeout) > 0
    except BadTimeout:
        return False


def _given(first: Event | None) -> list[Event]:
    return [] if first is None else [first]


def _whole(request: bytes) -> Event:
    """A request that was read, to be read again."""
    return {"type": "http.request", "body": prefix(request)}


async def _failing(error: Exception) -> Any:
    raise error


@types.coroutine
def _rest(steps: Generator[Any, None, Any], waiting: Any) -> Generator[Any, None, Any]:
    """What is left of an awaitable whose first step is taken."""
    yield waiting
    return (yield from steps)
