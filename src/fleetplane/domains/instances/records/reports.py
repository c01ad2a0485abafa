"""The latest reports of agents; lasting consequences are written by the controllers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from fleetplane.domains.instances.kinds import INSTANCE, REPORT, HealthReport, HeardReport
from fleetplane.fleet.streams.status_writer import StatusWriter
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store import Draft, Store, follow
from fleetplane.kernel.watch import EventType, Watch

log = structlog.get_logger(__name__)

SCOPE = ""
"""Ids of instances are unique among all tenants."""
GATHER_SECONDS = 0.5
"""Reports are written this often: whoever reports all the time has only the last of them written."""


@dataclass(slots=True)
class ReceivedReport:
    at_ns: int
    report: HealthReport


class InstanceReports:
    """The last report of every instance; a new server gives everyone the time it has itself.

    Where servers share a database, an instance may report to any of them: reports are written there, many in
    one transaction, and each server knows those of all.
    """

    def __init__(self, clock: Clock, store: Store | None = None) -> None:
        self._clock = clock
        self._store = store if store is not None and store.shared else None
        self._started_at_ns = clock.now_ns()
        self._heard: dict[str, ReceivedReport] = {}
        self._writer: StatusWriter[ReceivedReport] = StatusWriter(
            clock, self._write, failed=_not_written, gather_seconds=GATHER_SECONDS
        )
        self.received = 0

    def __repr__(self) -> str:
        return f"<Reports instances={len(self._heard)} received={self.received}>"

    def take(self, report: HealthReport) -> None:
        self.received += 1
        heard = self._heard[report.instance] = ReceivedReport(at_ns=self._clock.now_ns(), report=report)
        if self._store is not None:
            self._writer.note(report.instance, heard)

    def heard_at_ns(self, instance: str, registered_at_ns: int | None) -> int | None:
        """When it was last heard; before its first report, when it registered or we started.

        A report from a moment that has yet to come was taken before the clock was set back. One that is older
        than this server's beginning may have been followed by others that nobody could write down.
        """
        heard = self.last(instance)
        if heard is None:
            return None if registered_at_ns is None else max(registered_at_ns, self._started_at_ns)
        heard.at_ns = min(heard.at_ns, self._clock.now_ns())
        return heard.at_ns if self._store is None else max(heard.at_ns, self._started_at_ns)

    def last(self, instance: str) -> ReceivedReport | None:
        own = self._heard.get(instance)
        found = None if self._store is None else self._store.get(REPORT, SCOPE, instance)
        if found is None or (own is not None and own.at_ns >= found.spec.at_ns):
            return own
        return ReceivedReport(at_ns=found.spec.at_ns, report=found.spec.report)

    def take_over(self) -> None:
        """Give every instance its time from now on: what a server that is gone was told may be missing."""
        self._started_at_ns = self._clock.now_ns()

    def forget(self, instance: str) -> None:
        self._heard.pop(instance, None)

    # Where several servers are told.

    async def run(self) -> None:
        """Write down what comes in, until cancelled."""
        if self._store is not None:
            await self._writer.run()

    async def _write(self, batch: Sequence[tuple[str, ReceivedReport]]) -> None:
        assert self._store is not None

        def change(draft: Draft) -> None:
            for name, heard in batch:
                if draft.claimed_by(INSTANCE, "", "id", name) is None:
                    continue  # purged meanwhile
                known = draft.get(REPORT, SCOPE, name)
                if known is None or known.spec.at_ns < heard.at_ns:
                    spec = HeardReport(at_ns=heard.at_ns, report=heard.report)
                    draft.put(REPORT, SCOPE, name, spec=spec)

        await self._store.transact(
            change,
            actor="system/instances",
            action="instances.reports",
            touches=[REPORT.key(SCOPE, name) for name, _ in batch],
        )

    async def follow(self, told: Callable[[HealthReport | None, HealthReport], None]) -> None:
        """Tell of each report that comes, to whichever server, with the one before it; until cancelled."""
        if self._store is None:
            return
        store, before = self._store, dict[str, HealthReport]()

        def begin(_watch: Watch) -> None:
            before.clear()
            before.update((one.name, one.spec.report) for one in store.list(REPORT))

        async for batch in follow(store, REPORT, begin=begin):
            for event in batch.events:
                name, report = event.resource.name, event.resource.spec.report
                if event.type is EventType.DELETED:
                    before.pop(name, None)
                    self.forget(name)
                else:
                    told(before.get(name), report)
                    before[name] = report


def _not_written(count: int, error: FleetplaneError) -> None:
    log.warning("instances.reports_not_written", reports=count, error=error.message)
