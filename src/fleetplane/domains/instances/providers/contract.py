"""What Fleetplane asks of whatever makes machines, and in which words it answers.

A provider makes, lists and removes instances of one infrastructure. It decides nothing: how
many there should be, which one goes and when, is the reconciler's business. Three promises carry
everything else, and `conformance` tries each of them:

- **Creating is idempotent by instance id.** An answer can be lost, so the same request may
  come again, from this server or from its successor. It names the same machine and never makes
  a second one. The machine keeps what the *first* request gave it, its nonce included.
- **Ownership is recoverable from the provider alone.** Whoever knows cluster and shard can list
  every instance of theirs, with its instance id, tenant and group, even after our own records
  are gone.
- **Gone is said, never guessed.** `InstanceGone` means that the infrastructure answered and does
  not have it. A timeout or a refused connection is a `ProviderError`: nothing is known.

A `provider_id` may be empty in any call: the answer that would have named it was lost. The
instance is then found by its instance id.

`ids_after` serves providers that keep their own list of instances, sorted by id.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import msgspec

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, NotFound

PAGE_LIMIT_MIN = 5
PAGE_LIMIT_MAX = 1000
"""A page's bounds: what EC2 accepts. A provider may give fewer items than asked for, never more."""

OWN_TAGS = ("tenant", "group", "template", "kind")
"""Names that a provider fills in itself, from the request, in every instance's tags."""


class ProviderStatus(StrEnum):
    """What the infrastructure says of a machine; nothing about the agent in it."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    DELETING = "deleting"
    DELETED = "deleted"
    REPAIRING = "repairing"
    UNKNOWN = "unknown"

    @property
    def unhealthy(self) -> bool:
        """Whether the machine is of no more use. Not knowing is no reason to replace it."""
        return self not in (ProviderStatus.PENDING, ProviderStatus.RUNNING, ProviderStatus.UNKNOWN)


class ProviderError(FleetplaneError):
    """The infrastructure failed or did not answer: the same call may succeed later."""

    grpc_code = 14  # UNAVAILABLE
    http_status = 503
    reason = "PROVIDER_ERROR"
    retryable: ClassVar[bool] = True


class ProviderRefused(ProviderError):
    """The infrastructure understood and said no. Until someone changes something, it will again."""

    grpc_code = 9  # FAILED_PRECONDITION
    http_status = 409
    reason = "PROVIDER_REFUSED"
    retryable = False


class QuotaExhausted(ProviderError):
    """The account may have no more; someone must raise a limit or give something up."""

    grpc_code = 8  # RESOURCE_EXHAUSTED
    http_status = 429
    reason = "PROVIDER_QUOTA_EXHAUSTED"


class CapacityExhausted(QuotaExhausted):
    """The place has no more: this subnet, zone or type. Another may."""

    reason = "PROVIDER_CAPACITY_EXHAUSTED"


class InstanceGone(NotFound):
    """The infrastructure answered, and does not have this instance."""

    reason = "INSTANCE_GONE"


class CreateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one machine is made from."""

    cluster: str
    shard: str
    tenant: str = ""
    group: str = ""
    template: str = ""
    prefix: str = ""
    """Three letters: the template's kind."""
    instance_id: str
    instance_type: str = ""
    subnet: str = ""
    user_data: bytes = b""
    """Rendered; a machine's first boot script, with the nonce and the CA inside."""
    nonce: str = ""
    ca_certificate: str = ""
    """PEM. Together with the nonce it is for providers that place files instead of user data."""
    args: Mapping[str, object] = msgspec.field(default_factory=dict)
    """The template's own words to this provider; what it does not know it refuses."""
    tags: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The user's own; none may take a name of `OWN_TAGS`."""
    registration_address: str = ""
    agent_address: str = ""
    report_interval_seconds: float = 0.0
    """0: the provider's default."""

    def __repr__(self) -> str:
        # The nonce and the user data let their holder register: they stay out of logs.
        return f"<CreateRequest {self.instance_id} {self.cluster}/{self.shard} {self.tenant}/{self.group}>"

    def all_tags(self) -> dict[str, str]:
        """The user's tags and ours, by neutral names."""
        taken = sorted(set(self.tags) & set(OWN_TAGS))
        if taken:
            raise InvalidArgument(f"the tag {taken[0]!r} is set by the server", field=f"tags.{taken[0]}")
        own = {"tenant": self.tenant, "group": self.group, "template": self.template, "kind": self.prefix}
        return {**self.tags, **{name: value for name, value in own.items() if value}}


class Created(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a machine right after it was asked for."""

    instance_id: str
    provider_id: str
    status: ProviderStatus
    private_ipv4: str = ""
    private_ipv6: str = ""
    hostname: str = ""
    launched_at_ns: int = 0


class ObservedMachine(Created, frozen=True, kw_only=True):
    """What the infrastructure knows of a machine, and whose it is."""

    instance_type: str = ""
    region: str = ""
    zone: str = ""
    cluster: str = ""
    shard: str = ""
    tags: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The user's, and those of `OWN_TAGS`."""

    def as_created(self) -> Created:
        """The part that a creation answers with."""
        return Created(**{name: getattr(self, name) for name in Created.__struct_fields__})


class ProviderPage(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[ObservedMachine, ...]
    next_token: str = ""
    """Empty on the last page."""


class TargetGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Where a load balancer keeps its machines: an ARN, or the name of a network endpoint group."""

    id: str
    target_port: int = 0
    proxy_port: int = 0
    """Of the proxy that wakes a sleeping tenant."""


class LoadBalancer(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    target_groups: tuple[TargetGroup, ...] = ()


class BalancerTargetState(StrEnum):
    """The state of one machine in all target groups of one load balancer."""

    REGISTERED = "registered"
    PARTIALLY_REGISTERED = "partially_registered"
    HEALTHY = "healthy"
    DRAINING = "draining"
    DEREGISTERED = "deregistered"


class LeaderNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The address that follows whichever server leads."""

    ip: str
    interface_id: str = ""


class NatRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The way out of a subnet whose machines have no public address: through a machine of their tenant."""

    cluster: str
    """Whose the subnet's routes must be: those of anyone else are not touched."""
    tenant: str
    subnet: str
    provider_id: str
    previous_provider_id: str = ""
    """Through which it led before; a route through anything else is somebody's own."""
    destination: str = "0.0.0.0/0"
    public_ipv4: str = ""
    """The fixed address that goes with the way, if any."""
    allocation_id: str = ""


class ImageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which machine image is wanted, in the infrastructure's own words."""

    filters: Mapping[str, tuple[str, ...]]
    owners: tuple[str, ...] = ()
    sort: str = "creation-date"
    """Or `name`."""
    newest_first: bool = True
    """Of those that match the first is taken, in this order."""


class ProviderCapability(StrEnum):
    """What not every infrastructure has."""

    LOAD_BALANCERS = "load-balancers"
    LEADER_NETWORK = "leader-network"
    NAT_ROUTES = "nat-routes"
    IMAGES = "images"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A provider in a few words, for people who choose one."""

    name: str
    version: str
    summary: str
    options: Mapping[str, str]
    """Each option, and what it does."""
    args: Mapping[str, str] = field(default_factory=dict)
    """What a template may say in `args`."""
    capabilities: frozenset[ProviderCapability] = frozenset()
    durable: bool = True
    """Whether its instances, and its knowledge of them, outlive the server's process."""
    prompt: bool = False
    """Whether its lists show everything that was made before they began. Clouds take a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """What the server lends a provider."""

    clock: Clock
    state_directory: Path
    """The provider's own, below the server's data directory; it need not exist yet."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The server's environment, of which a provider may hand on what is harmless."""
    region: str = ""
    zone: str = ""
    command: tuple[str, ...] = ()
    """The program that a provider may run, from the server's settings alone; empty: the provider's own."""
    variables: frozenset[str] = frozenset()
    """Environment variables that a document may set for that program, beside those of `NSTANCE_`."""


@runtime_checkable
class Provider(Protocol):
    """One infrastructure. All methods may run concurrently, for different instances and the same."""

    kind: str

    def describe(self) -> Description: ...

    def configure(self, options: Mapping[str, object]) -> None:
        """Take the options. An unknown or misshapen one raises `SettingsError`. Touches nothing outside."""
        ...

    def validate(self) -> list[str]:
        """What stands in the way of starting, in sentences; empty if nothing. Makes no network call."""
        ...

    async def start(self) -> None:
        """Get ready, and put in order whatever an earlier process left half done."""
        ...

    async def close(self) -> None: ...

    async def create_instance(self, request: CreateRequest) -> Created: ...

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        """Ask for it to go. Raises `InstanceGone` if it already has."""
        ...

    async def get_instance_status(self, instance_id: str, provider_id: str) -> ObservedMachine:
        """Raises `InstanceGone`. One that was deleted may be seen as `deleted` for a while."""
        ...

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        """Those of this owner that are not gone. One made while paging may be missed, none comes twice."""
        ...

    async def check_subnet_capacity(self, subnet: str) -> bool: ...

    async def register_with_lb(
        self, provider_id: str, balancer: LoadBalancer, *, zone: str = "", wake_proxy: bool = False
    ) -> None: ...

    async def deregister_from_lb(
        self, provider_id: str, balancer: LoadBalancer, *, zone: str = "", wake_proxy: bool = False
    ) -> None:
        """Idempotent: a target that is not there is fine."""
        ...

    async def get_lb_target_state(
        self, provider_id: str, balancer: LoadBalancer, *, zone: str = "", wake_proxy: bool = False
    ) -> BalancerTargetState: ...

    async def list_lb_instances(self, balancer: LoadBalancer, *, zone: str = "") -> tuple[str, ...]: ...

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None: ...

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None: ...

    async def ensure_nat_route(self, route: NatRoute) -> None:
        """Idempotent. Refuses to change a route that is neither its own nor through the one before."""
        ...

    async def remove_nat_route(self, route: NatRoute) -> None:
        """Idempotent; a route that leads elsewhere by now stays."""
        ...

    async def find_image(self, query: ImageQuery) -> str:
        """The id of the image; empty if none matches."""
        ...

    def is_spot(self, args: Mapping[str, object]) -> bool:
        """Whether a machine with these arguments may be taken away at short notice."""
        ...


def ids_after(ids: Sequence[str], token: str, limit: int) -> tuple[Sequence[str], str]:
    """The page of sorted `ids` that follows `token`, and the token of the next one.

    A token is the last id of its page, so that neither a deletion nor a creation in between
    moves the others: none is given twice and none that stays is skipped.
    """
    limit = max(1, min(limit, PAGE_LIMIT_MAX))
    start = bisect_right(ids, token) if token else 0
    page = ids[start : start + limit]
    return page, page[-1] if start + limit < len(ids) else ""
