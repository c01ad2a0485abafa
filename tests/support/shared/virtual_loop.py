"""An event loop in which time passes only while everybody waits: a simulated hour takes moments."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Callable, Coroutine
from heapq import heappop
from typing import Any, TypeVar

T = TypeVar("T")
NANOSECONDS = 1_000_000_000
EPOCH_NS = 1_767_225_600 * NANOSECONDS


class _Selector(selectors.SelectSelector):
    """Does not wait, but lets as much time pass as it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and for nothing that will ever happen")
        if timeout > 0.0:
            self.seconds += timeout
        return []  # nothing here comes from outside


class _Task(asyncio.Task[Any]):
    """Known by its number: groups cancel their tasks in the order of a set, which by addresses is never the
    same."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, **named: Any) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, **named)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self.numbers = itertools.count()
        self.set_task_factory(lambda _, coro, **named: _Task(coro, loop=self, **named))

    def time(self) -> float:
        return self._virtual.seconds

    def _run_once(self) -> None:
        """One turn, without what a loop does for sockets: half of what a simulated second would cost."""
        ready, scheduled = self._ready, self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            self._virtual.select(max(0.0, scheduled[0]._when - self._virtual.seconds) if scheduled else None)
        end = self._virtual.seconds + self._clock_resolution  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._when < end:
            handle = heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_in_executor(  # type: ignore[override]
        self, _executor: Any, work: Callable[..., T], *given: Any
    ) -> asyncio.Future[T]:
        """At once and here: beside a thread hours would pass, as many as the machine is busy."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(work(*given))
        except Exception as error:
            done.set_exception(error)
        return done

    def hold(self, seconds: float) -> None:
        """Let time pass in which nobody can do anything."""
        self._virtual.seconds += seconds


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run something to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class LoopClock:
    """A `Clock` that shows the loop's time, wrong by some seconds if wanted."""

    def __init__(self, chance: random.Random, skew_seconds: float = 0.0) -> None:
        self._chance = chance
        self.skew_seconds = skew_seconds

    def now_ns(self) -> int:
        return EPOCH_NS + round((self.monotonic() + self.skew_seconds) * NANOSECONDS)

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        return self._chance.random()

    def token_bytes(self, count: int) -> bytes:
        return self._chance.randbytes(count)
