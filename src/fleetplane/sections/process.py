"""Tables about the server itself: its log, store, keys and end."""

from __future__ import annotations

from fleetplane.sections.base import Section, at_least, one_of


class LogSettings(Section, frozen=True):
    level: str = "info"
    format: str = "text"

    def __post_init__(self) -> None:
        one_of("log.level", self.level, ("debug", "info", "warning", "error"))
        one_of("log.format", self.format, ("text", "json"))


class ShutdownSettings(Section, frozen=True):
    grace_seconds: float = 10.0
    """How long running calls may take to finish after SIGTERM."""

    def __post_init__(self) -> None:
        at_least("shutdown.grace_seconds", self.grace_seconds, 0)


class StoreSection(Section, frozen=True):
    ring_events: int = 4096
    """Recent events kept in memory for watchers."""
    history_revisions: int = 100_000
    """Revisions from which a watch may resume; older ones are compacted."""
    group_limit: int = 256
    """Writes made durable together; 1 means one commit per write."""

    def __post_init__(self) -> None:
        at_least("store.ring_events", self.ring_events, 1)
        at_least("store.history_revisions", self.history_revisions, 1)
        at_least("store.group_limit", self.group_limit, 1)


class TelemetrySettings(Section, frozen=True):
    """Of measurements and log lines; what is older, or too much, is deleted."""

    points_days: float = 35.0
    """A month can be looked at on its last day."""
    lines_days: float = 8.0
    size_mebibytes: int = 8192
    """Beyond it the oldest lines go first. About 20 million of 400 bytes."""

    def __post_init__(self) -> None:
        for name, least in (("points_days", 0.01), ("lines_days", 0.01), ("size_mebibytes", 1)):
            at_least(f"telemetry.{name}", getattr(self, name), least)


class IdentitySettings(Section, frozen=True):
    master_key: str = ""
    """Base64 of 32 bytes. Empty: a 0600 file in the data directory, made at first start."""
    master_key_file: str = ""
    """Where that file is, when not in the data directory."""
