"""Tables about the server itself: its log, store, keys and end."""

from __future__ import annotations

from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import Secret, SecretFile, SettingsSection, at_least, one_of


class LogSettings(SettingsSection, frozen=True):
    level: str = "info"
    format: str = "text"

    def __post_init__(self) -> None:
        one_of("log.level", self.level, ("debug", "info", "warning", "error"))
        one_of("log.format", self.format, ("text", "json"))


class ShutdownSettings(SettingsSection, frozen=True):
    grace_seconds: float = 10.0
    """How long running calls may take to finish after SIGTERM."""

    def __post_init__(self) -> None:
        at_least("shutdown.grace_seconds", self.grace_seconds, 0)


class StoreSection(SettingsSection, frozen=True):
    url: Secret = ""
    """`postgresql://user:password@host/database`, shared by several servers; empty: a file in `data_dir`."""
    url_file: SecretFile = ""
    """A file that holds the address instead."""
    server: str = ""
    """The name of this one among them; empty: the machine's name and `data_dir`."""
    ring_events: int = 4096
    """Recent events kept in memory for watchers."""
    history_revisions: int = 100_000
    """Revisions from which a watch may resume; older ones are compacted."""
    history_mebibytes: int = 256
    """What that history may weigh; beyond it the oldest goes first."""
    history_days: float = 30.0
    """How old it may be."""
    group_limit: int = 256
    """Writes made durable together; 1 means one commit per write."""
    level_delay_seconds: float = 600.0
    """How long all servers must have been of the newer release before what it brings is written."""

    def __post_init__(self) -> None:
        if self.url and not self.url.startswith(("postgresql://", "postgres://")):
            raise SettingsError("store.url: is no address that begins with postgresql://")
        at_least("store.ring_events", self.ring_events, 1)
        at_least("store.history_revisions", self.history_revisions, 1)
        at_least("store.group_limit", self.group_limit, 1)
        at_least("store.history_mebibytes", self.history_mebibytes, 1)
        at_least("store.history_days", self.history_days, 0.05)
        at_least("store.level_delay_seconds", self.level_delay_seconds, 0)


class AuditSection(SettingsSection, frozen=True):
    checkpoint_seconds: float = 60.0
    """How often a checkpoint of the audit log is signed, if it has grown."""
    anchors: tuple[str, ...] = ()
    """Where checkpoints are sent besides: `file:/path`, `syslog:`, `syslog:host:port`, `objects:`, `https://…`."""
    keep_days: float = 400.0
    """Older entries are archived."""
    keep_entries: int = 200_000
    """Entries in the database; older ones are archived. About 350 bytes each."""

    def __post_init__(self) -> None:
        at_least("audit.checkpoint_seconds", self.checkpoint_seconds, 1)
        at_least("audit.keep_days", self.keep_days, 1)
        at_least("audit.keep_entries", self.keep_entries, 1000)
        for anchor in self.anchors:
            kind, _, place = anchor.partition(":")
            one_of("audit.anchors", kind, ("file", "syslog", "objects", "https", "http"))
            if kind == "file" and not place.startswith("/"):
                raise SettingsError(
                    "audit.anchors: a file is named by its whole path, such as file:/mnt/anchors"
                )
            if kind == "http" and not place.startswith(("//127.0.0.1:", "//localhost:", "//[::1]:")):
                raise SettingsError("audit.anchors: http is for this machine; name others with https")


class TelemetrySettings(SettingsSection, frozen=True):
    """Settings of measurements and log lines; older or surplus ones are deleted."""

    points_days: float = 35.0
    """A month can be looked at on its last day."""
    lines_days: float = 8.0
    size_mebibytes: int = 8192
    """Beyond it the oldest lines of the largest sources are deleted. About 20 million lines of 400 bytes."""
    series: int = 200_000
    """Series in total; beyond it the source with the most gives way to one with fewer."""
    tenant_series: int = 150_000
    """Of one tenant: an organisation of proxies, or all boards."""
    source_series: int = 1_000
    """Of one agent or board."""

    def __post_init__(self) -> None:
        for name, least in (
            ("points_days", 0.01),
            ("lines_days", 0.01),
            ("size_mebibytes", 1),
            ("series", 1),
            ("tenant_series", 1),
            ("source_series", 1),
        ):
            at_least(f"telemetry.{name}", getattr(self, name), least)


class ReleasesSettings(SettingsSection, frozen=True):
    """Settings of agents' own upgrades."""

    check_in_seconds: float = 60.0
    """How often agents that can upgrade themselves say which version they run, and ask which they should."""
    hello_seconds: float = 120.0
    """The time that a new version has to say hello; then its agent goes back to the former one by itself."""

    def __post_init__(self) -> None:
        at_least("releases.check_in_seconds", self.check_in_seconds, 0.2)
        at_least("releases.hello_seconds", self.hello_seconds, 1)


class MetricsSettings(SettingsSection, frozen=True):
    """Settings of the page `/metrics` of the web listener."""

    token: Secret = ""
    """Shown by scrapers as `Authorization: Bearer`. Needed as soon as other machines can reach the page."""


class IdentitySettings(SettingsSection, frozen=True):
    master_key: Secret = ""
    """Base64 of 32 bytes. Empty: a 0600 file in the data directory, made at first start."""
    master_key_file: str = ""
    """Where that file is, when not in the data directory."""
