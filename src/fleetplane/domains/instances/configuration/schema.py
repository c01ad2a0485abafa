"""The configuration document, as types. Every key, its type and its default stand here and nowhere else.

A field's name in the document is its name here, without the unit. A field without a default is required.
Where a default is not zero, an explicit zero means the default too: that is how these documents have always
been read, and some rely on it. Rules that span fields are in `validate`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

DURATION = "duration"
Duration = Annotated[float, DURATION]
"""Seconds; written in the document as a Go duration."""

Json = object
"""Whatever JSON can hold; passed on, not interpreted."""

PROVIDERS = ("aws", "google", "mock", "tmux", "proxmox", "local")
"""Those that documents have always known. A server whose settings name its provider takes any of them."""
SecretsProvider = Literal[
    "", "object-storage", "aws-parameter-store", "aws-secrets-manager", "google-secret-manager", "memory"
]
KeyProvider = Literal["env", "file", "aws-parameter-store", "aws-secrets-manager", "google-secret-manager"]
FileKind = Literal["secret", "storage", "certificate", "env", "json", "string"]


class DocumentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One object of the document."""


def seconds(key: str, default: float) -> Duration:
    return msgspec.field(name=key, default=default)


class LeaderElection(DocumentPart, frozen=True, kw_only=True):
    enabled: bool = True
    frequent_interval_seconds: Duration = seconds("frequent_interval", 5.0)
    infrequent_interval_seconds: Duration = seconds("infrequent_interval", 30.0)
    leader_timeout_seconds: Duration = seconds("leader_timeout", 15.0)


class StorageSection(DocumentPart, frozen=True, kw_only=True):
    provider: Literal["s3", "gcs", "file"]
    bucket: str = ""
    region: str = ""
    endpoint: str = ""
    prefix: str = "cluster/"


class EncryptionKey(DocumentPart, frozen=True, kw_only=True):
    provider: KeyProvider
    source: str
    """Name of the environment variable, path of the file, or name of the secret."""
    project_id: str = ""


class SecretsSection(DocumentPart, frozen=True, kw_only=True):
    provider: SecretsProvider = ""
    """Follows from the infrastructure provider on AWS and Google."""
    prefix: str = ""
    project_id: str = ""
    encryption_key: EncryptionKey | None = None
    old_encryption_keys: tuple[EncryptionKey, ...] = ()
    """Only to decrypt with, while keys rotate."""
    cache_ttl_seconds: Duration = seconds("cache_ttl", 0.0)


class Cluster(DocumentPart, frozen=True, kw_only=True):
    id: str
    storage: StorageSection | None = None
    """None: the shard's bucket, under `cluster/`."""
    secrets: SecretsSection = SecretsSection()
    leader_election: LeaderElection = LeaderElection()


class Infra(DocumentPart, frozen=True, kw_only=True):
    provider: str
    region: str
    zone: str
    options: dict[str, Json] = {}


class Addresses(DocumentPart, frozen=True, kw_only=True):
    health_addr: str
    election_addr: str
    registration_addr: str
    operator_addr: str
    agent_addr: str


class LeaderNetworkSection(DocumentPart, frozen=True, kw_only=True):
    ip: str
    interface_id: str = ""


class GarbageCollection(DocumentPart, frozen=True, kw_only=True):
    interval_seconds: Duration = seconds("interval", 120.0)
    registration_timeout_seconds: Duration = seconds("registration_timeout", 300.0)
    deleted_record_retention_seconds: Duration = seconds("deleted_record_retention", 1800.0)


class Expiry(DocumentPart, frozen=True, kw_only=True):
    """Ages; 0 is never."""

    eligible_age_seconds: Duration = seconds("eligible_age", 0.0)
    forced_age_seconds: Duration = seconds("forced_age", 0.0)
    ondemand_age_seconds: Duration = seconds("ondemand_age", 0.0)


class ErrorExitJitter(DocumentPart, frozen=True, kw_only=True):
    min_delay_seconds: Duration = seconds("min_delay", 10.0)
    max_delay_seconds: Duration = seconds("max_delay", 40.0)


class Shard(DocumentPart, frozen=True, kw_only=True):
    id: str
    infra: Infra
    bind: Addresses
    advertise: Addresses
    leader_network: LeaderNetworkSection | None = None
    request_timeout_seconds: Duration = seconds("request_timeout", 30.0)
    create_rate_limit_seconds: Duration = seconds("create_rate_limit", 0.0)
    """The least time between two creations; 0 is no limit."""
    health_check_interval_seconds: Duration = seconds("health_check_interval", 60.0)
    default_drain_timeout_seconds: Duration = seconds("default_drain_timeout", 300.0)
    image_refresh_interval_seconds: Duration = seconds("image_refresh_interval", 21600.0)
    shutdown_timeout_seconds: Duration = seconds("shutdown_timeout", 10.0)
    tenant_quotas: dict[str, int] = {}
    """Instances that a tenant may have, by tenant; else the server's setting says how many."""
    subnet_pools: dict[str, tuple[str, ...]] = {}
    dynamic_subnet_pools: tuple[str, ...] = ()
    """Pools that groups made at run time may use; empty is any."""
    garbage_collection: GarbageCollection = GarbageCollection()
    expiry: Expiry = Expiry()
    leader_election: LeaderElection = LeaderElection()
    error_exit_jitter: ErrorExitJitter = ErrorExitJitter()


class TargetGroupSection(DocumentPart, frozen=True, kw_only=True):
    arn: str
    listener_port: int
    target_port: int
    proxy_port: int


class Frontend(DocumentPart, frozen=True, kw_only=True):
    ip: str
    port: int


class TunnelListener(DocumentPart, frozen=True, kw_only=True):
    target_port: int
    proxy_port: int


class LoadBalancerSection(DocumentPart, frozen=True, kw_only=True):
    provider: Literal["aws", "google", "tunnel"]
    target_groups: tuple[TargetGroupSection, ...] = ()
    network_endpoint_groups: tuple[str, ...] = ()
    frontends: tuple[Frontend, ...] = ()
    listeners: tuple[TunnelListener, ...] = ()


class ImageFilter(DocumentPart, frozen=True, kw_only=True):
    name: str
    values: tuple[str, ...]


class ImageSection(DocumentPart, frozen=True, kw_only=True):
    provider: str
    """Must be the shard's."""
    filters: tuple[ImageFilter, ...]
    owners: tuple[str, ...] = ()
    sort: Literal["creation-date", "name"]
    order: Literal["asc", "desc"]
    fallback: str | None = None


class Certificate(DocumentPart, frozen=True, kw_only=True):
    kind: Literal["client", "server"]
    cn: str | None = None
    organization: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    ip: tuple[str, ...] = ()
    uri: tuple[str, ...] = ()
    country: tuple[str, ...] = ()
    province: tuple[str, ...] = ()
    locality: tuple[str, ...] = ()
    street: tuple[str, ...] = ()
    postal_code: tuple[str, ...] = ()
    ttl_hours: int = msgspec.field(name="ttl", default=8760)


class KeySection(DocumentPart, frozen=True, kw_only=True):
    source: Literal["agent"]
    name: str


class FileSection(DocumentPart, frozen=True, kw_only=True):
    kind: FileKind
    source: str = ""
    template: Json = None
    """The name of a certificate, an object of strings, any object, or a text: by kind."""
    key: KeySection | None = None
    tenants: tuple[str, ...] = ()
    """Whose instances get it; empty: all that the template is for."""


class Userdata(DocumentPart, frozen=True, kw_only=True):
    source: Literal["", "inline", "url"] = ""
    encoding: Literal["", "plain", "base64", "gzip", "base64+gzip"] = ""
    content: str

    # What was left out stays left out, because hashes are taken of what was written.
    @property
    def is_url(self) -> bool:
        return self.source == "url"

    @property
    def coding(self) -> str:
        return self.encoding or "plain"


class ServerSection(DocumentPart, frozen=True, kw_only=True):
    files: dict[str, FileSection] = {}


class Tunnel(DocumentPart, frozen=True, kw_only=True):
    image: str
    args: tuple[str, ...] = ()
    files: dict[str, FileSection] = {}
    readiness_url: str
    readiness_timeout_seconds: Duration = seconds("readiness_timeout", 0.0)


class Defaults(DocumentPart, frozen=True, kw_only=True):
    args: dict[str, Json] = {}
    vars: dict[str, str] = {}
    userdata: Userdata | None = None


class InstanceTemplate(DocumentPart, frozen=True, kw_only=True):
    kind: str
    arch: Literal["amd64", "arm64"]
    files: dict[str, FileSection] = {}
    args: dict[str, Json] = {}
    userdata: Userdata | None = None
    size: int = 1
    instance_type: str = ""
    subnet_pool: str = ""
    vars: dict[str, str] = {}
    tenants: tuple[str, ...] = ()
    """Whose groups may stand on it, `*` for everyone's; empty: the tenants whose groups here do."""
    agent_names: bool = False
    """Whether its agents' own word for host name and addresses may stand in certificates, where the
    provider says none."""


class GroupSection(DocumentPart, frozen=True, kw_only=True):
    template: str
    size: int | None = None
    instance_type: str = ""
    subnet_pool: str = ""
    vars: dict[str, str] = {}
    args: dict[str, Json] = {}
    drain_timeout_seconds: Annotated[float | None, DURATION] = msgspec.field(
        name="drain_timeout", default=None
    )
    """None is the shard's default, 0 is at once."""
    load_balancers: tuple[str, ...] = ()


class PublicAddress(DocumentPart, frozen=True, kw_only=True):
    ipv4: str
    allocation_id: str = ""


class Thresholds(DocumentPart, frozen=True, kw_only=True):
    conntrack_percent: float
    cpu_percent: float
    packet_drops_per_second: float


class ScaleUp(Thresholds, frozen=True, kw_only=True):
    conntrack_percent: float = 80.0
    cpu_percent: float = 80.0
    packet_drops_per_second: float = 1.0


class ScaleDown(Thresholds, frozen=True, kw_only=True):
    conntrack_percent: float = 30.0
    cpu_percent: float = 30.0
    packet_drops_per_second: float = 0.0


class Nat(DocumentPart, frozen=True, kw_only=True):
    group: str
    mode: Literal["nat44", "nat64"] = "nat44"
    public_addresses: tuple[PublicAddress, ...] = ()
    last_instance_grace_period_seconds: Duration = seconds("last_instance_grace_period", 600.0)
    instance_type_ladder: tuple[str, ...] = ()
    scale_up_thresholds: ScaleUp = ScaleUp()
    scale_down_thresholds: ScaleDown = ScaleDown()
    scale_up_window_seconds: Duration = seconds("scale_up_window", 180.0)
    scale_down_window_seconds: Duration = seconds("scale_down_window", 1500.0)
    cooldown_seconds: Duration = seconds("cooldown", 600.0)
    replacement_timeout_seconds: Duration = seconds("replacement_timeout", 600.0)


class InstancesDocument(DocumentPart, frozen=True, kw_only=True):
    """A whole document. Those that `parse` returns have passed every rule."""

    cluster: Cluster
    shard: Shard
    templates: dict[str, InstanceTemplate]
    load_balancers: dict[str, LoadBalancerSection] = {}
    images: dict[str, ImageSection] = {}
    certificates: dict[str, Certificate] = {}
    server: ServerSection = ServerSection()
    tunnels: dict[str, Tunnel] = {}
    defaults: Defaults = Defaults()
    groups: dict[str, dict[str, GroupSection]] = {}
    """By tenant, then by key."""
    nat: dict[str, Nat] = {}
    """By tenant."""
