"""What a handler sees of its call: the surface of `grpc.aio.ServicerContext`, and the caller.

Holds what the handler sets (code, text, trailing metadata) until the call ends. `call` admits, times and ends
a call; `exchange` moves its messages. `CallGate` holds calls back until memory is recent enough to answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import grpc

from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.rpc.listening.doors import recognise
from fleetplane.rpc.methods import Needs
from fleetplane.rpc.serving.connection import Connection, Shared
from fleetplane.rpc.serving.exchange import Exchange
from fleetplane.rpc.serving.status import (
    CODES,
    OK,
    UNKNOWN,
    GrpcStatus,
    Header,
    MetadatumValue,
    encode_metadata,
    parse_metadata,
)


class CallGate(Protocol):
    """Where several servers share a database, one may have acknowledged what another has not seen yet."""

    def is_open(self, needs: Needs) -> bool:
        """Whether such a call may be answered as things are, without waiting for anything."""
        ...

    async def passed(self, needs: Needs) -> None:
        """Return once it may be answered; raises `Unavailable` if this is not the server to answer it."""
        ...

    def inside(self, needs: Needs) -> AbstractContextManager[None]:
        """What such a call may do, for as long as it is answered."""
        ...


DoneCallback = Callable[["CallContext"], None]


class CallContext:
    """The `context` argument of every handler."""

    __slots__ = (
        "_callbacks",
        "_cancelled",
        "_clock",
        "_code",
        "_deadline",
        "_details",
        "_done",
        "_exchange",
        "_metadata",
        "_status",
        "_trailing",
        "connection",
        "listener",
        "method",
        "principal",
    )

    principal: Principal
    """Who is calling, as the connection proved it."""

    def __init__(
        self, exchange: Exchange, connection: Connection, clock: Clock, *, listener: str, method: str
    ) -> None:
        self.connection = connection
        self.listener = listener
        self.method = method
        """The path that was called."""
        self._exchange = exchange
        self._clock = clock
        self._deadline: float | None = None
        self._code = OK
        self._details = ""
        self._trailing: tuple[tuple[str, MetadatumValue], ...] = ()
        self._status: GrpcStatus | None = None
        self._metadata: tuple[tuple[str, MetadatumValue], ...] | None = None
        self._callbacks: list[DoneCallback] | None = None
        self._done = False
        self._cancelled = False

    # The request

    def invocation_metadata(self) -> tuple[tuple[str, MetadatumValue], ...]:
        if self._metadata is None:
            self._metadata = parse_metadata(self._exchange.scope["headers"])
        return self._metadata

    def field(self, name: bytes) -> bytes | None:
        """The last value of one field of the request's header, as it came; cheaper than all metadata."""
        return self._exchange.fields.get(name)

    def peer(self) -> str:
        return self.connection.peer

    def peer_identities(self) -> Iterable[bytes] | None:
        """The certificate chain; None without one, as grpc says it."""
        certificates = self.connection.certificates
        return [pem.encode() for pem in certificates] or None

    def peer_identity_key(self) -> str | None:
        return "x509_pem_cert" if self.connection.certificates else None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        certificates = self.connection.certificates
        if self.connection.transport != "tls":
            return {}
        facts: dict[str, Iterable[bytes]] = {"transport_security_type": [b"ssl"]}
        if certificates:
            facts["x509_pem_cert"] = [certificates[0].encode()]
        return facts

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline, never negative; None if it set none."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._clock.monotonic())

    async def read(self) -> Any:
        """The next message of the request, or `grpc.aio.EOF`."""
        return await self._exchange.read()

    def recognise(self) -> None:
        """Record that a message has shown who calls: budgets of unknown callers are not for this one."""
        recognise(self._exchange.scope)

    # The answer

    async def write(self, message: Any) -> None:
        body, messages = self._exchange.encode(message)
        await self._exchange.send_body(body, messages)

    def push(self, message: Any) -> Awaitable[None] | None:
        """Write a message while the handler waits for something else.

        None if it is on its way. Otherwise the handler must await what is returned, before it
        writes again. The headers must be out already.
        """
        body, messages = self._exchange.encode(message)
        return self._exchange.push_body(body, messages)

    @property
    def push_shared(self) -> Callable[[Shared], Awaitable[None] | None]:
        """Like `push`, for messages that were made for many streams at once."""
        assert self._exchange.headers_sent
        return self._exchange.push_shared

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, MetadatumValue]]) -> None:
        """Send the headers now, before the first message."""
        if self._exchange.headers_sent:
            raise RuntimeError("Initial metadata already sent")
        await self._exchange.flush_headers(encode_metadata(initial_metadata))

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, MetadatumValue]]) -> None:
        self._trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> tuple[tuple[str, MetadatumValue], ...]:
        return self._trailing

    def set_compression(self, compression: grpc.Compression) -> None:
        if self._exchange.headers_sent:
            raise RuntimeError("Compression setting must be specified before sending initial metadata")
        self._exchange.set_compression(compression)

    def disable_next_message_compression(self) -> None:
        self._exchange.skip_next_compression()

    def set_code(self, code: grpc.StatusCode | int) -> None:
        self._code = _number(code)

    def set_details(self, details: str) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return CODES[self._code]

    def details(self) -> str:
        return self._details

    async def abort(
        self,
        code: grpc.StatusCode | int,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, MetadatumValue]] = (),
    ) -> NoReturn:
        """End the call here with this status. Does not return."""
        if self._done:
            raise grpc.aio.UsageError("Abort already called!")
        number = _number(code)
        given = tuple(trailing_metadata)
        if given:
            self._trailing = given
        if number == OK:
            # As grpc decides: an abort that claims success is itself an error.
            number, details = UNKNOWN, ""
        self._status = GrpcStatus(code=number, message=details)
        raise grpc.aio.AbortError(f"Locally aborted: {CODES[number].name} {details}")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """Abort with a `grpc.Status`, such as grpcio-status makes."""
        await self.abort(status.code, status.details or "", status.trailing_metadata or ())

    # The call's life

    def add_done_callback(self, callback: DoneCallback) -> None:
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)

    def done(self) -> bool:
        return self._done

    def cancelled(self) -> bool:
        return self._cancelled

    def trailing_headers(self) -> list[Header]:
        return encode_metadata(self._trailing) if self._trailing else []

    def __repr__(self) -> str:
        return f"<CallContext {self.method} from {self.connection.peer}>"


def _number(code: grpc.StatusCode | int) -> int:
    if isinstance(code, grpc.StatusCode):
        number: int = code.value[0]
        return number
    return code if code in CODES else UNKNOWN


grpc.aio.ServicerContext.register(CallContext)
