"""Drive a handler's coroutine by hand, for two promises that `await` alone does not give, within limits.

First, a handler that ends without ever waiting costs nothing but itself: timers and watchers
are armed only when it first suspends. Second, a handler is cancelled once: the server under us,
the deadline and the departing client may all want to cancel it at nearly the same moment, and
the later ones must not tear through the `finally` blocks that the first one set going. They
have `cleanup_seconds` for themselves; after that cancellation is passed on again.

Handlers cancel themselves, too: `asyncio.timeout` and a `TaskGroup` with a failing child cancel the
task that they run in, and take that back once it has reached them. Nothing tells such a
cancellation from any other when it arrives. But then it is taken back, and from there on the
handler is like one that was never cancelled.

`RpcLimits` holds the limits of the gRPC layer, each with its arithmetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

CALLERS_TRACKED = 4096
"""Callers with their own token bucket, per method. About 200 bytes each: under 1 MB a method."""


class Bound(StrEnum):
    """Every bound of this layer that a caller can run into; each has a counter."""

    ACTIVE_CALLS = "active_calls"
    METHOD_CONCURRENCY = "method_concurrency"
    UNKNOWN_CALLERS = "unknown_callers"
    RATE = "rate"
    CALLERS_TRACKED = "callers_tracked"
    MESSAGE_BYTES = "message_bytes"
    METADATA_FIELDS = "metadata_fields"
    METADATA_BYTES = "metadata_bytes"
    CLEANUP_SECONDS = "cleanup_seconds"
    DRAIN_SECONDS = "drain_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """What one listener's gRPC application takes on."""

    max_request_bytes: int = 4 * 1024 * 1024
    """One message, after decompression: gRPC's own default. A method's row may say otherwise."""
    active_calls: int = 16_384
    """Calls running at once. A quiet watch costs about 10 KB here, so 16,384 of them stay under 200 MB."""
    metadata_fields: int = 96
    """Header fields of a request, gRPC's own included; a caller's own metadata is rarely ten."""
    metadata_bytes: int = 16 * 1024
    """Names and values together, as received: where grpc's own servers stop too."""
    watch_after_seconds: float = 0.05
    """Where departures are watched for: a handler busy for longer gets a watcher, and no other."""
    request_seconds: float = 60.0
    """The one message of a unary request must be here by then, whatever the deadline."""
    cleanup_seconds: float = 5.0
    """A cancelled handler may await in its `finally` blocks for this long before it is cancelled again."""
    last_word_seconds: float = 0.1
    """When the server stops, streams without an end of their own may still say so before they are ended."""
    retry_after_seconds: float = 0.25
    """Seconds that a caller refused by a limit should wait."""


T = TypeVar("T")


class Watched(Protocol):
    """The call around the handler, as far as the guard is concerned."""

    cleanup_seconds: float

    def suspended(self) -> None:
        """The handler waits for the first time."""

    def cancelling(self) -> None:
        """A cancellation is about to reach the handler."""

    def resumed(self) -> None:
        """Record that a cancellation was the handler's own and is over."""

    def overstayed(self) -> None:
        """The handler's cleanup used up its time."""


class Guard(Generic[T]):
    __slots__ = ("_awaitable", "_call", "_hurried", "_pending")

    def __init__(self, call: Watched, awaitable: Awaitable[T]) -> None:
        self._call = call
        self._awaitable = awaitable
        self._pending: Any = None
        self._hurried = False

    def __await__(self) -> Generator[Any, None, T]:
        steps: Any = self._awaitable
        if not hasattr(steps, "send"):
            steps = steps.__await__()
        try:
            pending = steps.send(None)
            self._call.suspended()
            task = asyncio.current_task()
            assert task is not None
            before = task.cancelling()
            while True:
                try:
                    yield pending
                except asyncio.CancelledError as cancellation:
                    if task.cancelling() > before:
                        pending = yield from self._unwind(steps, cancellation, task, before)
                    else:  # what it waited for was cancelled, and not the handler
                        pending = steps.throw(cancellation)
                except BaseException as error:
                    pending = steps.throw(error)
                else:
                    pending = steps.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        except _Ended as done:
            return done.result  # type: ignore[no-any-return]

    def _unwind(
        self, steps: Any, cancellation: BaseException, task: asyncio.Task[Any], before: int
    ) -> Generator[Any, None, Any]:
        """Let a cancelled handler finish what it does about it.

        Raises `_Ended` when it has; returns what it waits for if it took the cancellation back.
        """
        self._call.cancelling()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._call.cleanup_seconds, self._hurry)
        try:
            pending = steps.throw(cancellation)
            while task.cancelling() > before:
                error = yield from self._wait(loop, pending)
                pending = steps.send(None) if error is None else steps.throw(error)
            return pending
        except StopIteration as done:
            raise _Ended(done.value) from None
        finally:
            timer.cancel()
            self._pending, self._hurried = None, False
            if task.cancelling() <= before:
                self._call.resumed()

    def _wait(self, loop: asyncio.AbstractEventLoop, pending: Any) -> Generator[Any, None, Any]:
        """Wait for `pending`; returns the error that the handler is to get instead, if any."""
        self._pending = pending
        try:
            if self._hurried or not hasattr(pending, "add_done_callback"):
                yield pending
            else:
                yield from self._outlast(loop, pending)
        except asyncio.CancelledError as again:
            return None if pending is None and not self._hurried else again
        except BaseException as error:
            return error
        return None

    def _outlast(self, loop: asyncio.AbstractEventLoop, pending: Any) -> Generator[Any, None, None]:
        """Wait for `pending` through a stand-in, so that a cancellation hits only the stand-in."""
        pending._asyncio_future_blocking = False
        while not pending.done():
            standin = loop.create_future()
            wake = _waker(standin)
            pending.add_done_callback(wake)
            standin._asyncio_future_blocking = True
            try:
                yield standin
            except asyncio.CancelledError:
                pending.remove_done_callback(wake)

    def _hurry(self) -> None:
        self._hurried = True
        self._call.overstayed()
        if hasattr(self._pending, "cancel"):
            self._pending.cancel()


class _Ended(Exception):
    """A handler came to its end. In its place, StopIteration would not get out of a generator."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


def _waker(standin: asyncio.Future[None]) -> Callable[[object], None]:
    def wake(_: object) -> None:
        if not standin.done():
            standin.set_result(None)

    return wake
