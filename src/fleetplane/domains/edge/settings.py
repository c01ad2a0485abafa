"""Settings of edge daemons and of their listener."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import ListenerSettings, SettingsSection, at_least, one_of


class EdgeSettings(SettingsSection, frozen=True):
    role: str = "controller"
    """What this server is to its daemons; a `worker` takes none."""
    public_endpoint: str = ""
    """`host:port` or URL at which daemons reach the listener `edge`; its first address when empty."""
    issuer: str = ""
    """Of enrollment tokens; made from the role when empty."""
    stale_seconds: float = 90.0
    """Without a heartbeat for this long, a connected daemon is unhealthy; they come every 30 s."""
    node_token_days: float = 30.0
    enrollment_token_seconds: float = 900.0
    overlap_seconds: float = 60.0
    """How long the former key of a daemon is still good for the stream it has open."""
    attests_per_minute: int = 5
    """Of new daemons, per address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks whose `x-forwarded-for` says where a daemon really is."""
    skew_seconds: float = 300.0
    """How far a daemon's clock may be off."""
    strict: bool = True
    """Refuse signed events whose payload does not say what it is about."""
    first_generation: bool = True
    """Take daemons of the first generation, which do not sign the content of results and capabilities."""
    output_checked: bool = False
    """Check the signature of every line of output, also of daemons that do not sign for results."""
    forward_to: tuple[str, ...] = ()
    """Hosts, `*.domain`s and networks, with a port or not, to which executions may be forwarded."""
    relay_coordinator_endpoint: str = ""
    """URL of the web listener of the relay that has this server's daemons; operators' calls go on to it."""
    relay_coordinator_token_file: str = ""
    """A file with a token of that relay, of no tenant, with role `edge.admin`."""
    relay_coordinator_ca_file: str = ""
    """CA certificates to verify the relay against, in PEM; the system's when empty."""
    in_flight: int = 16
    """Commands a daemon has at once; daemons that work on one at a time get one."""
    deadline_seconds: float = 60.0
    """Of a command that says nothing else."""
    shipped_shapes: bool = False
    """Answer REST calls as the first command line expects it, unless the caller asks otherwise."""

    def __post_init__(self) -> None:
        one_of("edge.role", self.role, ("controller", "hybrid", "relay-coordinator", "worker"))
        if bool(self.relay_coordinator_endpoint) != bool(self.relay_coordinator_token_file):
            raise SettingsError(
                "edge.relay_coordinator_endpoint and edge.relay_coordinator_token_file go together"
            )
        for name in ("stale_seconds", "in_flight", "deadline_seconds"):
            at_least(f"edge.{name}", getattr(self, name), 1)
        for name in ("node_token_days", "overlap_seconds", "skew_seconds", "attests_per_minute"):
            at_least(f"edge.{name}", getattr(self, name), 0)
        if not 1 <= self.enrollment_token_seconds <= 900:
            raise SettingsError(
                f"edge.enrollment_token_seconds: {self.enrollment_token_seconds:g} is not between 1 and 900"
            )

    def own_names(self) -> Iterable[str]:
        endpoint = self.public_endpoint
        host = urlsplit(endpoint if "//" in endpoint else f"//{endpoint}").hostname
        return (host,) if host else ()


class EdgeListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:50056",)
    tls: bool = False
    """TLS of our own; without it, an ingress in front ends TLS and passes HTTP/2 on in clear text."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback without TLS, where the way from the ingress is trusted."""
