"""Whether silence is theirs or ours: a brake for when many instances fall silent at once. Pure.

One machine of several that no longer reports has probably failed. When most of a group, or of a tenant, stop
reporting within minutes of each other, the network, a certificate or this server has failed, and
draining them all would turn a fault in watching into an outage. So they are left alone for a while,
loudly; if the silence lasts, they are replaced one at a time. What the provider itself says is gone is
replaced regardless: that is an answer, not silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fleetplane.domains.instances.rules.plans import (
    GroupMember,
    GroupPlan,
    GroupPolicy,
    MarkUnhealthy,
    RemovalCause,
    State,
    state,
)
from fleetplane.kernel.values.times import NS


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdSilence:
    """How quiet a crowd of instances is."""

    registered: int = 0
    silent: int = 0
    """Late with their reports, and within the window of the last of them."""
    last_heard_ns: int = 0
    """When the last of those reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Brake:
    why: str
    until_ns: int
    holds: bool
    """No instance is removed; when the brake has held long enough, one at a time may be."""


def choose(
    candidates: Sequence[GroupMember],
    members: Sequence[GroupMember],
    plan: GroupPlan,
    policy: GroupPolicy,
    now_ns: int,
    tenant: Callable[[], CrowdSilence],
    *,
    draining: bool,
) -> list[GroupMember]:
    """Those that go because they no longer report; none, or one, if that is true of too many at once."""
    unheard: list[GroupMember] = []
    for member in candidates:
        silent_at_ns = since_ns(member, policy)
        spot = member.spot_deadline_ns is not None  # goes for that reason
        if state(member.instance) is not State.REGISTERED or silent_at_ns is None or spot:
            continue
        if now_ns >= silent_at_ns:
            unheard.append(member)
            continue
        plan.look_again(silent_at_ns)
        if member.reported and _marked(member):
            plan.actions.append(MarkUnhealthy(name=member.instance.name, unhealthy_since_ns=None))
    found = brake(among(members, policy, now_ns), tenant, policy, now_ns=now_ns) if unheard else None
    if found is None:
        return unheard
    going = 0 if found.holds or draining else 1
    _hold(unheard[going:], found, plan, policy)
    return unheard[:going]


def _hold(kept: Sequence[GroupMember], brake: Brake, plan: GroupPlan, policy: GroupPolicy) -> None:
    plan.waiting.append(brake.why)
    plan.held_because = brake.why
    plan.held += [member.instance.name for member in kept]
    if brake.holds:
        plan.look_again(brake.until_ns)
    plan.actions += [
        MarkUnhealthy(name=member.instance.name, unhealthy_since_ns=since_ns(member, policy))
        for member in kept
        if not _marked(member)
    ]


def since_ns(member: GroupMember, policy: GroupPolicy) -> int | None:
    """When its silence begins to count as ill health."""
    if member.heard_at_ns is None:
        return None
    return _fair_ns(member.heard_at_ns, policy) + round(policy.unhealthy_after_seconds * NS)


def _fair_ns(heard_at_ns: int, policy: GroupPolicy) -> int:
    """From when a silence counts: not from before the end of the server's own last gap."""
    return max(heard_at_ns, policy.listening_since_ns)


def _marked(member: GroupMember) -> bool:
    status = member.instance.status
    return status is not None and status.unhealthy_since_ns is not None


def among(members: Iterable[GroupMember], policy: GroupPolicy, now_ns: int) -> CrowdSilence:
    """The silent ones among instances that should report, including those being removed for it."""
    present = [member for member in members if _should_report(member)]
    late_ns = round(policy.late_after_seconds * NS)
    late = [
        heard_ns
        for member in present
        if member.heard_at_ns is not None
        and now_ns >= (heard_ns := _fair_ns(member.heard_at_ns, policy)) + late_ns
    ]
    last_ns = max(late, default=0)
    window_ns = round(policy.silence_window_seconds * NS)
    together = sum(heard_ns >= last_ns - window_ns for heard_ns in late)
    return CrowdSilence(registered=len(present), silent=together, last_heard_ns=last_ns)


def _should_report(member: GroupMember) -> bool:
    match state(member.instance):
        case State.REGISTERED:
            return True
        case State.DRAINING:
            status = member.instance.status
            return (
                status is not None
                and status.drain is not None
                and status.drain.reason == RemovalCause.UNHEALTHY
            )
    return False


def brake(
    group: CrowdSilence, tenant: Callable[[], CrowdSilence], policy: GroupPolicy, *, now_ns: int
) -> Brake | None:
    """Why the silent ones stay, if they do."""
    of, found = "this group", group
    if not _too_many(found, policy):
        of, found = "this tenant", tenant()
    if not _too_many(found, policy):
        return None
    until_ns = found.last_heard_ns + round(
        (policy.unhealthy_after_seconds + policy.silence_hold_seconds) * NS
    )
    holds = now_ns < until_ns
    then = "they are left alone for now" if holds else "they are replaced one at a time"
    why = f"{found.silent} of {found.registered} instances of {of} fell silent together: {then}"
    return Brake(why=why, until_ns=until_ns, holds=holds)


def _too_many(crowd: CrowdSilence, policy: GroupPolicy) -> bool:
    """Also of one and of two: a fault in watching silences small groups as surely as large ones, and an
    instance that is well costs more to lose than one that has failed costs to keep for a while."""
    return crowd.silent > policy.silence_share * crowd.registered
