"""Settings of proxies and of their agents' listener."""

from __future__ import annotations

from pathlib import Path

from fleetplane.domains.proxies.rules.ports import DEFAULT_STREAM_PORTS, PortRanges
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import ListenerSettings, Secret, SettingsSection, at_least

PROXY_QUOTAS = (
    "organizations",
    "users",
    "workspaces_per_organization",
    "members_per_organization",
    "api_tokens_per_organization",
    "agents_per_organization",
    "certificates_per_workspace",
)


class ProxySettings(SettingsSection, frozen=True):
    admin_email: str = "admin@fleetplane.local"
    """Of the first administrator, who is made when there is no user yet."""
    admin_password: Secret = ""
    """Empty: from the file below; empty too: made up and shown once."""
    admin_password_file: str = ""
    open_organizations: bool = False
    """Whether every user may create organizations, or only system administrators."""
    requests_per_minute: int = 1000
    """Per caller."""
    organizations: int = 1000
    """The most there may be on this server; the next lines are the most of one organization or workspace."""
    users: int = 10_000
    workspaces_per_organization: int = 100
    members_per_organization: int = 1000
    api_tokens_per_organization: int = 200
    agents_per_organization: int = 10_000
    certificates_per_workspace: int = 500
    heartbeat_seconds: int = 30
    """How often agents report; after three missed reports they are offline."""
    reported_labels: bool = True
    """Whether labels that agents report are kept: shown, and used by lists, runs and rollouts. They place
    no virtual hosts or streams."""
    cpu_warning_percent: float = 80.0
    cpu_critical_percent: float = 95.0
    memory_warning_percent: float = 85.0
    memory_critical_percent: float = 95.0
    disk_warning_percent: float = 85.0
    disk_critical_percent: float = 95.0
    critical_after_seconds: float = 120.0
    """How long a figure of an agent's machine is critical before the agent is degraded for it."""
    event_origins: tuple[str, ...] = ()
    """Web pages, beside our own, that may listen to events, such as `https://ui.example.com`."""
    event_sockets: int = 1000
    """Listeners to events at once; each takes about 100 KB."""
    event_sockets_per_caller: int = 10
    event_patterns: int = 50
    """Patterns that one listener may subscribe to, in all its subscriptions together."""
    event_subscriptions: int = 20
    """Subscriptions of one listener."""
    acme_directory: str = "https://acme-v02.api.letsencrypt.org/directory"
    """The certificate authority; Let's Encrypt unless told otherwise."""
    acme_terms_agreed: bool = False
    """Whether you have agreed to its terms of service; nothing is ordered before."""
    acme_email: str = ""
    """Where the authority may write to."""
    acme_ca_file: str = ""
    """What vouches for the authority's own web server; the usual roots when empty."""
    acme_eab_key_id: str = ""
    acme_eab_hmac_key: Secret = ""
    """External account binding, for authorities that want a customer's account."""
    challenge_listen: tuple[str, ...] = ()
    """Addresses that answer challenges in plain HTTP, and nothing else; the web listener does it too."""
    challenge_address: str = ""
    """`host:port` where agents reach this server with challenges; empty: their own operators tell them."""
    dns_zones_file: str = ""
    """Which DNS provider has which zone, with its credentials, for wildcards."""
    internal_suffixes: tuple[str, ...] = ()
    """Names below these may have certificates of the server's own authority, such as `corp.example.com`."""
    stream_ports: tuple[str, ...] = DEFAULT_STREAM_PORTS
    """Ports and ranges of ports that streams may listen on; none of them: there are no streams."""

    def __post_init__(self) -> None:
        PortRanges.parse(self.stream_ports, field="proxies.stream_ports")
        at_least("proxies.requests_per_minute", self.requests_per_minute, 1)
        at_least("proxies.heartbeat_seconds", self.heartbeat_seconds, 1)
        for name in PROXY_QUOTAS:
            at_least(f"proxies.{name}", getattr(self, name), 1)
        at_least("proxies.critical_after_seconds", self.critical_after_seconds, 0)
        for name in ("sockets", "sockets_per_caller", "patterns", "subscriptions"):
            at_least(f"proxies.event_{name}", getattr(self, f"event_{name}"), 1)
        for figure in ("cpu", "memory", "disk"):
            warning = getattr(self, f"{figure}_warning_percent")
            critical = getattr(self, f"{figure}_critical_percent")
            at_least(f"proxies.{figure}_warning_percent", warning, 0)
            at_least(f"proxies.{figure}_critical_percent", critical, warning)

    def first_password(self) -> str:
        if self.admin_password or not self.admin_password_file:
            return self.admin_password
        try:
            return Path(self.admin_password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"proxies.admin_password_file: cannot read {self.admin_password_file}: {error}"
            ) from error


class ProxyAgentsSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8995",)
    tls: bool = True
    allow_plaintext: bool = False
    """Permit `tls = false`. Private keys of certificates travel on this listener."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tls and not self.allow_plaintext:
            raise SettingsError(
                "listeners.proxy-agents.tls: private keys travel on this listener, and need TLS",
                hint="leave tls on, or set listeners.proxy-agents.allow_plaintext = true as well",
            )
