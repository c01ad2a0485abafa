"""Running a level-triggered controller: look at a key, make it right, look again when told.

The controller is a function from a key to what a pass over it came to; the key says what to
look at, never what happened to it. A pass that fails is tried again, later each time, and holds
up no other key. Only the holder of the lease works. What each pass found is kept for whoever
asks why nothing happens. Knows nothing of what is reconciled.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.reconcile.explanation import Explanation, PassResult
from fleetplane.kernel.reconcile.lease import Lease, LeaseLost
from fleetplane.kernel.reconcile.queue import KEYS_LIMIT, WorkQueue
from fleetplane.kernel.store import Store

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
