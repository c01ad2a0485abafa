"""One table for each domain."""

from __future__ import annotations

from pathlib import Path

from fleetplane.domains.gpus.rules import GpuPolicy, TransitionTimes
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import Section, at_least, one_of


class GpuSettings(Section, frozen=True):
    lease_seconds: float = 30.0
    transition_times: TransitionTimes = TransitionTimes.STRICT
    max_gpus: int = 4096
    max_condition_types: int = 32
    max_providers: int = 256
    node: str = ""
    """This node's name in the metrics; the host's name when empty."""

    def __post_init__(self) -> None:
        at_least("gpus.lease_seconds", self.lease_seconds, 0)
        for name in ("max_gpus", "max_condition_types", "max_providers"):
            at_least(f"gpus.{name}", getattr(self, name), 1)

    def policy(self) -> GpuPolicy:
        return GpuPolicy(
            lease_seconds=self.lease_seconds,
            transition_times=self.transition_times,
            max_gpus=self.max_gpus,
            max_condition_types=self.max_condition_types,
            max_providers=self.max_providers,
        )


class InstanceSettings(Section, frozen=True):
    shard: str = "local"
    """Which document this server follows: `shard/{shard}/config.jsonc` in the object storage."""
    provider: str = ""
    """Overrides the document's infrastructure provider."""
    advertise: str = "config"
    """Tell agents the document's `advertise` addresses, or those of the `listeners`."""
    drain_on_scale_down: bool = True
    first_generation_tenants: tuple[str, ...] = ()
    """Tenants whose operators expect the first numbering of group events."""
    silence_share: float = 0.5
    """When more than this share of a group or tenant falls silent at once, nobody is drained; 1: never."""
    silence_window_seconds: float = 300.0
    """How far apart their last reports may lie to count as at once."""
    silence_hold_seconds: float = 900.0
    """How long they are left alone; after that they go one at a time."""
    machine: str = ""
    """The provider's id of the machine that the server runs on: the leader's address goes there."""
    userdata_hosts: tuple[str, ...] = ()
    """Hosts in private networks that user data may be fetched from."""
    storage: str = "file"
    directory: str = ""
    """Of the storage `file`; `objects` in the data directory when empty."""
    bucket: str = ""
    region: str = "us-east-1"
    endpoint: str = ""
    prefix: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""

    def __post_init__(self) -> None:
        at_least("instances.silence_share", self.silence_share, 0)
        at_least("instances.silence_window_seconds", self.silence_window_seconds, 0)
        at_least("instances.silence_hold_seconds", self.silence_hold_seconds, 0)
        one_of("instances.storage", self.storage, ("file", "s3"))
        one_of("instances.advertise", self.advertise, ("config", "listeners"))
        if self.storage == "s3" and not self.bucket:
            raise SettingsError("instances.bucket: must be given for the storage s3")


class ProxySettings(Section, frozen=True):
    admin_email: str = "admin@fleetplane.local"
    """Of the first administrator, who is made when there is no user yet."""
    admin_password: str = ""
    """Empty: from the file below; empty too: made up and shown once."""
    admin_password_file: str = ""
    open_organizations: bool = True
    """Whether every user may create organizations, or only system administrators."""
    requests_per_minute: int = 1000
    """Per caller."""
    heartbeat_seconds: int = 30
    """How often agents report; after three missed reports they are offline."""
    event_origins: tuple[str, ...] = ()
    """Web pages, beside our own, that may listen to events, such as `https://ui.example.com`."""
    acme_directory: str = "https://acme-v02.api.letsencrypt.org/directory"
    """The certificate authority; Let's Encrypt unless told otherwise."""
    acme_terms_agreed: bool = False
    """Whether you have agreed to its terms of service; nothing is ordered before."""
    acme_email: str = ""
    """Where the authority may write to."""
    acme_ca_file: str = ""
    """What vouches for the authority's own web server; the usual roots when empty."""
    acme_eab_key_id: str = ""
    acme_eab_hmac_key: str = ""
    """External account binding, for authorities that want a customer's account."""
    challenge_listen: tuple[str, ...] = ()
    """Addresses that answer challenges in plain HTTP, and nothing else; the web listener does it too."""
    challenge_address: str = ""
    """`host:port` where agents reach this server with challenges; empty: their own operators tell them."""
    dns_zones_file: str = ""
    """Which DNS provider has which zone, with its credentials, for wildcards."""

    def __post_init__(self) -> None:
        at_least("proxies.requests_per_minute", self.requests_per_minute, 1)
        at_least("proxies.heartbeat_seconds", self.heartbeat_seconds, 1)

    def first_password(self) -> str:
        if self.admin_password or not self.admin_password_file:
            return self.admin_password
        try:
            return Path(self.admin_password_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"proxies.admin_password_file: cannot read {self.admin_password_file}: {error}"
            ) from error


class EdgeSettings(Section, frozen=True):
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
    strict: bool = False
    """Refuse signed events that do not say what they are about, and results whose content is not signed."""
    in_flight: int = 16
    """Commands a daemon has at once; daemons that work on one at a time get one."""
    deadline_seconds: float = 60.0
    """Of a command that says nothing else."""
    shipped_shapes: bool = False
    """Answer REST calls as the first command line expects it, unless the caller asks otherwise."""

    def __post_init__(self) -> None:
        one_of("edge.role", self.role, ("controller", "hybrid", "relay-coordinator", "worker"))
        for name in ("stale_seconds", "in_flight", "deadline_seconds"):
            at_least(f"edge.{name}", getattr(self, name), 1)
        for name in ("node_token_days", "overlap_seconds", "skew_seconds", "attests_per_minute"):
            at_least(f"edge.{name}", getattr(self, name), 0)
        if not 1 <= self.enrollment_token_seconds <= 900:
            raise SettingsError(
                f"edge.enrollment_token_seconds: {self.enrollment_token_seconds:g} is not between 1 and 900"
            )


class BoardSettings(Section, frozen=True):
    heartbeat_seconds: float = 30.0
    """How often boards report; after three missed reports they are not ready, after ten unknown."""
    certificate_days: float = 30.0
    """Life of a board's certificate; boards renew them when a third is left."""
    agent_port: int = 9091
    """Where a board's agent listens if it did not say."""
    server_names: tuple[str, ...] = ()
    """Names and addresses at which boards dial this server, beside those it is bound to."""
    controller_id: str = ""
    """How this server is called among others; the machine's name when empty."""
    unprotected_pins: tuple[int, ...] = ()
    """Of the pins that are protected on every board (0 to 3, 14, 15), those that may be used; each board
    has to allow it too."""
    certificate_domains: tuple[str, ...] = ("pi-controller.local", "cluster.local")
    """Under which servers' names may be certified on request."""
    requests_per_minute: int = 1000
    """Per caller of REST."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_seconds", "certificate_days", "agent_port", "requests_per_minute"):
            at_least(f"boards.{name}", getattr(self, name), 1)
