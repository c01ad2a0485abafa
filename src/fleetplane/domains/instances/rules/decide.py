"""What a group of instances needs next. Pure: facts and the time in, a plan out.

Level-triggered: every pass looks at all that is and says what should be done now, so a lost
event or a crash between two steps costs a pass, never a step. An instance's state is read off
its record:

| state        | because                                               |
|--------------|-------------------------------------------------------|
| pending      | recorded, not yet known to the provider               |
| provisioned  | the provider has it, its agent has not registered     |
| registered   | its agent has a certificate                           |
| draining     | told to go; waits for an acknowledgement or its time  |
| deleting     | the provider was asked to delete it                   |
| deleted      | gone; the record is kept a while                      |

Order of business in a pass, strongest first: finish what is being deleted, drop what is gone
or never came, end drains that are over, then drain what must go (spot, unhealthy, expired,
drifted, surplus), and only then create what is missing. A pass never deletes what it has not
drained, unless the provider itself lost it or somebody asked for just that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.rules import replacing, silence
from fleetplane.domains.instances.rules.plans import (
    MISSED_REPORTS,
    Action,
    Create,
    DeleteInstance,
    DrainInstance,
    GroupFacts,
    GroupMember,
    GroupPlan,
    GroupPolicy,
    MarkUnhealthy,
    Provision,
    Purge,
    RemovalCause,
    State,
    state,
)
from fleetplane.domains.instances.rules.silence import CrowdSilence
from fleetplane.kernel.values.times import NS

__all__ = [
    "MISSED_REPORTS",
    "Action",
    "Create",
    "DeleteInstance",
    "DrainInstance",
    "GroupFacts",
    "GroupMember",
    "GroupPlan",
    "GroupPolicy",
    "MarkUnhealthy",
    "Provision",
    "Purge",
    "RemovalCause",
    "State",
    "decide",
    "state",
]


def decide(
    group: GroupFacts,
    members: Sequence[GroupMember],
    policy: GroupPolicy,
    *,
    now_ns: int,
    tenant: Callable[[], CrowdSilence] = CrowdSilence,
) -> GroupPlan:
    """The whole pass over one group. `tenant` tells how many of all the tenant's instances are silent; it
    is asked only when it matters, because it means looking at everyone."""
    plan = GroupPlan()
    if group.frozen:
        _frozen(group, members, plan)
        return plan
    members = sorted(members, key=lambda member: (member.instance.created_at_ns, member.instance.name))
    going = {_name(action) for action in _departures(group, members, plan, policy, now_ns)}
    staying = [member for member in members if member.instance.name not in going]
    leaving = {_name(drain) for drain in _drains(group, staying, plan, policy, now_ns, tenant)}
    serving = [member for member in staying if member.instance.name not in leaving]
    _growth(group, serving, staying, plan)
    if group.rolling is not None and group.exists and group.desired:
        plan.actions.extend(replacing.replacements(group.rolling, serving))
    return plan


def _frozen(group: GroupFacts, members: Sequence[GroupMember], plan: GroupPlan) -> None:
    """The plan of a frozen group: nothing automatic; explicit requests are finished."""
    plan.waiting.append(f"automation is frozen: {group.frozen}")
    if group.frozen_until_ns is not None:
        plan.look_again(group.frozen_until_ns)
    for member in members:
        if state(member.instance) is State.DELETING and _cause(member.instance) is RemovalCause.REQUESTED:
            plan.actions.append(DeleteInstance(name=member.instance.name, cause=RemovalCause.REQUESTED))


def _name(action: Action) -> str:
    return "" if isinstance(action, Create) else action.name


# What ends now.


def _departures(
    group: GroupFacts, members: Sequence[GroupMember], plan: GroupPlan, policy: GroupPolicy, now_ns: int
) -> Iterator[Action]:
    staying: list[GroupMember] = []
    for member in members:
        action = _departure(member, plan, policy, now_ns)
        if action is not None:
            plan.actions.append(action)
            yield action
        elif state(member.instance) in (State.DELETED, State.DELETING):
            yield Purge(name=member.instance.name)  # takes no part in what follows
        else:
            staying.append(member)
    yield from _overstayed(group, staying, plan, now_ns)


def _overstayed(
    group: GroupFacts, staying: Sequence[GroupMember], plan: GroupPlan, now_ns: int
) -> Iterator[Action]:
    """Drains whose time is up although nobody acknowledged: they go once others can take their place.

    An instance that is due for replacement still works. If nothing can be made, because of a quota
    for example, it is kept rather than lost as well.
    """
    waiting = replacing.beside(staying)
    standing = [
        member
        for member in staying
        if not member.instance.spec.on_demand
        and state(member.instance) is not State.PENDING
        and member.instance.name not in waiting
    ]
    spare = len(standing) - group.desired
    for member in standing:
        if not _is_over(member.instance, now_ns):
            continue
        if member.needed:
            continue
        if spare > 0:
            spare -= 1
            action = DeleteInstance(name=member.instance.name, cause=_cause(member.instance))
            plan.actions.append(action)
            yield action
        else:
            plan.waiting.append(f"{member.instance.name} is drained and stays until its replacement exists")


def _departure(member: GroupMember, plan: GroupPlan, policy: GroupPolicy, now_ns: int) -> Action | None:
    instance, status = member.instance, member.instance.status
    name = instance.name
    match state(instance):
        case State.DELETED:
            assert status is not None
            assert status.deleted_at_ns is not None
            if member.alive:
                return DeleteInstance(name=name, cause=_cause(instance))
            end_ns = status.deleted_at_ns + _ns(policy.deleted_retention_seconds)
            plan.look_again(end_ns)
            return Purge(name=name) if now_ns >= end_ns else None
        case State.DELETING:
            return DeleteInstance(name=name, cause=_cause(instance))
        case State.PENDING | State.PROVISIONED if _overdue(instance, policy, now_ns):
            return DeleteInstance(name=name, cause=RemovalCause.NEVER_REGISTERED)
        case _ if member.lost and state(instance) is not State.PENDING:
            return DeleteInstance(name=name, cause=RemovalCause.PROVIDER_LOST)
        case State.DRAINING:
            return _end_of_drain(member, plan, now_ns)
        case State.PENDING | State.PROVISIONED:
            plan.look_again(_registered_by_ns(instance, policy))
    return None


def _registered_by_ns(instance: Instance, policy: GroupPolicy) -> int:
    """Until when its agent may register; nobody could while the server itself was away."""
    since_ns = max(instance.created_at_ns, policy.listening_since_ns)
    return since_ns + _ns(policy.registration_timeout_seconds)


def _overdue(instance: Instance, policy: GroupPolicy, now_ns: int) -> bool:
    if instance.status is not None and instance.status.registered_at_ns is not None:
        return False
    return now_ns >= _registered_by_ns(instance, policy)


def _end_of_drain(member: GroupMember, plan: GroupPlan, now_ns: int) -> Action | None:
    name, status = member.instance.name, member.instance.status
    assert status is not None
    drain = status.drain
    assert drain is not None
    if member.needed:
        plan.waiting.append(f"{name} drains ({drain.reason}) and stays: {member.needed}")
        return None
    waits_for_another = (
        drain.replace and not member.instance.spec.on_demand and drain.reason != RemovalCause.SPOT
    )
    if drain.acked_at_ns is not None or (_is_over(member.instance, now_ns) and not waits_for_another):
        return DeleteInstance(name=name, cause=RemovalCause(drain.reason))
    if _is_over(member.instance, now_ns):
        return None
    plan.look_again(drain.delete_at_ns)
    plan.waiting.append(
        f"{name} drains ({drain.reason}): no acknowledgement yet, {_in(drain.delete_at_ns, now_ns)} left"
    )
    return None


def _is_over(instance: Instance, now_ns: int) -> bool:
    """Whether the time of its drain, if it drains, is up."""
    drain = instance.status.drain if instance.status is not None else None
    return drain is not None and now_ns >= drain.delete_at_ns


def _cause(instance: Instance) -> RemovalCause:
    drain = instance.status.drain if instance.status is not None else None
    return RemovalCause(drain.reason) if drain is not None else RemovalCause.REQUESTED


# What should go.


def _drains(
    group: GroupFacts,
    members: Sequence[GroupMember],
    plan: GroupPlan,
    policy: GroupPolicy,
    now_ns: int,
    tenant: Callable[[], CrowdSilence],
) -> Iterator[DrainInstance]:
    draining = any(state(member.instance) is State.DRAINING for member in members)
    candidates = [member for member in members if state(member.instance) is not State.DRAINING]
    unheard = silence.choose(candidates, members, plan, policy, now_ns, tenant, draining=draining)
    chosen = {member.instance.name: (member, RemovalCause.UNHEALTHY) for member in unheard}
    for member in candidates:
        cause = _urgent(member, plan, policy, now_ns)
        if cause is not None and member.instance.name not in chosen:
            chosen[member.instance.name] = (member, cause)
    waiting = replacing.beside(member for member in candidates if member.instance.name not in chosen)
    present = [
        member
        for member in candidates
        if member.instance.name not in chosen and (member.instance.name not in waiting or not group.exists)
    ]
    for member, cause in _surplus(group, present):
        chosen[member.instance.name] = (member, cause)
    managed = [
        member
        for member in present
        if not member.instance.spec.on_demand and member.instance.name not in chosen
    ]
    renewal = _renewal(group, managed, plan, policy, now_ns, busy=draining or bool(chosen))
    if renewal is not None:
        chosen[renewal[0].instance.name] = renewal
    for member, cause in chosen.values():
        yield _drain(group, member, cause, plan, policy, now_ns)
    left = [member for member in candidates if member.instance.name not in chosen]
    if group.rolling is not None:
        for member, needs_another in replacing.relieved(group.rolling, left, policy, now_ns):
            yield _drain(group, member, RemovalCause.DRIFT, plan, policy, now_ns, replace=needs_another)
    elif waiting:  # nothing is rolled out any more: those who waited are surplus
        yield from (
            _drain(group, member, RemovalCause.SCALE_DOWN, plan, policy, now_ns)
            for member in left
            if member.instance.name in waiting
        )


def _urgent(member: GroupMember, plan: GroupPlan, policy: GroupPolicy, now_ns: int) -> RemovalCause | None:
    """Goes whatever else is going on: it is ending, or has outlived its purpose."""
    if member.spot_deadline_ns is not None:
        return RemovalCause.SPOT
    instance = member.instance
    if instance.spec.on_demand and policy.on_demand_age_seconds is not None:
        end_ns = instance.created_at_ns + _ns(policy.on_demand_age_seconds)
        if now_ns >= end_ns:
            return RemovalCause.ON_DEMAND_EXPIRY
        plan.look_again(end_ns)
    return None


def _surplus(group: GroupFacts, present: Sequence[GroupMember]) -> Iterator[tuple[GroupMember, RemovalCause]]:
    """First what does not exist yet, then the oldest. Of a group that is gone everything goes."""
    if not group.exists:
        yield from ((member, RemovalCause.GROUP_DELETED) for member in present)
        return
    managed = [member for member in present if not member.instance.spec.on_demand]
    managed.sort(key=lambda member: state(member.instance) is not State.PENDING)
    for member in managed[: max(0, len(managed) - group.desired)]:
        yield member, RemovalCause.SCALE_DOWN


def _renewal(
    group: GroupFacts,
    managed: Sequence[GroupMember],
    plan: GroupPlan,
    policy: GroupPolicy,
    now_ns: int,
    *,
    busy: bool,
) -> tuple[GroupMember, RemovalCause] | None:
    """At most one a pass, oldest first: too old, then drifted, then merely old enough."""
    for seconds, cause, patient in (
        (policy.forced_age_seconds, RemovalCause.FORCED_EXPIRY, False),
        (None, RemovalCause.DRIFT, True),
        (policy.eligible_age_seconds, RemovalCause.ELIGIBLE_EXPIRY, True),
    ):
        for member in managed:
            if cause is RemovalCause.DRIFT:
                due = group.infra_hash is not None and member.instance.spec.infra_hash != group.infra_hash
            elif seconds is None:
                break
            else:
                due_ns = member.instance.created_at_ns + _ns(seconds)
                due = now_ns >= due_ns
                if not due:
                    plan.look_again(due_ns + NS)
                    break  # the others are younger
            if due and patient and busy:
                plan.waiting.append(f"{member.instance.name} is due ({cause}), but others are going first")
                break
            if due:
                return member, cause
    return None


def _drain(
    group: GroupFacts,
    member: GroupMember,
    cause: RemovalCause,
    plan: GroupPlan,
    policy: GroupPolicy,
    now_ns: int,
    *,
    replace: bool = True,
) -> DrainInstance:
    own = group.drain_timeout_seconds
    seconds = policy.drain_timeout_seconds if own is None else own
    if not _registered(member.instance) or (
        cause is RemovalCause.SCALE_DOWN and not policy.drain_on_scale_down
    ):
        seconds = 0.0  # nobody works on it yet, or nobody is to be asked
    delete_at_ns = now_ns + _ns(seconds)
    if member.spot_deadline_ns is not None and _registered(member.instance):
        # The cloud takes it at that time whatever we do: until then it may finish its work.
        delete_at_ns = max(now_ns, member.spot_deadline_ns)
    if member.instance.spec.on_demand or cause in (RemovalCause.SCALE_DOWN, RemovalCause.GROUP_DELETED):
        replace = False
    drain = DrainInstance(
        name=member.instance.name,
        cause=cause,
        delete_at_ns=delete_at_ns,
        replace=replace,
        unhealthy_since_ns=silence.since_ns(member, policy) if cause is RemovalCause.UNHEALTHY else None,
    )
    plan.actions.append(drain)
    plan.look_again(delete_at_ns)
    return drain


def _registered(instance: Instance) -> bool:
    return instance.status is not None and instance.status.registered_at_ns is not None


def _nameless(instance: Instance) -> bool:
    """An instance that drains with notice although its provider id, which the notice needs, is unknown."""
    status = instance.status
    return state(instance) is State.DRAINING and _registered(instance) and not (status and status.provider_id)


# What is missing.


def _growth(
    group: GroupFacts, serving: Sequence[GroupMember], present: Sequence[GroupMember], plan: GroupPlan
) -> None:
    """Up to the desired size, with at most one more than that while others are leaving."""
    for member in serving:
        if state(member.instance) is State.PENDING or _nameless(member.instance):
            plan.actions.append(Provision(name=member.instance.name))
    waiting, replaced = replacing.beside(serving), replacing.replaced(present)
    managed = [
        member
        for member in serving
        if not member.instance.spec.on_demand and member.instance.name not in waiting
    ]
    active = [member for member in managed if state(member.instance) is not State.DRAINING]
    missing = group.desired - len(active)
    if missing <= 0:
        return
    outside = waiting | replaced
    here = [member for member in present if member.instance.name not in outside]
    leaving = sum(not member.instance.spec.on_demand for member in here) - len(active)
    room = group.desired + 1 - len(active) - leaving if leaving else missing
    if room < missing:
        plan.waiting.append(
            f"{missing} missing, {leaving} still leaving: one above the size of {group.desired} at most"
        )
    plan.actions.extend(Create() for _ in range(min(missing, max(0, room))))


def _ns(seconds: float) -> int:
    return round(seconds * NS)


def _in(then_ns: int, now_ns: int) -> str:
    return f"{max(0, then_ns - now_ns) / NS:.0f} s"
