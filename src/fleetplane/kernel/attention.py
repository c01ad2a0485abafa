"""Whether this server was listening: its own gaps are nobody's silence.

An event loop that stalls, a process that is stopped, a machine that is paused and a clock that
jumps look alike from within: agents seem to have said nothing for a long time. `Attention` beats on
the event loop and takes note of every beat that came late, and of every step of the wall clock that
the monotonic one did not take. Whoever is about to believe a silence of N seconds asks for the
`Term` of N seconds: once so much was lost within a term that heartbeats may have gone unheard,
everybody gets a whole new one from the end of the gap.

A server whose beat does not run (an application in a test, under virtual time) has no gaps.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

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


class Attention:
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


class AttentionCollector(Collector):
    def __init__(self, attention: Attention) -> None:
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
