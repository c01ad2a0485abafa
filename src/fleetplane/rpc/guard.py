"""Driving a handler's coroutine by hand, for two promises that `await` alone does not give.

First, a handler that ends without ever waiting costs nothing but itself: timers and watchers
are armed only when it first suspends. Second, a handler is cancelled once: the server under us,
the deadline and the departing client may all want to cancel it at nearly the same moment, and
the later ones must not tear through the `finally` blocks that the first one set going. They
have `cleanup_seconds` for themselves; after that cancellation is passed on again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Watched(Protocol):
    """The call around the handler, as far as the guard is concerned."""

    cleanup_seconds: float

    def suspended(self) -> None:
        """The handler waits for the first time."""

    def cancelling(self) -> None:
        """A cancellation is about to reach the handler."""

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
            while True:
                try:
                    yield pending
                except asyncio.CancelledError as cancellation:
                    self._call.cancelling()
                    return (yield from self._unwind(steps, steps.throw(cancellation)))
                except BaseException as error:
                    pending = steps.throw(error)
                else:
                    pending = steps.send(None)
        except StopIteration as done:
            result: T = done.value
            return result

    def _unwind(self, steps: Any, pending: Any) -> Generator[Any, None, T]:
        """Let a cancelled handler finish what it does about it."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._call.cleanup_seconds, self._hurry)
        try:
            while True:
                self._pending = pending
                try:
                    if self._hurried or not hasattr(pending, "add_done_callback"):
                        yield pending
                    else:
                        yield from self._outlast(loop, pending)
                except asyncio.CancelledError as again:
                    ignored = pending is None and not self._hurried
                    pending = steps.send(None) if ignored else steps.throw(again)
                else:
                    pending = steps.send(None)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            timer.cancel()
            self._pending = None

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


def _waker(standin: asyncio.Future[None]) -> Callable[[object], None]:
    def wake(_: object) -> None:
        if not standin.done():
            standin.set_result(None)

    return wake
