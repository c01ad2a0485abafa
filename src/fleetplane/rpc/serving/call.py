"""One call from its first byte to its last: admit, run the handler, end with a status.

The deadline, a departing client and a stopping server all end a call in the same way: they say
why, cancel the handler once, and let it unwind; then whoever is left is told the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
import structlog

from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unauthenticated, Unavailable
from fleetplane.kernel.networks import network_of
from fleetplane.rpc.listening.doors import TOO_MANY_UNKNOWN, enter_unknown, leave_unknown, recognise
from fleetplane.rpc.methods import MethodRow, RateLimiter
from fleetplane.rpc.serving import status
from fleetplane.rpc.serving.connection import Authenticator, Connection
from fleetplane.rpc.serving.context import CallContext, CallGate, DoneCallback
from fleetplane.rpc.serving.exchange import ClientGone, Exchange, WrongCardinality
from fleetplane.rpc.serving.framing import FramingError, MessageTooLarge, UnparsableMessage
from fleetplane.rpc.serving.guard import Bound, Guard, RpcLimits
from fleetplane.rpc.serving.handlers import Handler
from fleetplane.rpc.serving.status import GrpcStatus, Header, MetadataError, status_of
from fleetplane.rpc.statistics import CallStatistics, MethodStatistics

_log = structlog.get_logger("fleetplane.rpc")
_OK = GrpcStatus(code=status.OK)
_NO_HEADERS: list[Header] = []
# A client leaves at its deadline, by its own clock; within this much of ours that is the reason.
_DEADLINE_SLACK_SECONDS = 0.05


class CallEnding(Enum):
    """Why a call is ended from outside its handler."""

    DEADLINE = GrpcStatus(code=status.DEADLINE_EXCEEDED, message="Deadline Exceeded")
    SLOW_REQUEST = GrpcStatus(code=status.DEADLINE_EXCEEDED, message="the request did not arrive in time")
    CLIENT_GONE = GrpcStatus(code=status.CANCELLED, message="the client went away")
    STOPPING = GrpcStatus(code=status.UNAVAILABLE, message="the server is stopping")
    UNKNOWN_CALLER = GrpcStatus(code=status.RESOURCE_EXHAUSTED, message=TOO_MANY_UNKNOWN, level="debug")
    REVOKED = GrpcStatus(code=status.UNAUTHENTICATED, message="this identity was revoked")


_GONE = CallEnding.CLIENT_GONE.value


@dataclass(slots=True)
class BoundMethod:
    """A handler with its row, ready to be called."""

    handler: Handler
    row: MethodRow
    authenticate: Authenticator
    statistics: MethodStatistics
    limiter: RateLimiter | None
    limit_bytes: int
    anonymous: bool
    cut_oversized: bool = False
    identifies: bool = False
    """Whether its callers show who they are before their message."""
    admitted: Principal | None = None
    """The last caller found to have the permission. Principals and the access table never change,
    and most callers of a method are the same one, so the next check is an identity comparison."""


@dataclass(slots=True)
class House:
    """What all calls of a listener share."""

    listener: str
    access: AccessTable
    clock: Clock
    statistics: CallStatistics
    limits: RpcLimits
    calls: set[RpcCall]
    idle: asyncio.Event
    gate: CallGate | None = None
    watch_departures: bool = False
    draining: bool = False


class RpcCall:
    __slots__ = (
        "_apparent",
        "_at_gate",
        "_cancelled_here",
        "_context",
        "_crash",
        "_ending",
        "_exchange",
        "_house",
        "_loop",
        "_method",
        "_own_status",
        "_returned",
        "_started",
        "_task",
        "_timer",
        "_watch_timer",
        "cleanup_seconds",
    )

    def __init__(self, house: House, method: BoundMethod, exchange: Exchange, connection: Connection) -> None:
        self._house = house
        self._method = method
        self._exchange = exchange
        self._started = house.clock.monotonic()
        self._context = CallContext(
            exchange, connection, house.clock, listener=house.listener, method=method.handler.path
        )
        self.cleanup_seconds = house.limits.cleanup_seconds
        self._at_gate = False
        """Whether it waits for nothing of its caller's."""
        self._ending: CallEnding | None = None
        self._apparent: CallEnding | None = None
        """The apparent cause of a cancellation that was not requested here."""
        self._own_status = _OK
        self._cancelled_here = False
        self._crash: BaseException | None = None
        self._returned: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None

    async def serve(self, timeout_seconds: float | None) -> None:
        """Answer the call. Raises nothing but what the server under us threw in: that the client left."""
        house, method = self._house, self._method
        if timeout_seconds is not None:
            self._context._deadline = self._started + timeout_seconds
        method.statistics.started += 1
        method.statistics.active += 1
        house.calls.add(self)
        ended = _GONE
        try:
            gate = house.gate
            if gate is None or gate.is_open(method.row.needs):
                self._require_room(house, method)
                self._admit(house, method, self._context)
                await Guard(self, self._respond())
            else:
                self._require_room(house, method)
                self._at_gate = True
                await Guard(self, self._respond_after(gate))
            ended = self._own_status
        except asyncio.CancelledError as error:
            # Either we cancelled ourselves, and say why, or the server under us did: then
            # there is nobody to tell, and the cancellation is its own business. If neither, the
            # handler waited for something that was cancelled, and let that become its own end.
            if not self._cancelled_here:
                if self._apparent is not None:
                    raise
                ended = self._crashed(error)
        except BaseException as error:
            ended = self._verdict(error)
        finally:
            if self._task is not None:
                self._disarm()
            self._ending = self._ending or self._apparent
            if self._ending is not None and not self._exchange.ended:
                ended = self._ending.value
            self._finish(ended)
        if self._returned is not None:
            # The server's own word that the client left. Giving it back says that we have understood;
            # returning instead would look like an answer that was forgotten.
            raise self._returned
        if not self._exchange.ended and self._ending is not CallEnding.CLIENT_GONE:
            await self._tell(ended)

    # Admission

    def _require_room(self, house: House, method: BoundMethod) -> None:
        row = method.row
        if house.draining:
            raise Unavailable("the server is stopping")
        if len(house.calls) > house.limits.active_calls:
            self._refuse(Bound.ACTIVE_CALLS, f"{house.limits.active_calls} calls are running already")
        if row.concurrency is not None and method.statistics.active > row.concurrency:
            self._refuse(
                Bound.METHOD_CONCURRENCY, f"{row.concurrency} calls of this method are running already"
            )

    def _admit(self, house: House, method: BoundMethod, context: CallContext) -> None:
        """Rate, identity, permission, time: in the order of what each check costs."""
        row, limiter = method.row, method.limiter
        if limiter is not None and method.anonymous:
            # Before anything else: strangers pay for their attempts, not for their successes.
            self._pay(limiter, network_of(context.connection.address))
        context.principal = principal = method.authenticate(context.connection)
        if principal is not method.admitted:
            if row.permission is not None:
                house.access.check(principal, row.permission, principal.scope)
            method.admitted = principal
        if method.identifies:
            recognise(self._exchange.scope)
        if limiter is not None and not method.anonymous:
            self._pay(limiter, principal.name)
        if context._deadline is not None and context._deadline <= self._started:
            self._ending = CallEnding.DEADLINE
            raise ClientGone

    def _pay(self, limiter: RateLimiter, caller: str) -> None:
        forgotten = limiter.forgotten
        wait = limiter.take(caller, self._started)
        if limiter.forgotten != forgotten:
            self._house.statistics.hit(Bound.CALLERS_TRACKED)
        if wait:
            self._refuse(Bound.RATE, "too many calls of this method", retry_after_seconds=wait)

    def _refuse(self, bound: Bound, message: str, *, retry_after_seconds: float | None = None) -> None:
        self._house.statistics.hit(bound)
        raise ResourceExhausted(
            message,
            retry_after_seconds=retry_after_seconds or self._house.limits.retry_after_seconds,
            details={"bound": bound.value},
        )

    # The handler

    async def _respond_after(self, gate: CallGate) -> None:
        """Tokens and rights are read too: whoever calls is recognised after the gate."""
        needs = self._method.row.needs
        await gate.passed(needs)
        self._at_gate = False
        self._admit(self._house, self._method, self._context)
        if not enter_unknown(self._exchange.scope):
            self._house.statistics.hit(Bound.UNKNOWN_CALLERS)
            self._ending = CallEnding.UNKNOWN_CALLER
            raise ClientGone
        with gate.inside(needs):
            await self._respond()

    async def _respond(self) -> None:
        handler, exchange, context = self._method.handler, self._exchange, self._context
        request = _Requests(exchange) if handler.request_streaming else await exchange.read_only()
        if not self._method.anonymous:
            leave_unknown(exchange.scope)
        answer = handler.behaviour(request, context)
        if handler.response_streaming:
            await self._stream(answer)
        else:
            response = await answer
            if context._code == status.OK:
                body, messages = exchange.encode(response)
                await exchange.end_with(
                    body, messages, context.trailing_headers() if context._trailing else _NO_HEADERS
                )
                return
        self._own_status = own = GrpcStatus(code=context._code, message=context._details)
        await exchange.end(own, context.trailing_headers())

    async def _stream(self, answer: Any) -> None:
        """Send what an async generator yields; other handlers write through their context."""
        if not hasattr(answer, "__aiter__"):
            await answer
            return
        try:
            await self._exchange.send_each(answer)
        except BaseException:
            # The generator may be waiting at its `yield` while we were sending. It learns of the
            # end as any cancelled coroutine does; if it is over already, this does nothing.
            await _throw(answer)
            raise

    # The call's life, as the guard reports it

    def suspended(self) -> None:
        self._task = asyncio.current_task()
        self._loop = loop = asyncio.get_running_loop()
        if not self._at_gate and not self._has_begun() and not enter_unknown(self._exchange.scope):
            self._house.statistics.hit(Bound.UNKNOWN_CALLERS)
            self._timer = loop.call_soon(self.end, CallEnding.UNKNOWN_CALLER)
            return
        remaining = self._context.time_remaining()
        if remaining is not None:
            self._timer = loop.call_later(remaining, self.end, CallEnding.DEADLINE)
        if self._house.watch_departures:
            self._watch_timer = loop.call_later(self._house.limits.watch_after_seconds, self._watch)
        elif not (self._exchange.request_ended or self._method.handler.request_streaming):
            self._watch_timer = loop.call_later(self._house.limits.request_seconds, self._check_request)

    def _has_begun(self) -> bool:
        """Whether a call of a method for callers of this machine has its message."""
        return not self._method.anonymous and self._exchange.request_ended

    def cancelling(self) -> None:
        remaining = self._context.time_remaining()
        late = remaining is not None and remaining <= _DEADLINE_SLACK_SECONDS
        self._apparent = CallEnding.DEADLINE if late else CallEnding.CLIENT_GONE
        self._context._cancelled = True

    def resumed(self) -> None:
        self._apparent = None
        self._context._cancelled = False

    def overstayed(self) -> None:
        self._house.statistics.hit(Bound.CLEANUP_SECONDS)
        _log.warning("rpc.cleanup_overstayed", method=self._context.method, seconds=self.cleanup_seconds)

    def end(self, ending: CallEnding) -> None:
        """Cancel the handler, once, for this reason."""
        if self._ending is None and self._task is not None:
            self._ending = ending
            self._cancelled_here = True
            self._task.cancel()

    @property
    def endless(self) -> bool:
        return self._method.row.endless

    @property
    def connection(self) -> Connection:
        return self._context.connection

    def is_by(self, principal: str) -> bool:
        """Whether this call was admitted for the principal of that name."""
        admitted = getattr(self._context, "principal", None)
        return admitted is not None and admitted.name == principal

    def would_be_admitted(self, whose: Callable[[Principal], bool]) -> bool:
        """Whether a caller who showed a token would be admitted with it now.

        `whose` says of which principals that can change while a call runs. An access token that has run out
        opens no further calls; those that it opened go on for as long as its login does.
        """
        admitted = getattr(self._context, "principal", None)
        if self._method.anonymous or admitted is None or not whose(admitted):
            return True
        row = self._method.row
        try:
            principal = self._method.authenticate(self.connection)
            if row.permission is not None:
                self._house.access.check(principal, row.permission, principal.scope)
        except Unauthenticated as error:
            return error.details.get("cause") == "expired"
        except FleetplaneError:
            return False
        return True

    def _check_request(self) -> None:
        if not self._exchange.request_ended:
            self.end(CallEnding.SLOW_REQUEST)

    def _watch(self) -> None:
        """Look out for the client leaving; until the request has ended, again and again."""
        assert self._loop is not None
        waited = self._house.clock.monotonic() - self._started
        if self._exchange.request_ended:
            self._watch_timer = None
            self._exchange.watch(self._departed)
            return
        if self._method.handler.request_streaming:
            self._exchange.watch(self._departed)
        elif waited >= self._house.limits.request_seconds:
            self.end(CallEnding.SLOW_REQUEST)
        self._watch_timer = self._loop.call_later(self._house.limits.watch_after_seconds, self._watch)

    def _departed(self) -> None:
        self.end(CallEnding.CLIENT_GONE)

    def _disarm(self) -> None:
        for timer in (self._timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        self._exchange.stop_watching()
        if self._cancelled_here and self._task is not None:
            self._task.uncancel()

    # The end

    def _verdict(self, error: BaseException) -> GrpcStatus:
        """The status that an exception out of the handler, or on the way to it, amounts to."""
        match error:
            case BaseExceptionGroup(exceptions=(only,)):  # as a handler's task group hands it on
                return self._verdict(only)
            case grpc.aio.AbortError():
                return self._context._status or GrpcStatus(code=status.UNKNOWN)
            case FleetplaneError():
                return status_of(error)
            case ClientGone():
                if self._ending is None:
                    self._ending = CallEnding.CLIENT_GONE
                self._returned = error.__cause__
                return self._ending.value
            case MessageTooLarge():
                self._house.statistics.hit(Bound.MESSAGE_BYTES)
                return GrpcStatus(code=status.RESOURCE_EXHAUSTED, message=str(error))
            case UnparsableMessage():
                return GrpcStatus(code=status.INVALID_ARGUMENT, message=str(error))
            case FramingError():  # the code that gRPC's protocol has for it, and the caller's own doing
                return GrpcStatus(code=status.INTERNAL, message=str(error), level="info")
            case WrongCardinality():
                return GrpcStatus(code=status.UNIMPLEMENTED, message=str(error))
            case Exception():
                return self._crashed(error)
            case _:
                raise error

    def _crashed(self, error: BaseException) -> GrpcStatus:
        self._crash = error
        return GrpcStatus(code=status.UNKNOWN, message="the server failed at this call; its log says why")

    def _finish(self, ended: GrpcStatus) -> None:
        """Count and report the end, and tell those who asked to hear of it."""
        house, context = self._house, self._context
        house.calls.discard(self)
        leave_unknown(self._exchange.scope)
        if house.draining and not house.calls:
            house.idle.set()
        seconds = house.clock.monotonic() - self._started
        self._method.statistics.finish(ended.code, seconds)
        context._done = True
        if ended.code != status.OK:
            context._code = ended.code
            self._report(ended, seconds)
        if context._callbacks:
            self._call_back(context._callbacks)

    def _call_back(self, callbacks: list[DoneCallback]) -> None:
        for callback in callbacks:
            try:
                callback(self._context)
            except Exception as error:
                _log.error("rpc.callback_crashed", method=self._context.method, exc_info=error)

    def _report(self, ended: GrpcStatus, seconds: float) -> None:
        context = self._context
        principal = getattr(context, "principal", None)
        getattr(_log, ended.level or status.log_level(ended.code))(
            "rpc.failed",
            method=context.method,
            listener=context.listener,
            code=status.CODE_NAMES[ended.code],
            message=ended.message,
            peer=context.connection.peer,
            principal=principal.name if principal else None,
            seconds=round(seconds, 6),
            **({"exc_info": self._crash} if self._crash is not None else {}),
        )

    async def _tell(self, ended: GrpcStatus) -> None:
        try:
            try:
                trailing = self._context.trailing_headers()
            except MetadataError:
                trailing = []
            await self._exchange.end(ended, trailing)
        except ClientGone:
            pass

    def __repr__(self) -> str:
        return f"<Call {self._context.method} from {self._context.connection.peer}>"


class _Requests:
    """The request of a client-streaming call, as handlers iterate over it."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        message = await self._exchange.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


async def _throw(answer: Any) -> None:
    """End an async generator that waits at a `yield`, letting it see a cancellation there."""
    if getattr(answer, "ag_frame", None) is None:
        return
    try:
        await answer.athrow(asyncio.CancelledError())
    except (asyncio.CancelledError, StopAsyncIteration):
        return
    await answer.aclose()
