"""One HTTP exchange as gRPC sees it: messages in, headers, messages and a status out.

Speaks ASGI and nothing below it. Decides how bytes become messages and when headers go out;
knows nothing of handlers, deadlines or who is calling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from fleetplane.rpc.listening.doors import CONNECTION, Visit
from fleetplane.rpc.serving import framing
from fleetplane.rpc.serving.connection import Scope, Shared, push
from fleetplane.rpc.serving.framing import Framed, FrameDecoder, UnparsableMessage
from fleetplane.rpc.serving.handlers import Handler
from fleetplane.rpc.serving.status import GrpcStatus, Header
from fleetplane.rpc.statistics import MethodStatistics

Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

CONTENT_TYPE: Final = (b"content-type", b"application/grpc")
_ACCEPTS: Final = (b"grpc-accept-encoding", framing.ACCEPT_ENCODING)
# Servers read these and keep nothing, so the common answers are built once.
PLAIN_START: Final[Event] = {
    "type": "http.response.start",
    "status": 200,
    "headers": [CONTENT_TYPE, _ACCEPTS],
    "trailers": True,
}
_NOTHING_YET: Final[Event] = {"type": "http.response.body", "body": b"", "more_body": True}
_NO_MORE_BODY: Final[Event] = {"type": "http.response.body", "body": b"", "more_body": False}
OK_TRAILERS: Final[Event] = {
    "type": "http.response.trailers",
    "headers": [(b"grpc-status", b"0")],
    "more_trailers": False,
}
_COMPRESSIONS: Final = {grpc.Compression.Gzip: framing.GZIP, grpc.Compression.Deflate: framing.DEFLATE}


class ClientGone(Exception):
    """The client has disconnected."""


class WrongCardinality(Exception):
    """A method that takes one message was sent none, or several."""


class Exchange:
    __slots__ = (
        "_ahead",
        "_compress_next",
        "_cut",
        "_decoder",
        "_encoding_out",
        "_handler",
        "_limit",
        "_reading",
        "_receive",
        "_send",
        "_statistics",
        "ended",
        "fields",
        "headers_sent",
        "request_ended",
        "scope",
    )

    def __init__(
        self,
        scope: Scope,
        fields: dict[bytes, bytes],
        receive: Receive,
        send: Send,
        handler: Handler,
        limit: int,
        statistics: MethodStatistics,
        cut: bool = False,
    ) -> None:
        self._cut = cut
        self.scope = scope
        self.fields = fields
        """Header fields by name; where one repeats, the last."""
        self.headers_sent = False
        self.request_ended = False
        self.ended = False
        self._receive = receive
        self._send = send
        self._handler = handler
        self._limit = limit
        self._statistics = statistics
        self._decoder: FrameDecoder | None = None
        self._encoding_out: bytes | None = None
        self._compress_next = True
        self._ahead: asyncio.Future[Event] | None = None
        self._reading = False

    # Inward

    async def read_only(self) -> Any:
        """The one message of a request that has exactly one.

        Nearly all of them arrive as one chunk that is one plain frame, and are taken from it
        without a decoder.
        """
        receive = self._receive
        event = await receive()
        chunk: bytes = event.get("body", b"")
        more: bytes = b""
        if event.get("more_body"):
            event = await receive()
            more = event.get("body", b"")
        if event["type"] != "http.request":
            raise ClientGone
        self._take_note(len(chunk) + len(more))
        self.request_ended = not event.get("more_body")
        if (
            more
            or not self.request_ended
            or len(chunk) < framing.PREFIX_BYTES
            or chunk[0]
            or int.from_bytes(chunk[1:5], "big") != len(chunk) - framing.PREFIX_BYTES
            or len(chunk) > self._limit
        ):
            return await self._collect(chunk, more)
        self._statistics.received += 1
        deserialize = self._handler.deserialize
        return chunk[5:] if deserialize is None else self._decoded(chunk[5:])

    async def _collect(self, *chunks: bytes) -> Any:
        """Collect a request that comes in several chunks, is compressed or is malformed."""
        decoder = self._start_decoder()
        for chunk in chunks:
            decoder.feed(chunk)
        payload = await self._next_payload(decoder)
        if payload is None:
            raise WrongCardinality("this method takes one message; the request had none")
        if await self._next_payload(decoder) is not None:
            raise WrongCardinality("this method takes one message; the request had more")
        self._statistics.received += 1
        return self._decoded(payload)

    async def read(self) -> Any:
        """The next message of a streaming request, or `grpc.aio.EOF`."""
        payload = await self._next_payload(self._decoder or self._start_decoder())
        if payload is None:
            return grpc.aio.EOF
        self._statistics.received += 1
        return self._decoded(payload)

    async def _next_payload(self, decoder: FrameDecoder) -> bytes | None:
        while (payload := decoder.take()) is None:
            if self.request_ended:
                decoder.finish()
                return None
            decoder.feed(await self._chunk())
        return payload

    async def _chunk(self) -> bytes:
        """The next piece of the body. Not asking for it is what holds a fast sender back."""
        if self._ahead is not None:
            taken, self._ahead = self._ahead, None
            event = await taken
        else:
            self._reading = True
            event = await self._receive()
            self._reading = False
        if event["type"] != "http.request":
            raise ClientGone
        if not event.get("more_body"):
            self.request_ended = True
        body: bytes = event.get("body", b"")
        self._take_note(len(body))
        return body

    def _take_note(self, count: int) -> None:
        """Bytes of a body that were wanted are not what `warden` looks for."""
        visit: Visit | None = self.scope.get(CONNECTION)
        if visit is not None:
            visit.body_bytes += count

    def _start_decoder(self) -> FrameDecoder:
        encoding = self.fields.get(b"grpc-encoding", framing.IDENTITY)
        self._decoder = FrameDecoder(limit=self._limit, encoding=encoding, cut=self._cut)
        return self._decoder

    def _decoded(self, payload: bytes) -> Any:
        deserialize = self._handler.deserialize
        if deserialize is None:
            return payload
        try:
            return deserialize(payload)
        except Exception as error:
            raise UnparsableMessage("a message of the request cannot be parsed") from error

    # Departure

    def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client leaves, also while nobody reads the request.

        ASGI tells of it only to those who receive, so one event is taken ahead, never more: a
        fast sender is still held back by a handler that does not read.
        """
        if self._ahead is None and not self._reading:
            self._ahead = asyncio.ensure_future(self._receive())
            self._ahead.add_done_callback(lambda taken: self._looked_ahead(taken, gone))

    def _looked_ahead(self, taken: asyncio.Future[Event], gone: Callable[[], None]) -> None:
        if taken.cancelled() or taken.exception() is not None:
            return
        if taken.result()["type"] == "http.disconnect":
            gone()
        elif self.request_ended:
            self._ahead = None
            self.watch(gone)

    def stop_watching(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()

    # Outward

    def set_compression(self, compression: grpc.Compression) -> None:
        """Compress from here on, if the client said that it can read that."""
        wanted = _COMPRESSIONS.get(compression)
        accepted = self.fields.get(b"grpc-accept-encoding", b"").replace(b" ", b"").split(b",")
        self._encoding_out = wanted if wanted in accepted else None

    def skip_next_compression(self) -> None:
        self._compress_next = False

    def encode(self, response: Any) -> tuple[bytes, int]:
        """The bytes to send for a handler's answer, and how many messages they are."""
        kind = type(response)
        if kind is Framed:
            return response.body, response.messages
        serialize = self._handler.serialize
        payload: bytes = response if kind is bytes or serialize is None else serialize(response)
        if self._encoding_out is None:
            return framing.prefix(payload), 1
        compressing, self._compress_next = self._compress_next, True
        if not compressing or not payload:
            return framing.prefix(payload), 1
        return framing.prefix(framing.compress(payload, self._encoding_out), compressed=True), 1

    async def send_headers(self, extra: list[Header] | None = None) -> None:
        self.headers_sent = True
        if extra is None and self._encoding_out is None:
            await self._put(PLAIN_START)
            return
        headers = [CONTENT_TYPE, _ACCEPTS]
        if self._encoding_out is not None:
            headers.append((b"grpc-encoding", self._encoding_out))
        headers += extra or ()
        await self._put({"type": "http.response.start", "status": 200, "headers": headers, "trailers": True})

    async def flush_headers(self, extra: list[Header]) -> None:
        """Send the headers now: servers keep them until there is a body, so an empty piece follows."""
        await self.send_headers(extra)
        await self._put(_NOTHING_YET)

    async def send_body(self, body: bytes, messages: int) -> None:
        """Waits while the client's window is full; that is the back-pressure on handlers."""
        if not self.headers_sent:
            await self.send_headers()
        try:
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError as error:
            raise ClientGone from error
        self._statistics.sent += messages

    def push_body(self, body: bytes, messages: int) -> Awaitable[None] | None:
        """Like `send_body`, once the headers are out: None if sent, else what the call must await first."""
        assert self.headers_sent
        self._statistics.sent += messages
        try:
            return push(self._send, {"type": "http.response.body", "body": body, "more_body": True})
        except OSError as error:
            raise ClientGone from error

    def push_shared(self, shared: Shared) -> Awaitable[None] | None:
        """Like `push_body`, for what many streams are sent."""
        self._statistics.sent += shared.messages
        try:
            sending = self._send(shared.event)
        except OSError as error:
            raise ClientGone from error
        return None if sending is shared.taken else shared.pushed(sending)

    async def send_each(self, answers: AsyncIterator[Any]) -> None:
        """Send what a handler yields. A watch's whole way from its event to the socket is this loop."""
        send, statistics = self._send, self._statistics
        async for answer in answers:
            body, messages = (answer.body, answer.messages) if type(answer) is Framed else self.encode(answer)
            if not self.headers_sent:
                await self.send_headers()
            try:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            except OSError as error:
                raise ClientGone from error
            statistics.sent += messages

    async def end_with(self, body: bytes, messages: int, trailing: list[Header]) -> None:
        """The only message and the good ending of a unary answer."""
        send = self._send
        try:
            if not self.headers_sent:
                if self._encoding_out is None:
                    self.headers_sent = True
                    await send(PLAIN_START)
                else:
                    await self.send_headers()
            await send({"type": "http.response.body", "body": body, "more_body": False})
            self._statistics.sent += messages
            self.ended = True
            if trailing:
                await self._trailers(trailing)
            else:
                await send(OK_TRAILERS)
        except OSError as error:
            raise ClientGone from error

    async def end(self, status: GrpcStatus, trailing: list[Header]) -> None:
        """The status: alone in the headers when nothing was sent before, in trailers otherwise."""
        if self.headers_sent:
            await self._put(_NO_MORE_BODY)
            await self._trailers(trailing, status)
            return
        self.headers_sent = self.ended = True
        headers = [CONTENT_TYPE, _ACCEPTS, *status.headers(), *trailing]
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})
        await self._put(_NO_MORE_BODY)

    async def _trailers(self, trailing: list[Header], status: GrpcStatus | None = None) -> None:
        self.ended = True
        if status is None and not trailing:
            await self._put(OK_TRAILERS)
            return
        fields = status.headers() if status else [(b"grpc-status", b"0")]
        await self._put(
            {"type": "http.response.trailers", "headers": fields + trailing, "more_trailers": False}
        )

    async def _put(self, event: Event) -> None:
        try:
            await self._send(event)
        except OSError as error:
            raise ClientGone from error
