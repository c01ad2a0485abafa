"""Run a level-triggered controller: look at a key, make it right, look again when told.

The controller is a function from a key to the result of one pass; the key says what to look at, never what
happened to it. A pass that fails is retried with growing delays and holds up no other key. Only the holder of
the lease works. The result of each key's last pass is kept for explanations.

The queue is pure. A key is in it at most once: queued again while it waits, the earlier moment wins;
queued while it runs, it runs once more afterwards.

    add     not queued   waits until `due`
            waiting      waits until the earlier of the two
            running      remembered: waits again when done
    take    waiting      running, if it is due
    done    running      waits, if it was remembered or a moment is given; else gone
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted
from fleetplane.kernel.reconcile.explanation import Explanation, PassResult
from fleetplane.kernel.reconcile.lease import Lease, LeaseLost
from fleetplane.kernel.store import Store

KEYS_LIMIT = 100_000
"""Keys in one queue; about 300 bytes each, 30 MB at worst."""
_STALE_SLACK = 64
"""Outdated entries of the heap that are tolerated beyond one per key before it is rebuilt."""


class _QueuedKey:
    __slots__ = ("again", "due", "order", "running")

    def __init__(self, due: float, order: int) -> None:
        self.due = due
        self.order = order
        self.running = False
        self.again: float | None = None
        """When it was asked for while running, at the earliest."""


class WorkQueue:
    def __init__(self, *, limit: int = KEYS_LIMIT) -> None:
        self._limit = limit
        self._entries: dict[str, _QueuedKey] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._orders = itertools.count()
        self.running = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"<WorkQueue keys={len(self)} running={self.running}>"

    def add(self, key: str, due: float) -> None:
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= self._limit:
                raise ResourceExhausted(f"{len(self._entries)} keys are queued, the most there may be")
            self._entries[key] = entry = _QueuedKey(due, next(self._orders))
            self._push(key, entry)
        elif entry.running:
            entry.again = due if entry.again is None else min(entry.again, due)
        elif due < entry.due:
            entry.due, entry.order = due, next(self._orders)
            self._push(key, entry)

    def take(self, now: float) -> str | None:
        """The key that has been due for longest, now being worked on; None if none is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        self._entries[key].running = True
        self.running += 1
        return key

    def done(self, key: str, due: float | None) -> None:
        """A key has been worked on; it comes again at `due`, or when it was asked for meanwhile."""
        entry = self._entries.pop(key)
        self.running -= 1
        moments = [moment for moment in (entry.again, due) if moment is not None]
        if moments:
            self.add(key, min(moments))

    def failed(self, key: str, due: float) -> None:
        """A key comes again at `due` and not before: what it asked for while failing has to wait.

        Otherwise a controller whose own writes wake it would try again without pause.
        """
        self._entries.pop(key)
        self.running -= 1
        self.add(key, due)

    def next_due(self) -> float:
        """The moment before which there is nothing to take; infinity if nothing waits."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else math.inf

    def due(self, key: str) -> float | None:
        """When a key comes next; None if it is not queued, or only being worked on."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return entry.again if entry.running else entry.due

    def _push(self, key: str, entry: _QueuedKey) -> None:
        heapq.heappush(self._heap, (entry.due, entry.order, key))
        if len(self._heap) > 2 * len(self._entries) + _STALE_SLACK:
            self._heap = [
                (entry.due, entry.order, key) for key, entry in self._entries.items() if not entry.running
            ]
            heapq.heapify(self._heap)

    def _drop_stale(self) -> None:
        """Entries whose key has been moved or taken since: the order tells, as no two share one."""
        while self._heap:
            _, order, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.order == order and not entry.running:
                return
            heapq.heappop(self._heap)


log = structlog.get_logger(__name__)

BACKOFF = Backoff(first_seconds=0.5, ceiling_seconds=300.0)
"""Ten failures in a row until the ceiling; from then on twelve tries or more an hour."""
EXPLANATIONS_LIMIT = 10_000
"""Keys whose last pass is remembered, the latest ones; about half a kilobyte each."""
SHORTEST_WAIT_SECONDS = 0.001
"""A clock may wake us a rounding error too early: then this much later, instead of spinning."""
ERROR_LIMIT = 500
"""Characters kept of an error's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcilerStatistics:
    queued: int
    running: int
    passes: int
    failures: int
    leases_lost: int


class Reconciler:
    def __init__(
        self,
        name: str,
        reconcile: Callable[[str], Awaitable[PassResult]],
        *,
        clock: Clock,
        store: Store,
        backoff: Backoff = BACKOFF,
        concurrency: int = 1,
        lease: Lease | None = None,
        keys_limit: int = KEYS_LIMIT,
        explanations_limit: int = EXPLANATIONS_LIMIT,
    ) -> None:
        """`concurrency` keys are worked on at a time, each by one pass only."""
        self.name = name
        self._reconcile = reconcile
        self._clock = clock
        self._backoff = backoff
        self._concurrency = concurrency
        self._lease = lease or Lease(store, clock, name=f"controller/{name}")
        self._queue = WorkQueue(limit=keys_limit)
        self._explanations: OrderedDict[str, Explanation] = OrderedDict()
        self._explanations_limit = explanations_limit
        self._failures: dict[str, int] = {}
        """Of keys that are failing; all of them are queued, so the queue's bound is theirs."""
        self._news = asyncio.Event()
        self._passes = 0
        self._failed = 0
        self._leases_lost = 0

    def __repr__(self) -> str:
        return f"<Reconciler {self.name} queued={len(self._queue)} running={self._queue.running}>"

    # What others ask of it.

    def enqueue(self, key: str, after_seconds: float = 0.0) -> None:
        """Look at a key, now or after some time. Raises `ResourceExhausted` when too many are queued."""
        self._queue.add(key, self._clock.monotonic() + max(0.0, after_seconds))
        self._news.set()

    def explain(self, key: str) -> Explanation | None:
        """What the last pass over a key found; None if there was none yet, or too long ago."""
        found = self._explanations.get(key)
        due = self._queue.due(key)
        if found is None or due is None:
            return found
        ahead_ns = round((due - self._clock.monotonic()) * 1e9)
        return msgspec.structs.replace(found, next_due_ns=self._clock.now_ns() + ahead_ns)

    def explanations(self) -> Iterator[Explanation]:
        for key in tuple(self._explanations):
            found = self.explain(key)
            if found is not None:
                yield found

    def forget(self, key: str) -> None:
        """Drop what is remembered about something that is no more."""
        self._explanations.pop(key, None)

    @property
    def is_ours(self) -> bool:
        """Whether this process works, and not another that holds the lease."""
        return self._lease.held()

    def statistics(self) -> ReconcilerStatistics:
        return ReconcilerStatistics(
            queued=len(self._queue) - self._queue.running,
            running=self._queue.running,
            passes=self._passes,
            failures=self._failed,
            leases_lost=self._leases_lost,
        )

    # Working.

    async def run(self) -> None:
        """Work while the lease is ours, and wait for it while it is not; until cancelled."""
        while True:
            await self._lease.acquire()
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._lease.keep(), name=f"{self.name}/lease")
                    tasks.create_task(self._work(), name=f"{self.name}/work")
            except* LeaseLost:
                self._leases_lost += 1
                log.warning("reconcile.lease_lost", controller=self.name)
            finally:
                await self._lease.release()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as passes:
            while True:
                self._news.clear()
                self._lease.require()
                due = math.inf
                while self._queue.running < self._concurrency:
                    key = self._queue.take(self._clock.monotonic())
                    if key is None:
                        due = self._queue.next_due()
                        break
                    passes.create_task(self._pass(key), name=f"{self.name}/{key}")
                await self._pause(passes, due)

    async def _pause(self, tasks: asyncio.TaskGroup, due: float) -> None:
        """Wait for news, or for the moment when a key is due."""
        if due == math.inf:
            await self._news.wait()
            return
        wait = max(SHORTEST_WAIT_SECONDS, due - self._clock.monotonic())
        alarm = tasks.create_task(self._alarm(wait))
        try:
            await self._news.wait()
        finally:
            alarm.cancel()

    async def _alarm(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._news.set()

    async def _pass(self, key: str) -> None:
        task = asyncio.current_task()
        try:
            self._note(key, await self._reconcile(key))
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                # Half done: whoever works next, here or elsewhere, has to look again.
                self._queue.done(key, self._clock.monotonic())
                raise
            self._note_failure(key, error)  # not ours: something that the pass waited for was cancelled
        except Exception as error:
            self._note_failure(key, error)
        self._news.set()

    def _note(self, key: str, result: PassResult) -> None:
        now = self._clock.monotonic()
        self._passes += 1
        self._failures.pop(key, None)
        after = result.requeue_after_seconds
        self._queue.done(key, None if after is None else now + max(0.0, after))
        self._remember(Explanation(key=key, at_ns=self._clock.now_ns(), reasons=result.explanation))

    def _note_failure(self, key: str, error: BaseException) -> None:
        self._passes += 1
        self._failed += 1
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        wait = self._backoff.delay_seconds(failures, jitter=self._clock.random())
        self._queue.failed(key, self._clock.monotonic() + wait)
        known = self._explanations.get(key)
        text = error.message if isinstance(error, FleetplaneError) else f"{type(error).__name__}: {error}"
        self._remember(
            Explanation(
                key=key,
                at_ns=self._clock.now_ns(),
                reasons=known.reasons if known is not None else (),
                failures=failures + 1,
                last_error=text[:ERROR_LIMIT],
            )
        )
        log.warning(
            "reconcile.failed",
            controller=self.name,
            key=key,
            failures=failures + 1,
            retry_seconds=round(wait, 3),
            error=text[:ERROR_LIMIT],
            # An error that we do not know how to explain is a defect: its place is wanted.
            exc_info=None if isinstance(error, FleetplaneError) else error,
        )

    def _remember(self, explanation: Explanation) -> None:
        self._explanations[explanation.key] = explanation
        self._explanations.move_to_end(explanation.key)
        if len(self._explanations) > self._explanations_limit:
            self._explanations.popitem(last=False)


PREFIX = "fleetplane_reconcile_"
_GAUGES = {"queued": "Keys waiting for a pass", "running": "Keys being worked on"}
_COUNTERS = {
    "passes": "Passes over a key",
    "failures": "Passes that failed",
    "leases_lost": "Times that another server took a controller over",
}


class ReconcileCollector(Collector):
    """One for any number of controllers, told apart by name; there may be more of them later."""

    def __init__(self, controllers: Callable[[], Iterable[Reconciler]]) -> None:
        self._controllers = controllers

    @property
    def held(self) -> int:
        """How many of them are this server's to run now."""
        return sum(controller.is_ours for controller in self._controllers())

    def collect(self) -> Iterator[Metric]:
        found = [(controller.name, controller.statistics()) for controller in self._controllers()]
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["controller"])
            for controller, numbers in found:
                gauge.add_metric([controller], getattr(numbers, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["controller"])
            for controller, numbers in found:
                counter.add_metric([controller], getattr(numbers, name))
            yield counter
