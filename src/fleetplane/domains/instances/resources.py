"""Groups and instances as objects of the resource API. Pure, but for what the running domain is asked.

Nothing that opens a door is shown: no nonce, no key, no value of a group's variables.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

from fleetplane.domains.instances import access
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.grpc.operator_groups import GroupChange
from fleetplane.domains.instances.kinds import (
    GROUP,
    INSTANCE,
    TENANT,
    GroupOverride,
    Instance,
    InstanceStatus,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.instances.live import observed
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.rest.views import MemberCounts, counts
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.fleet.figures import kept_figures, kept_history
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.acting import freeze_actions
from fleetplane.fleet.resources.common import as_stored, made_up
from fleetplane.fleet.resources.declaration import (
    READING,
    ActionCall,
    Begun,
    Column,
    ObjectState,
    ObservedPart,
    PublicResource,
    Related,
    ResourceAction,
    ResourceShape,
    ResourceVerb,
    ResourceView,
    Secret,
    ViewReader,
)
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import AnyKind, AnyResource, Kind, Nothing, Resource
from fleetplane.kernel.store import Store
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.times import spelled_or_null

SIZE_LIMIT = 100_000
"""Of one group; a tenant's quota is far below."""

# Instances.


class InstanceSpecView(ResourceShape, frozen=True):
    group: str
    template: str
    on_demand: bool
    """Made for a caller, not for the group's size."""
    arch: str
    instance_type: str
    subnet: str
    replaces: str
    """The instance whose place it takes."""
    provider: str


class InstanceStatusView(ResourceShape, frozen=True):
    state: str
    """`pending`, `provisioned`, `registered`, `draining`, `deleting` or `deleted`."""
    health: str
    """`starting`, `ok`, `unhealthy` or `gone`, by the record."""
    provider_id: str
    provider_status: str
    private_ipv4: str
    private_ipv6: str
    hostname: str
    agent_version: str
    registered_at: str | None
    certificate_expires_at: str | None
    drain_reason: str
    delete_at: str | None
    """When it is deleted even without an acknowledgement."""
    deleted_at: str | None
    last_error: str


def instance_view(
    found: Instance, _reading: ViewReader
) -> ResourceView[InstanceSpecView, InstanceStatusView]:
    """What is shown of an instance."""
    spec, status = found.spec, found.status or InstanceStatus()
    drain = status.drain
    return ResourceView(
        spec=InstanceSpecView(
            group=spec.group,
            template=spec.template,
            on_demand=spec.on_demand,
            arch=spec.arch,
            instance_type=spec.instance_type,
            subnet=spec.subnet,
            replaces=spec.replaces,
            provider=spec.provider,
        ),
        status=InstanceStatusView(
            state=rules.state(found),
            health=_health(status),
            provider_id=status.provider_id,
            provider_status=status.provider_status,
            private_ipv4=status.private_ipv4,
            private_ipv6=status.private_ipv6,
            hostname=status.hostname,
            agent_version=status.agent_version,
            registered_at=spelled_or_null(status.registered_at_ns),
            certificate_expires_at=spelled_or_null(status.certificate_expires_at_ns),
            drain_reason=drain.reason if drain is not None else "",
            delete_at=spelled_or_null(drain.delete_at_ns if drain is not None else None),
            deleted_at=spelled_or_null(status.deleted_at_ns),
            last_error=status.last_error,
        ),
    )


def _health(status: InstanceStatus) -> str:
    if status.deleting_at_ns is not None or status.deleted_at_ns is not None:
        return "gone"
    if status.unhealthy_since_ns is not None:
        return "unhealthy"
    return "starting" if status.registered_at_ns is None else "ok"


def instance_state(found: Instance) -> ObjectState:
    """Where in its life an instance is, or that it was put down as lost."""
    status = found.status or InstanceStatus()
    if _health(status) == "unhealthy":
        return ObjectState("unhealthy")
    return ObjectState(rules.state(found), status.drain.reason if status.drain is not None else "")


def instance_place(found: Instance, _reading: ViewReader) -> str:
    """In its group."""
    return scopes.below(scopes.tenant_path(tenant_of(found)), "groups", found.spec.group)


class DrainBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    timeout: str | None = None
    """After which it is deleted without having acknowledged; the group's own time if not given."""


async def _drain(call: ActionCall) -> Begun | None:
    timeout = call.body.timeout
    seconds = None if timeout is None else durations.parse_typed(timeout)
    await call.domain.drains.drain(call.stored, seconds=seconds, actor=call.actor)
    call.domain.look_at(tenant_of(call.stored), call.stored.spec.group)
    return None


INSTANCES = PublicResource(
    name="instance",
    plural="instances",
    short=("i",),
    summary="A machine of a group",
    kind=INSTANCE,
    spec=InstanceSpecView,
    status=InstanceStatusView,
    view=instance_view,
    state=instance_state,
    place=instance_place,
    permission=access.VIEW,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="GROUP", value=".spec.group"),
        Column(title="STATE", value=".status.state"),
        Column(title="HEALTH", value=".status.health"),
        Column(title="AGE", value=".metadata.createdAt", type="age"),
        Column(title="ADDRESS", value=".status.privateIpv4"),
        Column(title="HOSTNAME", value=".status.hostname", wide=True),
        Column(title="TEMPLATE", value=".spec.template", wide=True),
        Column(title="PROVIDER-ID", value=".status.providerId", wide=True),
        Column(title="ERROR", value=".status.lastError", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.LOGS, ResourceVerb.FIGURES, ResourceVerb.HISTORY},
    logs=observed.instance_logs,
    figures=kept_figures,
    history=kept_history,
    actions=(
        ResourceAction(
            name="drain",
            summary="Let it finish its work, then delete it; one that counts is replaced first",
            permission=access.AS_OPERATOR,
            run=_drain,
            body=DrainBody,
            anywhere=True,
        ),
    ),
    relates=(Related(resource="group", path=".spec.group"),),
    explain="instance",
    search=(".metadata.name", ".status.hostname", ".status.providerId", ".status.privateIpv4"),
)


# Groups: what the configuration says, with what operators set at run time.


class GroupSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    size: int
    """How many there should be."""
    template: str = ""
    """Of the configuration; needed for a group that is not configured."""
    instance_type: str = ""
    """The template's, unless given."""
    subnet_pool: str = ""
    """The template's, unless given."""
    vars: Mapping[str, str | Secret] = msgspec.field(default_factory=dict)
    """Values are written, and never shown. One that is not named stays; `{"set": false}` takes it away."""
    load_balancers: tuple[str, ...] = ()
    """As configured; written nowhere else."""


class GroupStatusView(ResourceShape, frozen=True):
    wanted: int
    """How many are wanted now: none while the tenant sleeps."""
    pending: int
    ready: int
    unhealthy: int
    """Of those that are ready."""
    draining: int
    deleting: int
    on_demand: int
    """Made for a caller and not for the size; in no other number."""
    configured: bool
    """Named in the configuration, and not only made at run time."""
    asleep: bool


GROUP_OF_API: Kind[GroupSpecView, GroupStatusView] = Kind(
    "instance-effective-group", GroupSpecView, GroupStatusView
)


class InstanceGroups(Protocol):
    """What of the running domain is needed to tell its groups."""

    @property
    def groups(self) -> Groups: ...

    @property
    def store(self) -> Store: ...


def groups(domain: InstanceGroups) -> Iterator[AnyResource]:
    """Every group that operators may know of, with how many instances it has."""
    members: dict[tuple[str, str], list[Instance]] = {}
    for found in domain.store.list(INSTANCE):
        members.setdefault((tenant_of(found), found.spec.group), []).append(found)
    for (tenant, key), view in domain.groups.views().items():
        if not view.group.is_nat:
            written = domain.store.get(GROUP, tenant_scope(tenant), key)
            yield group_object(domain.store, view.group, members.get((tenant, key), ()), written)


def groups_version(domain: InstanceGroups) -> Hashable:
    """Another one whenever a group may be another."""
    loaded = domain.groups.loaded
    kinds: tuple[AnyKind, ...] = (GROUP, INSTANCE, TENANT)
    return (loaded.etag if loaded is not None else "", *map(domain.store.kind_revision, kinds))


def group_object(
    store: Store,
    group: EffectiveGroup,
    members: Iterable[Instance],
    written: Resource[GroupOverride, Nothing] | None,
) -> AnyResource:
    """A group as an object: what is said of it together, with the counters of what people wrote."""
    scope = tenant_scope(group.tenant)
    sleep = store.get(TENANT, scope, group.tenant)
    asleep = sleep is not None and sleep.spec.asleep
    spec, status = group_parts(group, counts(members), asleep=asleep)
    made = made_up(GROUP_OF_API, group.key, spec=spec, status=status, scope=scope)
    if written is None:
        return made
    return msgspec.structs.replace(
        made,
        labels=written.labels,
        revision=written.revision,
        generation=written.generation + 1,  # one that is configured and not changed has the first
        created_at_ns=written.created_at_ns,
        updated_at_ns=written.updated_at_ns,
    )


def group_parts(
    found: EffectiveGroup, of: MemberCounts, *, asleep: bool
) -> tuple[GroupSpecView, GroupStatusView]:
    """What is shown of a group."""
    states = of.states
    return (
        GroupSpecView(
            size=found.size,
            template=found.template,
            instance_type=found.instance_type,
            subnet_pool=found.subnet_pool,
            vars={name: Secret(set=True) for name in found.vars},
            load_balancers=found.load_balancers,
        ),
        GroupStatusView(
            wanted=0 if asleep else found.size,
            pending=states[rules.State.PENDING] + states[rules.State.PROVISIONED],
            ready=states[rules.State.REGISTERED],
            unhealthy=of.unhealthy,
            draining=states[rules.State.DRAINING],
            deleting=states[rules.State.DELETING],
            on_demand=of.on_demand,
            configured=found.is_static,
            asleep=asleep,
        ),
    )


def group_place(stored: AnyResource, _reading: ViewReader) -> str:
    """At its tenant."""
    return scopes.of_stored(stored.scope)


def _ready(shown: Mapping[str, Any]) -> str:
    return f"{shown['status']['ready']}/{shown['status']['wanted']}"


class ScaleBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, rename="camel"):
    size: int


async def _scale(call: ActionCall) -> Begun | None:
    size = call.body.size
    if not 0 <= size <= SIZE_LIMIT:
        raise InvalidArgument(f"must be from 0 to {SIZE_LIMIT}, not {size}", field="size")
    tenant = call.stored.scope.removeprefix("tenant/")
    await call.domain.operator_groups.change(
        tenant, call.stored.name, GroupChange(size=size), actor=call.promise(lambda _: None)
    )
    call.domain.look_at(tenant, call.stored.name)
    return None


GROUPS = PublicResource(
    name="group",
    plural="groups",
    summary="Instances that are kept at a number",
    kind=GROUP_OF_API,
    spec=GroupSpecView,
    status=GroupStatusView,
    view=as_stored,
    place=group_place,
    permission=access.VIEW,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="READY", value=_ready),
        Column(title="PENDING", value=".status.pending", type="number"),
        Column(title="DRAINING", value=".status.draining", type="number"),
        Column(title="UNHEALTHY", value=".status.unhealthy", type="number"),
        Column(title="TEMPLATE", value=".spec.template"),
        Column(title="TYPE", value=".spec.instanceType", wide=True),
        Column(title="ASLEEP", value=".status.asleep", wide=True),
    ),
    verbs=READING | {ResourceVerb.EXPLAIN, ResourceVerb.LOGS},
    logs=observed.group_logs,
    actions=(
        ResourceAction(
            name="scale",
            summary="Set how many instances there should be",
            permission=access.AS_OPERATOR,
            run=_scale,
            body=ScaleBody,
            anywhere=True,
        ),
        *freeze_actions("instances", lambda group: f"{group.scope}/group/{group.name}"),
    ),
    explain="group",
    computed=groups,
    observed=ObservedPart(version=groups_version),
)
RESOURCES = (INSTANCES, GROUPS)
