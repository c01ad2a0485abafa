"""Who holds the event loop: every step of a handler or task that takes longer than it should.

One event loop serves everybody, so a step that does not give it back keeps everybody waiting. Each
step is timed by the wall clock; those beyond `LIMIT_SECONDS` are counted under the handler's name and
logged. How much of that was work, and not waiting for a core on a busy machine, is told as well: the
thread's processor time since it was last looked at, which is at most `LOOK_SECONDS` before the step.
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

log = structlog.get_logger(__name__)

T = TypeVar("T")
_now: Final = time.monotonic

LIMIT_SECONDS: Final = 0.1
LONG_SECONDS: Final = 1.0
"""So long is a warning even if nearly all of it was spent waiting for a core, or for a disk."""
LOOK_SECONDS: Final = 0.25
HANDLERS_KEPT: Final = 512
"""Names come from tables and from code, so there are never so many; the bound is for mistakes."""
OTHERS: Final = "others"


@dataclass(slots=True)
class HandlerStall:
    """How often one handler held the loop, and for how long altogether."""

    times: int = 0
    seconds: float = 0.0


class Watchdog:
    def __init__(self) -> None:
        self.held: dict[str, HandlerStall] = {}
        self._cpu_at = time.thread_time()
        self.looked_at = _now()

    def __repr__(self) -> str:
        return f"<Watchdog handlers={len(self.held)} times={sum(one.times for one in self.held.values())}>"

    def watch(self, coroutine: Coroutine[Any, Any, T], name: Callable[[], str]) -> Coroutine[Any, Any, T]:
        """Wrap a coroutine and time its steps; `name` is called only when a step took too long."""
        return WatchedSteps(self, coroutine, name)

    def report(self, handler: str, seconds: float) -> float:
        """Take note of a step that took so long; returns how much of it was work, at most."""
        cpu_seconds = min(seconds, time.thread_time() - self._cpu_at)
        self.look()
        known = self.held.get(handler)
        if known is None:
            if len(self.held) >= HANDLERS_KEPT:
                handler = OTHERS
            known = self.held.setdefault(handler, HandlerStall())
        known.times += 1
        known.seconds += seconds
        worked = cpu_seconds >= LIMIT_SECONDS or seconds >= LONG_SECONDS
        log.log(
            logging.WARNING if worked else logging.INFO,
            "loop.held",
            handler=handler,
            held_seconds=round(seconds, 3),
            cpu_seconds=round(cpu_seconds, 3),
        )
        return cpu_seconds

    def look(self) -> None:
        """Processor time up to here is not that of a later step."""
        self._cpu_at = time.thread_time()
        self.looked_at = _now()

    def install(self, loop: asyncio.AbstractEventLoop, *, but: types.CodeType | None = None) -> None:
        """Watch every task that is started on the loop from now on, `but` those of one that times itself."""

        def factory(
            loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
        ) -> asyncio.Task[Any]:
            if getattr(coroutine, "cr_code", None) is not but:
                coroutine = WatchedSteps(self, coroutine, partial(_name_of, coroutine))
            return asyncio.Task(coroutine, loop=loop, **options)

        loop.set_task_factory(factory)  # type: ignore[arg-type]  # any coroutine will do


class WatchedSteps(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine whose steps are timed, and nothing else about it changed."""

    __slots__ = ("_coroutine", "_dog", "_name", "_send")

    def __init__(self, dog: Watchdog, coroutine: Coroutine[Any, Any, T], name: Callable[[], str]) -> None:
        self._dog = dog
        self._coroutine = coroutine
        self._send = coroutine.send
        self._name = name

    def send(self, value: Any) -> Any:
        began = _now()
        if began - self._dog.looked_at >= LOOK_SECONDS:
            self._dog.look()
        try:
            return self._send(value)
        finally:
            if (seconds := _now() - began) >= LIMIT_SECONDS:
                self._dog.report(self._name(), seconds)

    def throw(self, *error: Any) -> Any:
        began = _now()
        if began - self._dog.looked_at >= LOOK_SECONDS:
            self._dog.look()
        try:
            return self._coroutine.throw(*error)
        finally:
            if (seconds := _now() - began) >= LIMIT_SECONDS:
                self._dog.report(self._name(), seconds)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    @property
    def __name__(self) -> str:  # tasks show their coroutine's
        return _name_of(self._coroutine)

    def __repr__(self) -> str:
        return f"<WatchedSteps of {_name_of(self._coroutine)}>"


def _name_of(coroutine: Coroutine[Any, Any, Any]) -> str:
    """As the code calls it: a bounded number of names, whatever callers do."""
    return getattr(coroutine, "__qualname__", type(coroutine).__name__)


class WatchdogCollector(Collector):
    def __init__(self, dog: Watchdog) -> None:
        self._dog = dog

    def collect(self) -> Iterator[Metric]:
        times = CounterMetricFamily(
            "fleetplane_loop_held", "Steps that held the event loop for 100 ms or more", labels=["handler"]
        )
        seconds = CounterMetricFamily(
            "fleetplane_loop_held_seconds", "Time that these steps took together", labels=["handler"]
        )
        for handler, held in sorted(self._dog.held.items()):
            times.add_metric([handler], held.times)
            seconds.add_metric([handler], held.seconds)
        yield from (times, seconds)
