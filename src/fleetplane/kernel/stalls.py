"""Detect stalls of this server: gaps in which it heard nobody, and handlers that block the event loop.

A stalled event loop, a stopped process, a paused machine and a clock that jumps look alike from
inside: agents seem to have been silent for a long time. The stall detector beats on the event loop
and records each beat that came late, and each step of the wall clock that the monotonic clock did not
take. Before a silence of N seconds is believed, the `Term` of N seconds is read: when gaps within a term
add up to so much that heartbeats may have been missed, every agent gets a whole new term that begins
at the end of the gap. A server whose beat does not run (an application in a test, under virtual time)
has no gaps.

The watchdog times each step of a handler or task. Steps longer than `LIMIT_SECONDS` are counted under
the handler's name and logged, with the processor time of the thread since it was last read, which
is at most `LOOK_SECONDS` before the step: it tells work from waiting for a core.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, NoReturn, TypeVar

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.times import NS

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


BEAT_SECONDS = 0.5
"""A gap shorter than this may pass unseen; no silence that is counted in seconds turns on it."""
NOTICE_SECONDS = 0.1
"""Lateness below this is the ordinary work of a busy loop."""
LOST_SHARE = 0.25
"""Of a term: who may miss three heartbeats before counting as silent could lose one to a gap this long."""
LEAST_LOST_SECONDS = 0.5
"""For terms of a second or two, which only tests and very small fleets have."""
SETTLING_SECONDS = 5.0
"""After a gap, until what was said meanwhile has been read from the connections on which it waits."""
SETTLING_TERM_SECONDS = 20.0
"""Gaps that add up to a quarter of this are waited for; shorter ones leave no backlog worth it."""
GAPS_KEPT = 256
TERMS_KEPT = 64
"""Different lengths of silence in use at once: one for each domain, and those of former settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time in which this server heard nobody."""

    lost_seconds: float
    ended_at: float
    """On the monotonic clock."""
    ended_at_ns: int
    """By the wall clock, after whatever step it took."""


class Term:
    """The time since when this process had no gap that would falsify a time-out of one length."""

    def __init__(self, seconds: float, gaps: Iterable[Gap] = ()) -> None:
        self.seconds = seconds
        self.since = -math.inf
        """On the monotonic clock; minus infinity if it has always listened."""
        self.since_ns = 0
        """By the wall clock."""
        self._recent: deque[Gap] = deque()
        self._lost_seconds = 0.0
        for gap in gaps:
            self.note(gap)

    def __repr__(self) -> str:
        return f"<Term {self.seconds:g}s lost={self._lost_seconds:.1f}s>"

    def note(self, gap: Gap) -> None:
        """Begin anew if this gap, with those shortly before it, took too much of the term."""
        if self.seconds == math.inf:
            return  # a silence that is never believed
        self._recent.append(gap)
        self._lost_seconds += gap.lost_seconds
        while self._recent[0].ended_at < gap.ended_at - self.seconds:
            self._lost_seconds -= self._recent.popleft().lost_seconds
        if self._lost_seconds >= max(LEAST_LOST_SECONDS, LOST_SHARE * self.seconds):
            self.since, self.since_ns = gap.ended_at, gap.ended_at_ns

    def fair(self, heard_at: float) -> float:
        """The time from which a silence counts, for an agent last heard at `heard_at`."""
        return max(heard_at, self.since)

    def fair_ns(self, heard_at_ns: int, *, now_ns: int) -> int:
        """As `fair`, by the wall clock. A time in the future was noted before the clock was set back."""
        if heard_at_ns > now_ns:
            return self.since_ns or now_ns
        return max(heard_at_ns, self.since_ns)


class StallDetector:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: tuple[float, int] | None = None
        self._gaps: deque[Gap] = deque(maxlen=GAPS_KEPT)
        self._terms: OrderedDict[float, Term] = OrderedDict()
        self.gaps = 0
        self.lost_seconds = 0.0

    def __repr__(self) -> str:
        return f"<Attention gaps={self.gaps} lost={self.lost_seconds:.1f}s>"

    def term(self, seconds: float) -> Term:
        """The term of this length as of now. Ask each time: a gap may have ended a moment ago."""
        self.look()
        found = self._terms.get(seconds)
        if found is None:
            found = self._terms[seconds] = Term(seconds, self._gaps)
            if len(self._terms) > TERMS_KEPT:
                self._terms.popitem(last=False)
        else:
            self._terms.move_to_end(seconds)
        return found

    @property
    def settled(self) -> bool:
        """Whether a missing answer can be judged missing; not directly after a gap of our own."""
        since = self.term(SETTLING_TERM_SECONDS).since
        return self._clock.monotonic() >= since + SETTLING_SECONDS

    def look(self) -> None:
        """Record a gap that has just ended; called by the beat and before each decision."""
        if self._seen is None:
            return
        at, at_ns = self._clock.monotonic(), self._clock.now_ns()
        elapsed = at - self._seen[0]
        stepped = (at_ns - self._seen[1]) / NS - elapsed
        self._seen = (at, at_ns)
        late = elapsed - BEAT_SECONDS
        lost = max(late, abs(stepped))
        if lost < NOTICE_SECONDS:
            return
        gap = Gap(lost_seconds=lost, ended_at=at, ended_at_ns=at_ns)
        self.gaps += 1
        self.lost_seconds += lost
        self._gaps.append(gap)
        for term in self._terms.values():
            term.note(gap)
        if lost >= 1.0:
            log.warning(
                "server.gap",
                lost_seconds=round(lost, 3),
                stalled_seconds=round(max(0.0, late), 3),
                clock_stepped_seconds=round(stepped, 3),
            )

    async def run(self) -> NoReturn:
        """Beat until cancelled."""
        self._seen = (self._clock.monotonic(), self._clock.now_ns())
        try:
            while True:
                await self._clock.sleep(BEAT_SECONDS)
                self.look()
        finally:
            self._seen = None


class StallCollector(Collector):
    def __init__(self, attention: StallDetector) -> None:
        self._attention = attention

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "fleetplane_server_gaps",
            "Times the server itself was away, or its clock was set",
            value=self._attention.gaps,
        )
        yield CounterMetricFamily(
            "fleetplane_server_gap_seconds", "Time lost in these gaps", value=self._attention.lost_seconds
        )
