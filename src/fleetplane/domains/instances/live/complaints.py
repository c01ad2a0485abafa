"""Errors of tenants in the store, where servers share a database: written by whoever meets them, told by all.

One that says the same is one record, whichever server met it, and is written again once the moment is over
within which it is not repeated. A tenant keeps so many; the one that came least lately gives way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
