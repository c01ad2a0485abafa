"""Every bound of the store, and the numbers it reports about itself."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from urllib.parse import urlsplit

from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.store.notifiers.notifier import NatsSettings
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.store.servers.level import Levels
from fleetplane.kernel.watch import WatchLimits

UNBOUNDED = frozenset(
    {"path", "url", "server", "bus", "first_revision", "evidence", "levels", "level_delay_seconds"}
)
"""Settings that are no limits."""


def place(url: str) -> str:
    """Where a database is, without the password that its address may hold."""
    parts = urlsplit(url)
    return f"the database {parts.path.lstrip('/')} on {parts.hostname or 'this machine'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    path: Path
    """The database file. Its directory is made if missing; its lock and log lie beside it."""
    url: str = ""
    """Of a PostgreSQL database that several servers share; this one's lock and mark still lie at the path."""
    server: str = ""
    """The name of this one among several."""
    bus: NatsSettings | None = None
    """Over which servers tell each other of writes; None: over the database."""
    ring_events: int = 4096
    """Recent events held in memory for all watchers together."""
    coalesce_after_events: int = 256
    """A watcher further behind than this gets only the last state of each object."""
    tombstones: int = 4096
    """Deletions remembered in memory for watchers that fell off the ring."""
    watch_limit: int = 16_384
    history_revisions: int = 50_000
    """Revisions kept in the database's log: what a watch can resume from. About 1 KB each."""
    history_slack_revisions: int = 512
    """How many more may gather before they are trimmed, so that not every commit has to."""
    replay_page_events: int = 512
    """Events read from the log at a time; about 0.5 MB held per replaying watcher."""
    queue_limit: int = 4096
    """Transactions waiting for the writer; at 64 bytes of queue and one caller each."""
    group_limit: int = 256
    """Transactions made durable together; 1 means one commit per write."""
    busy_timeout_seconds: float = 5.0
    """How long a commit waits for another process that holds the database, such as a backup."""
    first_revision: int = 0
    """Where a new database begins to count; see `lineage.first_revision`."""
    evidence: tuple[Path, ...] = ()
    """Files that there are only where there was a database: with one, a missing database is refused."""
    levels: Levels = field(default_factory=lambda: level.SUPPORTED)
    """Of the store that this program can read and write."""
    level_delay_seconds: float = 600.0
    """How long all servers that run must have supported a level before it is the store's."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.name not in UNBOUNDED and getattr(self, one.name) <= 0:
                raise SettingsError(f"{one.name} must be positive", field=one.name)
        if self.url and not self.server:
            raise SettingsError("a server that shares its database needs a name", field="server")
        if self.path.is_dir():
            raise SettingsError(f"{self.path} is a directory, not a database file", field="path")

    @property
    def watch_limits(self) -> WatchLimits:
        return WatchLimits(
            ring_events=self.ring_events,
            coalesce_after_events=self.coalesce_after_events,
            tombstones=self.tombstones,
            watchers=self.watch_limit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    revision: int
    compacted: int
    """History begins after this revision."""
    level: int
    """What may be written; see `servers/level.py`."""
    supported_level: int
    """The highest that this program supports."""
    resources: int
    claims: int
    queued: int
    """Transactions waiting for the writer."""
    queue_refusals: int
    """Transactions refused because the queue was full."""
    commits: int
    """Groups made durable."""
    transactions: int
    """Transactions in them that changed something."""
    largest_group: int
    failed_commits: int
    writable: bool
    """Whether the last commit succeeded."""
    ring_events: int
    tombstones: int
    watchers: int
    coalesced_events: int
    """Events that slow watchers were spared."""
    refills: int
    """Times a watcher had fallen off the ring and was served from memory."""
