"""What the instances domain keeps.

An instance's state is not stored as a word; it follows from which of its moments have come
(see `rules`). Health reports move the liveness of the instance, and only what follows from them is
written; where servers share a database, the last of each instance is stored as well, for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetplane.kernel.objects.port import OBJECT
from fleetplane.kernel.resources import Kind, Nothing, Resource


def tenant_scope(tenant: str) -> str:
    return f"tenant/{tenant}"


def group_scope(tenant: str, group: str) -> str:
    """What holds for one group only, such as a freeze, holds here."""
    return f"tenant/{tenant}/group/{group}"


def tenant_of(resource: Resource[Any, Any]) -> str:
    return resource.scope.removeprefix("tenant/")


class InstanceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the instance was made as. Never changes."""

    cluster: str
    shard: str
    group: str
    template: str
    prefix: str
    """Three letters: the template's kind, and the beginning of the instance's id."""
    on_demand: bool = False
    """Made for a caller, not for a group's size; never replaced."""
    arch: str = ""
    instance_type: str = ""
    subnet: str = ""
    vars: dict[str, str] = {}
    infra_hash: str = ""
    """Of the configuration it was made from; a different one today means drift."""
    runtime_hash: str = ""
    """Of its files at that time; stands in its nonce."""
    replaces: str = ""
    """The instance whose place it is to take."""
    place: str = ""
    """The name of the first in the line of those that it follows; empty if it is itself the first."""
    provider: str = ""
    """The kind of provider it was asked of; empty in old records."""
    serves: str = ""
    """Of a NAT instance: the subnet whose way out it is."""
    public_ipv4: str = ""
    """Of a NAT instance: the fixed address that goes with that way, if any."""


class DrainState(msgspec.Struct, frozen=True, kw_only=True):
    """On its way out, and what it is waiting for."""

    reason: str
    started_at_ns: int
    delete_at_ns: int
    """When it is deleted even without an acknowledgement."""
    acked_at_ns: int | None = None
    replace: bool = True
    """Whether another must exist before this one goes."""


class BalancerTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A place that a load balancer sends traffic to."""

    id: str
    target_port: int = 0
    proxy_port: int = 0


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """An instance behind a load balancer. Written before anyone is asked, so that it can be undone, and
    with the places themselves, so that it can be undone when the configuration no longer names them."""

    targets: tuple[BalancerTarget, ...]
    attached_at_ns: int | None = None
    detached_at_ns: int | None = None
    """When it was taken out; connections may still be ending."""


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What has happened to it so far."""

    provider_id: str = ""
    provider_status: str = ""
    nonce_id: str = ""
    nonce_issued_at_seconds: int = 0
    """With the id, enough to sign the very same nonce again: the provider may have to be asked twice."""
    nonce_digest: str = ""
    nonce_expires_at_ns: int = 0
    registered_at_ns: int | None = None
    key_digest: str = ""
    """SHA-256 of the public key it registered with, so that a retry can be told from a theft."""
    certificate_serial: str = ""
    certificate_expires_at_ns: int | None = None
    certificate_authority: str = ""
    """The key of the authority that signed it; empty in old records."""
    trust: str = ""
    """Which set of authorities its agent said that it trusts."""
    private_ipv4: str = ""
    private_ipv6: str = ""
    hostname: str = ""
    proven: tuple[str, ...] | None = None
    """Which of the three above the provider has said; the others are the agent's own word. None: it was not
    heard yet."""
    agent_version: str = ""
    unhealthy_since_ns: int | None = None
    drain: DrainState | None = None
    deleting_at_ns: int | None = None
    """When the provider was asked to delete it."""
    deleted_at_ns: int | None = None
    """When it was found gone; the record is purged some time later."""
    last_error: str = ""
    """What went wrong the last time something was tried with it; empty once that has worked."""
    balancers: dict[str, Attachment] = {}
    """Load balancers it is behind, by key."""
    routed_at_ns: int | None = None
    """Of a NAT instance: since when its subnet's way out leads through it."""


class GroupOverride(msgspec.Struct, frozen=True, kw_only=True):
    """What operators set at run time: a whole group of their own, or changes to a configured one."""

    template: str = ""
    size: int = 0
    instance_type: str = ""
    subnet_pool: str = ""
    vars: dict[str, str] = {}
    args: dict[str, str] = {}
    """For the provider, over those that are configured."""


class TenantSleep(msgspec.Struct, frozen=True, kw_only=True):
    asleep: bool = False
    wake_at_ns: int | None = None


class PublicKeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """The public half of a key pair that an agent made and keeps."""

    instance: str
    filename: str
    pem: str


class OperatorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An operator that has registered."""

    client: str
    key_digest: str
    certificate_serial: str
    registered_at_ns: int
    expires_at_ns: int
    authority: str = ""
    """The key of the authority that signed the certificate; empty in old records."""


class OperatorNonce(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a nonce that was issued to an operator; the nonce itself is not stored."""

    issued_by: str
    issued_at_ns: int
    expires_at_ns: int


class SecretRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a secret that lies sealed in the storage."""

    put_by: str
    put_at_ns: int
    size_bytes: int
    tenants: tuple[str, ...] = ()
    """Tenants whose instances may receive it, `*` for all; empty: whose template names it literally."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """One health report, in one form for all generations."""

    instance: str
    version: str = ""
    count: int = 0
    config_hash: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files on the instance: empty text for one that is well, else what is wrong with it."""
    issued: Mapping[str, int] = field(default_factory=dict)
    """When those of them that are certificates, and are well, were written, by the agent's clock."""
    termination_action: str = ""
    """Not empty: the provider announced that it will take the instance away."""
    termination_deadline_ns: int | None = None
    cpu_usage: float | None = None
    memory_usage: float | None = None
    conntrack_percent: float | None = None
    """How full the table of tracked connections is."""
    dropped_packets: int | None = None
    """Counted since the machine started, in both directions."""
    received_bytes: int | None = None
    sent_bytes: int | None = None
    """Counted since the machine started, of the interface that it watches."""
    connections: Mapping[int, int] = field(default_factory=dict)
    """TCP connections by target port."""


class HeardReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and when it came by the clock of the database."""

    at_ns: int
    report: HealthReport


class Complaint(msgspec.Struct, frozen=True, kw_only=True):
    """An error that operators of a tenant are told, and when it came last."""

    group: str
    instance: str
    text: str
    at_ns: int


class ImageFound(msgspec.Struct, frozen=True, kw_only=True):
    """What the provider said for the filters of an image."""

    id: str
    problem: str


class InForce(msgspec.Struct, frozen=True, kw_only=True):
    """The document that is in force, and what the storage said of it when it was read."""

    etag: str
    path: str = ""
    modified_at_ns: int = 0
    packed: bytes = b""
    """The document itself: what the storage has by now is perhaps another, and not in force."""


Instance = Resource[InstanceSpec, InstanceStatus]

INSTANCE: Kind[InstanceSpec, InstanceStatus] = Kind(
    name="instance", spec=InstanceSpec, status=InstanceStatus, is_secret=True
)
GROUP: Kind[GroupOverride, Nothing] = Kind(
    name="instance-group", spec=GroupOverride, status=Nothing, is_secret=True
)
TENANT: Kind[TenantSleep, Nothing] = Kind(name="instance-tenant", spec=TenantSleep, status=Nothing)
PUBLIC_KEY: Kind[PublicKeyFile, Nothing] = Kind(name="instance-key", spec=PublicKeyFile, status=Nothing)
OPERATOR: Kind[OperatorRecord, Nothing] = Kind(name="instance-operator", spec=OperatorRecord, status=Nothing)
NONCE: Kind[OperatorNonce, Nothing] = Kind(name="instance-nonce", spec=OperatorNonce, status=Nothing)
SECRET: Kind[SecretRecord, Nothing] = Kind(name="instance-secret", spec=SecretRecord, status=Nothing)

REPORT: Kind[HeardReport, Nothing] = Kind("instance-report", HeardReport, Nothing)
"""The last report of an instance, by its id, where servers share a database; on a file none is stored."""
IMAGE: Kind[ImageFound, Nothing] = Kind("instance-image", ImageFound, Nothing)
"""By a digest of the image's description, where servers share a database: one of them asks the provider, and
all make files."""
COMPLAINT: Kind[Complaint, Nothing] = Kind("instance-error", Complaint, Nothing)
"""By a digest of what it says, where servers share a database: all of them tell of it."""
CONFIGURATION: Kind[InForce, Nothing] = Kind("instance-configuration", InForce, Nothing, is_secret=True)
"""The document that is in force, by shard, where servers share a database."""

KINDS = (
    INSTANCE,
    GROUP,
    TENANT,
    PUBLIC_KEY,
    OPERATOR,
    NONCE,
    SECRET,
    REPORT,
    IMAGE,
    COMPLAINT,
    CONFIGURATION,
    OBJECT,
)
