"""A gRPC server as an ASGI application: one per listener.

Takes servicers the way a `grpc.aio` server does, checks before serving that every method has a
row, and hands each request to a `RpcCall`. Knows nothing of the HTTP server beneath it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.rpc.methods import Authentication, MethodTable, Needs, RateLimiter
from fleetplane.rpc.serving import framing, refusals
from fleetplane.rpc.serving.call import BoundMethod, CallEnding, House, RpcCall
from fleetplane.rpc.serving.connection import Authenticator, Connection, Scope
from fleetplane.rpc.serving.context import CallGate
from fleetplane.rpc.serving.exchange import Exchange, Receive, Send
from fleetplane.rpc.serving.guard import Bound, RpcLimits
from fleetplane.rpc.serving.handlers import (
    Handler,
    handler_from_generic,
    handlers_of_descriptor,
    handlers_of_service,
)
from fleetplane.rpc.serving.immediate import Shortcut
from fleetplane.rpc.serving.refusals import RequestRefusal
from fleetplane.rpc.serving.status import BadTimeout, Header, is_grpc_content_type, parse_timeout
from fleetplane.rpc.statistics import CallStatistics


class GrpcApp:
    def __init__(
        self,
        *,
        listener: str,
        table: MethodTable,
        access: AccessTable,
        authenticators: Mapping[Authentication, Authenticator],
        clock: Clock,
        statistics: CallStatistics,
        limits: RpcLimits | None = None,
        watch_departures: bool = False,
        gate: CallGate | None = None,
    ) -> None:
        """`gate` stands before every call where other servers share the database.

        With `watch_departures` the layer itself looks out for clients that leave.

        Needed on ASGI servers that only announce it to those who receive. Ours cancels the call's
        task, which costs a quiet stream neither a task nor a timer.
        """
        self._table = table
        self._authenticators = authenticators
        self._handlers: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, BoundMethod] = {}
        self._shortcuts: dict[str, Shortcut] = {}
        self._limits = limits or RpcLimits()
        self._house = House(
            listener=listener,
            access=access,
            clock=clock,
            statistics=statistics,
            limits=self._limits,
            calls=set(),
            idle=asyncio.Event(),
            gate=gate,
            watch_departures=watch_departures,
        )
        self._sealed = False

    # Servicers come in

    def add_service(
        self, descriptor: ServiceDescriptor, servicer: object, *, raw_requests: Collection[str] = ()
    ) -> None:
        """Serve all methods of a service by the servicer's methods of the same names."""
        self._add(handlers_of_descriptor(descriptor, servicer, raw_requests=raw_requests))

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """What generated `add_…_to_server` functions call."""
        self._add(handlers_of_service(service_name, method_handlers))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Register handlers of older generated code, looked up when sealing for rows without a method."""
        self._generic += generic_rpc_handlers

    def _add(self, handlers: Iterable[Handler]) -> None:
        if self._sealed:
            raise SettingsError("a listener's services are complete once it serves")
        for handler in handlers:
            if handler.path in self._handlers:
                raise SettingsError(f"{handler.path} is served twice on listener {self._house.listener}")
            self._handlers[handler.path] = handler

    def services(self) -> tuple[str, ...]:
        """The names of the services, for health and reflection."""
        return tuple(sorted({handler.service for handler in self._handlers.values()}))

    def seal(self) -> None:
        """Close the list of services and check it against the method table and the access table."""
        listener = self._house.listener
        rows = self._table.on(listener)
        for row in rows:
            if row.path not in self._handlers:
                found = handler_from_generic(row.path, self._generic)
                if found is not None:
                    self._handlers[row.path] = found
        MethodTable(rows).require_complete({listener: self._handlers})
        missing = sorted({row.authentication for row in rows} - self._authenticators.keys())
        if missing:
            raise SettingsError(f"listener {listener} has no authenticator for {', '.join(missing)}")
        self._house.access.require_complete(row.permission for row in rows if row.permission is not None)
        for row in rows:
            self._methods[row.path] = method = BoundMethod(
                handler=self._handlers[row.path],
                row=row,
                authenticate=self._authenticators[row.authentication],
                statistics=self._house.statistics.method(listener, row.path),
                limiter=RateLimiter(row.rate) if row.rate else None,
                limit_bytes=row.max_request_bytes or self._limits.max_request_bytes,
                cut_oversized=row.cut_oversized,
                anonymous=row.authentication is Authentication.ANONYMOUS,
                identifies=row.authentication in (Authentication.TOKEN, Authentication.CERTIFICATE),
            )
            shortcut = Shortcut.of(self._house, method)
            if shortcut is not None:
                self._shortcuts[row.path] = shortcut
        self._sealed = True

    @property
    def is_served_anywhere(self) -> bool:
        """Whether a server that is not the active one answers some of it."""
        return any(method.row.needs in (Needs.STORE, Needs.WRITES) for method in self._methods.values())

    def services_anywhere(self) -> tuple[str, ...]:
        """The names of those services of which every method is answered by every server."""
        bound = {one.handler.service for one in self._methods.values() if one.row.needs is Needs.ACTIVE}
        return tuple(name for name in self.services() if name not in bound)

    def handler_name(self, scope: Scope) -> str:
        """What serves a request, in the method table's words; empty for a path that nobody serves."""
        return scope["path"] if scope["path"] in self._methods else ""

    # Calls come in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await refusals.other_protocol(scope, receive, send)
            return
        house = self._house
        shortcut = self._shortcuts.get(scope["path"])
        if shortcut is None:
            method = self._methods.get(scope["path"])
        else:
            handover = shortcut.serve(scope, receive, send)
            if handover is None:
                return
            method, receive, send = handover.method, handover.receive, handover.send
        if method is None:
            await refusals.send(self._explain(scope), house, scope, send)
            return
        headers = scope["headers"]
        fields: dict[bytes, bytes] = dict(headers)
        refusal = self._check(scope, headers, fields)
        if refusal is not None:
            await refusals.send(refusal, house, scope, send)
            return
        timeout = fields.get(b"grpc-timeout")
        try:
            seconds = parse_timeout(timeout) if timeout is not None else None
        except BadTimeout as error:
            await refusals.send(RequestRefusal.bad_timeout(str(error)), house, scope, send)
            return
        exchange = Exchange(
            scope,
            fields,
            receive,
            send,
            method.handler,
            method.limit_bytes,
            method.statistics,
            method.cut_oversized,
        )
        await RpcCall(house, method, exchange, Connection(scope)).serve(seconds)

    def _check(
        self, scope: Scope, headers: list[Header], fields: dict[bytes, bytes]
    ) -> RequestRefusal | None:
        """Whether this is a gRPC call at all, and one of bearable size."""
        if scope["method"] != "POST":
            return refusals.NOT_POST
        content_type = fields.get(b"content-type", b"")
        if content_type != b"application/grpc" and not is_grpc_content_type(content_type):
            return refusals.NOT_GRPC
        if "http.response.trailers" not in scope["extensions"] or fields.get(b"te") != b"trailers":
            return refusals.HTTP1 if scope["http_version"].startswith("1") else refusals.NO_TRAILERS
        limits = self._limits
        if len(headers) > limits.metadata_fields:
            self._house.statistics.hit(Bound.METADATA_FIELDS)
            return RequestRefusal.metadata(f"{len(headers)} metadata fields", f"{limits.metadata_fields}")
        size = sum(map(len, chain.from_iterable(headers)))
        if size > limits.metadata_bytes:
            self._house.statistics.hit(Bound.METADATA_BYTES)
            return RequestRefusal.metadata(f"{size} bytes of metadata", f"{limits.metadata_bytes}")
        encoding = fields.get(b"grpc-encoding")
        if encoding is not None and encoding not in framing.ENCODINGS:
            return RequestRefusal.encoding(encoding)
        return None

    def _explain(self, scope: Scope) -> RequestRefusal:
        """Why a path that nobody serves is refused: as gRPC if the caller speaks it."""
        fields = dict(scope["headers"])
        if scope["method"] == "POST" and is_grpc_content_type(fields.get(b"content-type", b"")):
            self._house.statistics.unknown_methods += 1
            return refusals.UNKNOWN_METHOD
        return self._check(scope, scope["headers"], fields) or refusals.NOT_GRPC

    # The end

    def end_calls_of(self, principal: str) -> int:
        """End the running calls of a principal that was revoked; how many there were."""
        theirs = [call for call in self._house.calls if call.is_by(principal)]
        for call in theirs:
            call.end(CallEnding.REVOKED)
        return len(theirs)

    def end_calls_where(self, refused: Callable[[Connection], bool]) -> int:
        """End the running calls on connections that would not be accepted any more; how many there were."""
        theirs = [call for call in self._house.calls if refused(call.connection)]
        for call in theirs:
            call.end(CallEnding.REVOKED)
        return len(theirs)

    def end_calls_without_right(self, whose: Callable[[Principal], bool]) -> int:
        """End the running calls of callers whose token lets them in no more; how many there were."""
        theirs = [call for call in self._house.calls if not call.would_be_admitted(whose)]
        for call in theirs:
            call.end(CallEnding.REVOKED)
        return len(theirs)

    async def drain(self, grace_seconds: float) -> None:
        """Take no new calls, let running ones finish for so long, then end the rest."""
        house = self._house
        house.draining = True
        last_word_seconds = min(grace_seconds, self._limits.last_word_seconds)
        if await self._wait_idle(last_word_seconds):
            return
        for call in tuple(house.calls):
            if call.endless:
                call.end(CallEnding.STOPPING)
        if await self._wait_idle(grace_seconds - last_word_seconds):
            return
        house.statistics.bounds[Bound.DRAIN_SECONDS] += len(house.calls)
        for call in tuple(house.calls):
            call.end(CallEnding.STOPPING)
        await self._wait_idle(self._limits.cleanup_seconds)

    async def _wait_idle(self, seconds: float) -> bool:
        if not self._house.calls:
            return True
        self._house.idle.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._house.idle.wait()
        except TimeoutError:
            return False
        return True

    def __repr__(self) -> str:
        return (
            f"<GrpcApp {self._house.listener} methods={len(self._methods)} active={len(self._house.calls)}"
            f"{' draining' if self._house.draining else ''}>"
        )
