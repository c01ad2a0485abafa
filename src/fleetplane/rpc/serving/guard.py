"""Driving a handler's coroutine by hand, for two promises that `await` alone does not give.

First, a handler that ends without ever waiting costs nothing but itself: timers and watchers
are armed only when it first suspends. Second, a handler is cancelled once: the server under us,
the deadline and the departing client may all want to cancel it at nearly the same moment, and
the later ones must not tear through the `finally` blocks that the first one set going. They
have `cleanup_seconds` for themselves; after that cancellation is passed on again.

Handlers cancel themselves, too: `asyncio.timeout` and a `TaskGroup` with a failing child cancel the
task that they run in, and take that back once it has reached them. Nothing tells such a
cancellation from any other when it arrives. But then it is taken back, and from there on the
handler is like one that was never cancelled.
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
