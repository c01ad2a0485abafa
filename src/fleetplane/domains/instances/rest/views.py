"""What the web shows of groups, instances, errors and explanations. Pure.

Nothing that opens a door is shown: no nonce, no key, no variable of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.kinds import Instance, InstanceStatus, tenant_of
from fleetplane.domains.instances.live.errors import Trouble
from fleetplane.domains.instances.records.reports import ReceivedReport
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.fleet.explain import ShownFinding
from fleetplane.kernel.freeze import Freeze
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.pages import CursorPage


class Health(StrEnum):
    """How an instance is, in one word."""

    STARTING = "starting"
    HEALTHY = "healthy"
    FAILING = "failing"
    """It reports, and says that something is wrong with its files."""
    SILENT = "silent"
    """It should have reported by now."""
    UNHEALTHY = "unhealthy"
    """It was silent for so long that it was put down as lost."""
    GONE = "gone"


class ShownFreeze(msgspec.Struct, frozen=True, kw_only=True):
    scope: str
    reason: str
    actor: str
    since: str
    until: str | None


class ShownGroup(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tenant: str
    template: str
    instance_type: str
    size: int
    """How many there should be."""
    wanted: int
    """How many are wanted now: none while the tenant sleeps."""
    pending: int
    """Asked for, or there without their agent having come."""
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
    frozen: ShownFreeze | None


class ShownInstance(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    group: str
    state: rules.State
    health: Health
    on_demand: bool
    template: str
    provider_id: str
    provider_status: str
    created_at: str
    registered_at: str | None
    last_seen: str | None
    hostname: str
    agent_version: str
    reason: str
    """Why it goes; empty while it stays."""
    delete_at: str | None
    """When it is deleted even without an acknowledgement."""
    deleted_at: str | None
    replaces: str
    last_error: str


class InstanceDetail(ShownInstance, frozen=True, kw_only=True):
    """With what its agent said last."""

    private_ipv4: str
    private_ipv6: str
    certificate_expires_at: str | None
    file_errors: dict[str, str]
    cpu_usage: float | None
    memory_usage: float | None


class ShownError(msgspec.Struct, frozen=True, kw_only=True):
    group: str
    instance: str
    """Empty if it concerns the whole group."""
    error: str
    at: str


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    group: str
    findings: Sequence[ShownFinding]


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[ShownGroup]


class InstancePage(CursorPage[ShownInstance], frozen=True, kw_only=True):
    """Instances, oldest first."""


class ErrorList(msgspec.Struct, frozen=True, kw_only=True):
    items: Sequence[ShownError]


class MemberCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The members of one group, by what they are doing."""

    states: Counter[rules.State]
    unhealthy: int = 0
    on_demand: int = 0


def counts(members: Iterable[Instance]) -> MemberCounts:
    states: Counter[rules.State] = Counter()
    unhealthy = on_demand = 0
    for member in members:
        state = rules.state(member)
        if member.spec.on_demand:
            on_demand += state is not rules.State.DELETED
            continue
        states[state] += 1
        marked = member.status is not None and member.status.unhealthy_since_ns is not None
        unhealthy += marked and state is rules.State.REGISTERED
    return MemberCounts(states=states, unhealthy=unhealthy, on_demand=on_demand)


def group(found: EffectiveGroup, of: MemberCounts, *, asleep: bool, frozen: Freeze | None) -> ShownGroup:
    states = of.states
    return ShownGroup(
        name=found.key,
        tenant=found.tenant,
        template=found.template,
        instance_type=found.instance_type,
        size=found.size,
        wanted=0 if asleep else found.size,
        pending=states[rules.State.PENDING] + states[rules.State.PROVISIONED],
        ready=states[rules.State.REGISTERED],
        unhealthy=of.unhealthy,
        draining=states[rules.State.DRAINING],
        deleting=states[rules.State.DELETING],
        on_demand=of.on_demand,
        configured=found.is_static,
        asleep=asleep,
        frozen=None if frozen is None else _freeze(frozen),
    )


def _freeze(found: Freeze) -> ShownFreeze:
    spec = found.spec
    return ShownFreeze(
        scope=found.scope,
        reason=spec.reason,
        actor=spec.actor,
        since=spelled(spec.frozen_at_ns),
        until=spelled_or_null(spec.expires_at_ns),
    )


def health(
    instance: Instance, heard: ReceivedReport | None, *, heard_at_ns: int | None, silent_before_ns: int
) -> Health:
    """`heard_at_ns` is when it last gave a sign; earlier than `silent_before_ns` is too long ago."""
    status = instance.status or InstanceStatus()
    if status.deleting_at_ns is not None or status.deleted_at_ns is not None:
        return Health.GONE
    if status.unhealthy_since_ns is not None:
        return Health.UNHEALTHY
    if status.registered_at_ns is None or heard_at_ns is None:
        return Health.STARTING
    if heard_at_ns < silent_before_ns:
        return Health.SILENT
    if heard is not None and any(heard.report.files.values()):
        return Health.FAILING
    return Health.HEALTHY


def instance(found: Instance, word: Health, heard: ReceivedReport | None) -> ShownInstance:
    spec, status = found.spec, found.status or InstanceStatus()
    drain = status.drain
    return ShownInstance(
        id=found.name,
        tenant=tenant_of(found),
        group=spec.group,
        state=rules.state(found),
        health=word,
        on_demand=spec.on_demand,
        template=spec.template,
        provider_id=status.provider_id,
        provider_status=status.provider_status,
        created_at=spelled(found.created_at_ns),
        registered_at=spelled_or_null(status.registered_at_ns),
        last_seen=spelled_or_null(heard.at_ns if heard is not None else None),
        hostname=status.hostname,
        agent_version=status.agent_version,
        reason=drain.reason if drain is not None else "",
        delete_at=spelled_or_null(drain.delete_at_ns if drain is not None else None),
        deleted_at=spelled_or_null(status.deleted_at_ns),
        replaces=spec.replaces,
        last_error=status.last_error,
    )


def detail(found: Instance, word: Health, heard: ReceivedReport | None) -> InstanceDetail:
    status = found.status or InstanceStatus()
    report = heard.report if heard is not None else None
    errors = {name: text for name, text in report.files.items() if text} if report is not None else {}
    return InstanceDetail(
        **msgspec.structs.asdict(instance(found, word, heard)),
        private_ipv4=status.private_ipv4,
        private_ipv6=status.private_ipv6,
        certificate_expires_at=spelled_or_null(status.certificate_expires_at_ns),
        file_errors=errors,
        cpu_usage=report.cpu_usage if report is not None else None,
        memory_usage=report.memory_usage if report is not None else None,
    )


def error(trouble: Trouble) -> ShownError:
    return ShownError(
        group=trouble.group, instance=trouble.instance, error=trouble.text, at=spelled(trouble.at_ns)
    )
