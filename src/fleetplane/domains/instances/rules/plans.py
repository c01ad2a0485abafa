"""The words in which `rules` is asked and answers: facts in, a plan out. No decision is made here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers.contract import LoadBalancer

MISSED_REPORTS = 3
"""Reports that may fail to come before an instance counts as unhealthy."""


class State(StrEnum):
    PENDING = "pending"
    PROVISIONED = "provisioned"
    REGISTERED = "registered"
    DRAINING = "draining"
    DELETING = "deleting"
    DELETED = "deleted"


class RemovalCause(StrEnum):
    """Why an instance is removed; operators see it as the reason."""

    SPOT = "spot-terminating"
    UNHEALTHY = "unhealthy"
    FORCED_EXPIRY = "forced-expiry"
    ELIGIBLE_EXPIRY = "eligible-expiry"
    ON_DEMAND_EXPIRY = "on-demand-expiry"
    DRIFT = "config-drift"
    SCALE_DOWN = "scale-down"
    GROUP_DELETED = "group-deleted"
    PROVIDER_LOST = "provider-lost"
    NEVER_REGISTERED = "never-registered"
    REQUESTED = "requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPolicy:
    report_interval_seconds: float = 60.0
    registration_timeout_seconds: float = 300.0
    deleted_retention_seconds: float = 1800.0
    drain_timeout_seconds: float = 300.0
    drain_on_scale_down: bool = True
    eligible_age_seconds: float | None = None
    forced_age_seconds: float | None = None
    on_demand_age_seconds: float | None = None
    silence_share: float = 0.5
    """When more than this share of a group, or of a tenant, falls silent at once, none of them is drained.
    1 never holds anyone."""
    silence_window_seconds: float = 300.0
    """How far apart their last reports may lie to count as at once."""
    silence_hold_seconds: float = 900.0
    """How long they are all left alone; after that they go one at a time."""

    listening_since_ns: int = 0
    """The end of the server's own last gap: no silence counts from before it."""

    @property
    def unhealthy_after_seconds(self) -> float:
        return MISSED_REPORTS * self.report_interval_seconds

    @property
    def late_after_seconds(self) -> float:
        """One report short of unhealthy. Reports are spread over an interval: when the first of many
        that stopped together counts as unhealthy, the last of them is late already."""
        return (MISSED_REPORTS - 1) * self.report_interval_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolling:
    """What each place of a group is to have, by the hash of what instances are made with."""

    held: str
    """Of places that are not named."""
    moved: Mapping[str, str] = field(default_factory=dict)
    """Of places that a rollout has moved."""
    paced: bool = False
    """Whether a rollout is under way, which says how many places move at a time; else it is one."""
    unavailable: int = 0
    """How many places may be without an instance at work, because the old one does not wait for the new."""

    def wanted(self, place: str) -> str:
        """The hash that a place is to have."""
        return self.moved.get(place, self.held)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    key: str
    desired: int
    """How many there should be; 0 for a group that is gone or whose tenant sleeps."""
    exists: bool = True
    infra_hash: str | None = None
    drain_timeout_seconds: float | None = None
    """The group's own; None means the policy's, 0 means at once."""
    frozen: str = ""
    """Who froze automation here and why; empty without a freeze."""
    frozen_until_ns: int | None = None
    """When the freeze ends by itself, if it does."""
    rolling: Rolling | None = None
    """What each place is to have, while versions of the group are held; else drift is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """An instance and what was seen of it lately."""

    instance: Instance
    heard_at_ns: int | None = None
    """When its agent last reported, to this server's knowledge; the server's start at the earliest."""
    reported: bool = False
    """Its agent has reported to this server, since this server started."""
    lost: bool = False
    """The provider does not know it any more, or says that it is on its way out."""
    alive: bool = False
    """The provider has it although it was found gone before: its creation overtook its deletion."""
    spot_deadline_ns: int | None = None
    """A termination notice, and when it takes effect."""
    needed: str = ""
    """Why it must stay even when its drain is over; empty if it need not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Make one more instance for the group."""

    serves: str = ""
    """Of a NAT group: the subnet that it translates for."""
    instance_type: str = ""
    """Another than the group's."""
    public_ipv4: str = ""
    """Of a NAT group: the fixed address that goes with the subnet, if any."""
    place: str = ""
    """The place that it is to have, beside the one that has it; empty for one of its own."""
    replaces: str = ""
    """The instance that has the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provision:
    """Ask the provider for a recorded instance, again if need be: the same id never makes two."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainInstance:
    name: str
    cause: RemovalCause
    delete_at_ns: int
    replace: bool
    unhealthy_since_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteInstance:
    name: str
    cause: RemovalCause


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """Forget the record of an instance that is long gone."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkUnhealthy:
    """Write down since when it is unhealthy, or that it no longer is."""

    name: str
    unhealthy_since_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Put it behind a load balancer."""

    name: str
    balancer: LoadBalancer


@dataclass(frozen=True, slots=True, kw_only=True)
class Detach:
    """Take it from behind a load balancer."""

    name: str
    balancer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubnetRoute:
    """Lead a subnet's way out through this one, and no longer through `previous`."""

    name: str
    previous: str = ""


Action = (
    Create
    | Provision
    | DrainInstance
    | DeleteInstance
    | Purge
    | MarkUnhealthy
    | Attach
    | Detach
    | SubnetRoute
)


@dataclass(slots=True)
class GroupPlan:
    actions: list[Action] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Why nothing more is done now; shown by `explain`."""
    held: list[str] = field(default_factory=list)
    """Silent instances that stay because too many fell silent at once."""
    held_because: str = ""
    """Why they stay; it stands in `waiting` as well."""
    due_ns: int | None = None
    """When to look again even if nothing happens."""

    def look_again(self, at_ns: int) -> None:
        self.due_ns = at_ns if self.due_ns is None else min(self.due_ns, at_ns)


def state(instance: Instance) -> State:
    status = instance.status
    if status is None:
        return State.PENDING
    if status.deleted_at_ns is not None:
        return State.DELETED
    if status.deleting_at_ns is not None:
        return State.DELETING
    if status.drain is not None:
        return State.DRAINING
    if not status.provider_id:
        return State.PENDING
    return State.REGISTERED if status.registered_at_ns is not None else State.PROVISIONED
