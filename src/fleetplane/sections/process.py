"""Tables about the server itself: log, store, keys, end, the bus between servers, and object storage."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.objects import LocalObjects, Objects
from fleetplane.kernel.store.notifiers.notifier import NatsSettings
from fleetplane.sections.base import Secret, SecretFile, SettingsSection, at_least, one_of

SCHEMES = ("nats", "tls")
SERVERS_LIMIT = 16


class BusSection(SettingsSection, frozen=True):
    url: str = ""
    """`nats://host:4222`, or `tls://`; several with commas between them. Empty: over the database itself."""
    ca_file: str = ""
    """The authority of NATS's certificates, PEM; with it, nothing but TLS is spoken."""
    cert_file: str = ""
    """The certificate that this server shows, PEM."""
    key_file: str = ""
    """Its key."""
    credentials_file: str = ""
    """A user's token and seed, as NATS's own tools write them (`.creds`)."""
    token: Secret = ""
    token_file: SecretFile = ""
    user: str = ""
    password: Secret = ""
    password_file: SecretFile = ""

    def __post_init__(self) -> None:
        for server in self.servers:
            parts = urlsplit(server)
            if parts.scheme not in SCHEMES or not parts.hostname:
                raise SettingsError(
                    "bus.url: expected nats://host:port or tls://host:port, and commas between"
                )
            if parts.username or parts.password:
                raise SettingsError(
                    "bus.url: holds a user or a password", hint="give them as bus.user and bus.password"
                )
            try:
                _ = parts.port
            except ValueError as error:
                raise SettingsError(f"bus.url: {parts.hostname} has a port that is no number") from error
        if len(self.servers) > SERVERS_LIMIT:
            raise SettingsError(f"bus.url: more than {SERVERS_LIMIT} servers")
        if bool(self.cert_file) != bool(self.key_file):
            raise SettingsError("bus.cert_file: a certificate and bus.key_file are given together")
        if bool(self.user) != bool(self.password):
            raise SettingsError("bus.user: a user and bus.password are given together")
        ways = {"bus.credentials_file": self.credentials_file, "bus.token": self.token, "bus.user": self.user}
        given = [name for name, value in ways.items() if value]
        if len(given) > 1:
            raise SettingsError(f"{given[1]}: {given[0]} is given, too; give one of them")
        others = [name for name in self.__struct_fields__ if name != "url" and getattr(self, name)]
        if others and not self.url:
            raise SettingsError(f"bus.{others[0]}: means nothing without bus.url")

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.url.split(",") if one.strip())

    @property
    def nats(self) -> NatsSettings | None:
        """None without a NATS."""
        if not self.servers:
            return None
        return NatsSettings(
            servers=self.servers,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
            credentials_file=self.credentials_file,
            token=self.token,
            user=self.user,
            password=self.password,
        )


class ObjectStorageSettings(SettingsSection, frozen=True):
    storage: str = "file"
    directory: str = ""
    """Of the storage `file`; `objects` in the data directory when empty."""
    bucket: str = ""
    region: str = "us-east-1"
    endpoint: str = ""
    prefix: str = ""
    access_key_id: str = ""
    secret_access_key: Secret = ""

    @property
    def is_shared(self) -> bool:
        """Whether other servers reach the same objects: in S3, or in a folder that was chosen for them."""
        return self.storage != "file" or bool(self.directory)

    def folder(self, data_dir: Path) -> Path | None:
        """Where objects lie, if they lie in files."""
        return Path(self.directory or data_dir / "objects") if self.storage == "file" else None

    def open(self, data_dir: Path) -> Objects:
        """The storage itself."""
        if (folder := self.folder(data_dir)) is not None:
            return LocalObjects(folder)
        from fleetplane.kernel.objects.s3 import S3Bucket, StoreObjects

        return StoreObjects(
            S3Bucket(
                bucket=self.bucket,
                region=self.region,
                endpoint=self.endpoint,
                prefix=self.prefix,
                access_key_id=self.access_key_id,
                secret_access_key=self.secret_access_key,
            )
        )


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
