"""Errors as they happen, for those who follow them; the latest are kept for later readers.

The same trouble is usually met again and again until someone removes it, so an error that was told a
moment ago is not told again. A listener that cannot keep up loses the oldest of what waits for
it, and is told how much that was; nobody else notices.

Where servers share a database, the server that meets an error writes it to the store, and every server tells
of those that the log brings. Equal errors are one record, which is written again once the moment is over
within which it is not repeated. The number of records of a tenant is limited; the oldest gives way.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import structlog

from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.domains.instances.kinds import COMPLAINT, Complaint, tenant_of, tenant_scope
from fleetplane.fleet.streams.status_writer import StatusWriter
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import Key, Nothing, Resource
from fleetplane.kernel.store import Draft, Store, follow, transact_found
from fleetplane.kernel.watch import EventType, Watch

log = structlog.get_logger(__name__)

KEPT = 500
"""Errors of one tenant: as many as are listed at most."""
KEPT_SECONDS = 86_400.0
SWEEP_SECONDS = 3600.0
SWEEP_BATCH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One error of one tenant."""

    tenant: str
    group: str
    instance: str
    """Empty if it concerns the whole group."""
    text: str
    at_ns: int


class Complaints:
    def __init__(
        self, store: Store, clock: Clock, tell: Callable[[Trouble], None], *, window_seconds: float
    ) -> None:
        self._store = store
        self._clock = clock
        self._tell = tell
        self._window_ns = round(window_seconds * 1e9)
        self._newest_ns: int | None = None
        """Of those that were told here."""
        self._writer: StatusWriter[Trouble] = StatusWriter(clock, self._write, failed=_not_written)

    def __repr__(self) -> str:
        return f"<Complaints {self._writer!r}>"

    def note(self, trouble: Trouble) -> None:
        """Have it written soon. What is said of no tenant has nobody to hear it."""
        if trouble.tenant and identifier_problem(trouble.tenant) is None:
            trouble = replace(trouble, text=trouble.text.encode(errors="replace").decode())
            self._writer.note(f"{trouble.tenant}/{_name(trouble)}", trouble)

    def recent(self, tenant: str | None) -> list[Trouble]:
        """What is kept of a tenant, or of all, newest first."""
        kept = self._store.list(COMPLAINT, "" if tenant is None else tenant_scope(tenant))
        found = sorted(kept, key=lambda one: one.spec.at_ns, reverse=True)
        return [_trouble(one) for one in found]

    # Every server.

    async def run_here(self) -> None:
        """Write down what is met here, and tell of what is written anywhere; until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("instances/errors/write", self._writer.run)
            tasks.keep("instances/errors/follow", self._follow)

    async def _follow(self) -> None:
        async for batch in follow(self._store, COMPLAINT, again=self._tell_missed):
            for event in batch.events:
                if event.type is not EventType.DELETED:
                    self._told(_trouble(event.resource))

    def _tell_missed(self, _watch: Watch) -> None:
        missed = (one for one in self._store.list(COMPLAINT) if one.spec.at_ns > (self._newest_ns or 0))
        for one in sorted(missed, key=lambda one: one.spec.at_ns):
            self._told(_trouble(one))

    def _told(self, trouble: Trouble) -> None:
        self._newest_ns = max(self._newest_ns or 0, trouble.at_ns)
        self._tell(trouble)

    async def _write(self, batch: Sequence[tuple[str, Trouble]]) -> None:
        for tenant in sorted({trouble.tenant for _, trouble in batch}):
            await self._write_of(tenant, {_name(one): one for _, one in batch if one.tenant == tenant})

    async def _write_of(self, tenant: str, noted: dict[str, Trouble]) -> None:
        scope = tenant_scope(tenant)

        def surplus(reader: Store | Draft) -> Sequence[Key]:
            new = sum(reader.get(COMPLAINT, scope, name) is None for name in noted)
            if (over := reader.count(COMPLAINT, scope) + new - KEPT) <= 0:
                return ()
            others = [one for one in reader.list(COMPLAINT, scope) if one.name not in noted]
            return [one.key for one in sorted(others, key=lambda one: one.spec.at_ns)[:over]]

        def all_of_them(reader: Store | Draft) -> Sequence[Key]:
            near = reader.count(COMPLAINT, scope) + len(noted) >= KEPT
            return [one.key for one in reader.list(COMPLAINT, scope)] if near else ()

        def change(draft: Draft, over: Sequence[Key]) -> None:
            for key in over:
                draft.delete(COMPLAINT, key.scope, key.name)
            for name, one in noted.items():
                known = draft.get(COMPLAINT, scope, name)
                if known is None or one.at_ns - known.spec.at_ns >= self._window_ns:
                    spec = Complaint(group=one.group, instance=one.instance, text=one.text, at_ns=one.at_ns)
                    draft.put(COMPLAINT, scope, name, spec=spec)

        await transact_found(
            self._store,
            surplus,
            change,
            actor="system/instances",
            action="instances.errors",
            touches=[COMPLAINT.key(scope, name) for name in noted],
            among=all_of_them,
        )

    # One server for all.

    async def run_active(self) -> None:
        """Forget what is old, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            before_ns = self._clock.now_ns() - round(KEPT_SECONDS * 1e9)
            old = [one.key for one in self._store.list(COMPLAINT) if one.spec.at_ns < before_ns]
            for start in range(0, len(old), SWEEP_BATCH):
                await self._forget(old[start : start + SWEEP_BATCH], before_ns)

    async def _forget(self, keys: Sequence[Key], before_ns: int) -> None:
        def change(draft: Draft) -> None:
            for key in keys:
                found = draft.get(COMPLAINT, key.scope, key.name)
                if found is not None and found.spec.at_ns < before_ns:
                    draft.delete(COMPLAINT, key.scope, key.name)

        try:
            await self._store.transact(
                change, actor="system/instances", action="instances.errors.sweep", touches=keys
            )
        except FleetplaneError as error:  # the next sweep finds them
            log.warning("instances.errors_not_swept", error=error.message)


def _name(trouble: Trouble) -> str:
    said = f"{trouble.group}\0{trouble.instance}\0{trouble.text}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _trouble(found: Resource[Complaint, Nothing]) -> Trouble:
    spec = found.spec
    return Trouble(
        tenant=tenant_of(found), group=spec.group, instance=spec.instance, text=spec.text, at_ns=spec.at_ns
    )


def _not_written(count: int, error: FleetplaneError) -> None:
    log.warning("instances.errors_not_written", errors=count, error=error.message)


WINDOW_SECONDS = 30.0
"""Seconds within which an identical error is not repeated; half a minute of retries is one event."""
REMEMBERED_LIMIT = 4096
"""Errors remembered for that; the longest ago is forgotten first. About half a kilobyte each."""
QUEUE_LIMIT = 256
"""Errors that wait for one listener."""
TEXT_LIMIT = 1024


class ErrorFeed:
    def __init__(
        self,
        clock: Clock,
        store: Store | None = None,
        *,
        window_seconds: float = WINDOW_SECONDS,
        queue_limit: int = QUEUE_LIMIT,
    ) -> None:
        self._clock = clock
        self._shared = (
            Complaints(store, clock, self.told_anywhere, window_seconds=window_seconds)
            if store is not None and store.shared
            else None
        )
        self._window_ns = round(window_seconds * 1e9)
        self._queue_limit = queue_limit
        self._recent: OrderedDict[tuple[str, str, str, str], int] = OrderedDict()
        self._listeners: dict[str, set[ErrorListener]] = {}
        self.told = 0
        self.repeated = 0
        """Errors that were dropped as repetitions."""
        self.dropped = 0
        """Errors that listeners were too slow for."""

    def __repr__(self) -> str:
        listeners = sum(map(len, self._listeners.values()))
        return f"<ErrorFeed told={self.told} listeners={listeners} dropped={self.dropped}>"

    def tell(self, tenant: str, group: str, instance: str, text: str) -> None:
        now_ns = self._clock.now_ns()
        text = text[:TEXT_LIMIT]
        key = (tenant, group, instance, text)
        before_ns = self._recent.get(key)
        if before_ns is not None and now_ns - before_ns < self._window_ns:
            self.repeated += 1
            return
        trouble = Trouble(tenant=tenant, group=group, instance=instance, text=text, at_ns=now_ns)
        if self._shared is not None:
            self._shared.note(trouble)
        else:
            self.told_anywhere(trouble)

    def told_anywhere(self, trouble: Trouble) -> None:
        """Tell whoever listens here."""
        key = (trouble.tenant, trouble.group, trouble.instance, trouble.text)
        self._recent[key] = trouble.at_ns
        self._recent.move_to_end(key)
        if len(self._recent) > REMEMBERED_LIMIT:
            self._recent.popitem(last=False)
        self.told += 1
        for listening in self._listeners.get(trouble.tenant, ()):
            listening.offer(trouble)

    async def run_here(self) -> None:
        """What every server does, until cancelled."""
        if self._shared is not None:
            await self._shared.run_here()

    async def run_active(self) -> None:
        """What the active server does, until cancelled."""
        if self._shared is not None:
            await self._shared.run_active()

    def recent(self, tenant: str | None, limit: int) -> list[Trouble]:
        """The remembered errors of a tenant, or of all, newest first."""
        if self._shared is not None:
            return self._shared.recent(tenant)[:limit]
        found: list[Trouble] = []
        for (of, group, instance, text), at_ns in reversed(self._recent.items()):
            if len(found) >= limit:
                break
            if tenant in (None, of):
                found.append(Trouble(tenant=of, group=group, instance=instance, text=text, at_ns=at_ns))
        return found

    def subscribe(self, tenant: str) -> ErrorListener:
        """Everything told about a tenant from now on; a context manager to iterate over."""
        listening = ErrorListener(self, tenant, self._queue_limit)
        self._listeners.setdefault(tenant, set()).add(listening)
        return listening

    def leave(self, listening: ErrorListener) -> None:
        listeners = self._listeners.get(listening.tenant, set())
        listeners.discard(listening)
        if not listeners:
            self._listeners.pop(listening.tenant, None)

    def close(self) -> None:
        """End every subscription."""
        for listeners in list(self._listeners.values()):
            for listening in list(listeners):
                listening.close()


class ErrorListener:
    """One listener: iterate from one task."""

    def __init__(self, feed: ErrorFeed, tenant: str, limit: int) -> None:
        self.tenant = tenant
        self._feed = feed
        self._limit = limit
        self._queue: deque[Trouble] = deque()
        self._news = asyncio.Event()
        self._closed = False
        self._lost = 0

    def offer(self, trouble: Trouble) -> None:
        if len(self._queue) >= self._limit:
            self._queue.popleft()
            self._lost += 1
            self._feed.dropped += 1
        self._queue.append(trouble)
        self._news.set()

    def take_lost(self) -> int:
        """How many errors this listener has missed since it last asked."""
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        self._closed = True
        self._news.set()
        self._feed.leave(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trouble:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._queue.popleft()
