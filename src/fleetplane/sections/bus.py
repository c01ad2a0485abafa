"""The table `[bus]`: over what servers that share a database tell each other of writes."""

from __future__ import annotations

from urllib.parse import urlsplit

from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.store.bells.bus import NatsSettings
from fleetplane.sections.base import Secret, SecretFile, SettingsSection

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
