"""What is done for the audit log while the server runs: checkpoints are sent, old entries archived."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.kernel.audit import archive as audit_archive
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.audit.checkpoints import (
    Anchor,
    CheckpointSigner,
    FileAnchor,
    ObjectAnchor,
    SyslogAnchor,
    WebhookAnchor,
    read,
)
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.sections.process import AuditSection

log = structlog.get_logger(__name__)

CHECKPOINTS = "checkpoints.jsonl"
CHECKPOINTS_LIMIT_BYTES = 2 * 1024 * 1024
"""Of the file in the data directory: about 5,000. Each covers all before it, so that older ones can go."""
KEPT_ENTRIES = 1000
"""The newest entries stay in the database, however old they are."""
BATCH_ENTRIES = 2000
"""Archived together: their deletion, in one commit, takes some milliseconds."""
SLACK_ENTRIES = 200
"""Beyond the number to be kept, before some are archived: every archive is an entry, too."""
LAST_SECONDS = 5.0
"""For the last checkpoint, when the server ends."""
FIRST_SECONDS = 30.0
ARCHIVE_SECONDS = 600.0
DAY_NS = 86_400 * 1_000_000_000
DETAILS = ("proxies/audit/",)
"""Secrets that belong to an entry, and go with it."""


def anchors(section: AuditSection, directory: Path, objects: Objects | None) -> list[Anchor]:
    """The file in the data directory, and wherever the settings say."""
    made: list[Anchor] = [FileAnchor(directory / CHECKPOINTS)]
    for place in section.anchors:
        kind, _, rest = place.partition(":")
        match kind:
            case "file":
                made.append(FileAnchor(Path(rest)))
            case "syslog":
                made.append(SyslogAnchor(rest))
            case "objects":
                assert objects is not None
                made.append(ObjectAnchor(objects))
            case _:
                made.append(WebhookAnchor(place))
    return made


class AuditKeeper(Collector):
    def __init__(
        self,
        store: Store,
        signer: CheckpointSigner,
        clock: Clock,
        section: AuditSection,
        *,
        directory: Path,
        anchors: Sequence[Anchor],
    ) -> None:
        self._store = store
        self._signer = signer
        self._clock = clock
        self._section = section
        self._directory = directory
        self._anchors = anchors
        self._arrived: dict[str, int] = {}
        self._failures: Counter[str] = Counter()
        self.archived = 0

    def __repr__(self) -> str:
        return f"<AuditKeeper anchors={len(self._anchors)} archived={self.archived}>"

    async def run(self) -> None:
        """Until cancelled; then one last checkpoint."""
        with contextlib.suppress(OSError):  # who wants to write there is told why it cannot
            self._directory.mkdir(mode=0o700, exist_ok=True)
        try:
            async with Boundary() as tasks:
                tasks.keep("audit/checkpoints", self._checkpoints)
                tasks.keep("audit/archives", self._archives)
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.checkpoint(), LAST_SECONDS)

    # Checkpoints.

    async def _checkpoints(self) -> None:
        while True:
            await self.checkpoint()
            await self._clock.sleep(self._section.checkpoint_seconds)

    async def checkpoint(self) -> None:
        """Sign how far the log has come, and send it to wherever that is not known yet."""
        head = self._store.audit_head()
        waiting = [one for one in self._anchors if self._arrived.get(one.name, 0) < head.seq]
        if not waiting:
            return
        line = self._signer.sign(self._store.lineage, head, self._clock.now_ns())
        checkpoint = read(line, self._signer.public)
        for anchor in waiting:
            try:
                await anchor.send(checkpoint, line)
            except Exception as error:
                self._failures[anchor.name] += 1
                log.warning(
                    "audit.anchor_failed", anchor=anchor.name, error=str(error), exc_info=_unexplained(error)
                )
            else:
                self._arrived[anchor.name] = head.seq
        with contextlib.suppress(OSError):  # missing, or no room: the next one tries again
            await run_to_completion(asyncio.to_thread(_trim, self._directory / CHECKPOINTS))

    # Archives.

    async def _archives(self) -> None:
        await self._clock.sleep(FIRST_SECONDS)
        while True:
            try:
                while await self.archive():
                    pass
            except Exception as error:
                log.warning("audit.archive_failed", error=str(error), exc_info=_unexplained(error))
            await self._clock.sleep(ARCHIVE_SECONDS)

    async def archive(self) -> int:
        """Archive the oldest entries that need not stay; returns how many."""
        rows = await self._oldest()
        if not rows:
            return 0
        last = rows[-1]
        head = audit.Head(revision=audit.read(last).revision, seq=last.seq, hash=last.hash)
        line = self._signer.sign(self._store.lineage, head, self._clock.now_ns())
        made = await asyncio.to_thread(audit_archive.write, self._directory, rows, line)
        digest = await asyncio.to_thread(made.digest)
        gone = [name for row in rows for name in _details(audit.read(row))]
        held = set(await self._store.secret_names(DETAILS[0])) if gone else set()

        def change(draft: Draft) -> None:
            draft.note("archive", f"{made.first}-{made.last}", digest)
            for name in gone:
                if name in held:
                    draft.delete_secret(name)

        await self._store.cut_audit(last.seq, line.decode(), change)
        self.archived += len(rows)
        log.info("audit.archived", file=made.path.name, entries=len(rows))
        return len(rows)

    async def _oldest(self) -> list[audit.Row]:
        """The next to be archived, in order."""
        head = self._store.audit_head().seq
        surplus = head - self._section.keep_entries
        oldest_ns = self._clock.now_ns() - round(self._section.keep_days * DAY_NS)
        found: list[audit.Row] = []
        async with contextlib.aclosing(self._store.audit()) as rows:
            async for row in rows:
                if not found and surplus < row.seq + SLACK_ENTRIES:
                    surplus = 0
                is_old = row.seq <= surplus or audit.read(row).at_ns < oldest_ns
                if not is_old or row.seq > head - KEPT_ENTRIES or len(found) == BATCH_ENTRIES:
                    break
                found.append(row)
        return found

    # Numbers.

    def collect(self) -> Iterator[Metric]:
        head = self._store.audit_head().seq
        yield GaugeMetricFamily("fleetplane_audit_entries", "Number of the last entry", head)
        yield CounterMetricFamily("fleetplane_audit_archived", "Entries archived", self.archived)
        behind = GaugeMetricFamily(
            "fleetplane_audit_anchor_behind", "Entries that a place of checkpoints lacks", labels=["anchor"]
        )
        failures = CounterMetricFamily(
            "fleetplane_audit_anchor_failures", "Checkpoints that did not arrive", labels=["anchor"]
        )
        for anchor in self._anchors:
            behind.add_metric([anchor.name], head - self._arrived.get(anchor.name, 0))
            failures.add_metric([anchor.name], self._failures[anchor.name])
        yield behind
        yield failures


def _unexplained(error: Exception) -> Exception | None:
    """An error that we do not know how to explain is a defect: its place is wanted."""
    return None if isinstance(error, FleetplaneError | OSError) else error


def _details(entry: audit.ChainEntry) -> Iterator[str]:
    for change in entry.changes:
        if change.operation == "secret.put" and change.name.startswith(DETAILS):
            yield change.name


def _trim(path: Path) -> None:
    """Keep the newest half of a file that became too long."""
    if path.stat().st_size <= CHECKPOINTS_LIMIT_BYTES:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    staging = path.with_suffix(".new")
    staging.write_bytes(b"".join(lines[len(lines) // 2 :]))
    staging.chmod(0o600)
    staging.replace(path)
