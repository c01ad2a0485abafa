"""What people order of a rollout: pause, resume, approve, retry, skip, abort, undo, supersede. Pure.

Each takes where the rollout stands and gives where it stands then, with the records that differ; or raises
`FailedPrecondition` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import (
    ENDED,
    FORWARD,
    Approval,
    RolloutPhase,
    RolloutStanding,
    TargetRecord,
    TargetState,
    changed,
    counted,
)
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

P, T = RolloutPhase, TargetState
Targets = Mapping[str, TargetRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedChange:
    """What an order changes."""

    status: RolloutStanding
    changes: Targets = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOrder:
    """Who orders something, when and why."""

    actor: str
    now_ns: int
    reason: str = ""

    def enter(self, status: RolloutStanding, phase: RolloutPhase, default: str) -> RolloutStanding:
        """The status after a transition by this person."""
        return status.entered(phase, actor=self.actor, reason=self.reason or default, now_ns=self.now_ns)


def pause(status: RolloutStanding, order: RolloutOrder) -> OrderedChange:
    """Start nothing more until it is resumed; what is in flight ends."""
    if status.phase not in FORWARD | {P.ROLLING_BACK}:
        raise FailedPrecondition(f"a rollout that is {status.phase} cannot be paused")
    held = msgspec.structs.replace(status, resume_to=status.phase)
    return OrderedChange(status=order.enter(held, P.PAUSED, "paused"))


def resume(status: RolloutStanding, targets: Targets, order: RolloutOrder) -> OrderedChange:
    """Go on after a pause; or after a halt, in spite of what has failed until now."""
    if status.phase not in (P.PAUSED, P.HALTED):
        raise FailedPrecondition(f"a rollout that is {status.phase} cannot be resumed")
    goes_to = status.resume_to or P.WAITING
    changes: dict[str, TargetRecord] = {}
    if status.phase is P.HALTED:
        for name, record in targets.items():
            if record.state in (T.FAILED, T.NOT_DELIVERED) and not record.forgiven:
                changes[name] = msgspec.structs.replace(record, forgiven=True)
    after = order.enter(status, goes_to, "resumed")
    return OrderedChange(status=_fresh(after, order), changes=changes)


def _fresh(status: RolloutStanding, order: RolloutOrder) -> RolloutStanding:
    """A soak that goes on has its whole time again."""
    return msgspec.structs.replace(
        status, resume_to=None, halt=(), soak_since_ns=0, soak_started_at_ns=order.now_ns
    )


def approve(policy: Policy, status: RolloutStanding, wave: int, order: RolloutOrder) -> OrderedChange:
    """Let a wave start that needs an approval."""
    if status.phase in ENDED:
        raise FailedPrecondition(f"the rollout is {status.phase}")
    if wave not in policy.approvals:
        needed = ", ".join(map(str, policy.approvals)) or "none"
        raise InvalidArgument(f"wave {wave} needs no approval", field="wave", hint=f"those that do: {needed}")
    if wave in {one.wave for one in status.approvals}:
        return OrderedChange(status=status)
    given = Approval(wave=wave, actor=order.actor, at_ns=order.now_ns)
    return OrderedChange(status=msgspec.structs.replace(status, approvals=(*status.approvals, given)))


def retry(
    status: RolloutStanding, targets: Targets, names: Collection[str], order: RolloutOrder
) -> OrderedChange:
    """Ask targets that failed, or were not reached, once more; all of them if none are named."""
    if status.phase not in (P.HALTED, P.PAUSED, P.MOVING, P.SOAKING) or status.resume_to is P.ROLLING_BACK:
        raise FailedPrecondition(f"nothing is tried again in a rollout that is {status.phase}")
    again = _named(targets, names) or [
        name for name, one in targets.items() if one.state in (T.FAILED, T.NOT_DELIVERED)
    ]
    changes = {}
    for name in again:
        record = targets[name]
        if record.state not in (T.FAILED, T.NOT_DELIVERED):
            raise FailedPrecondition(f"target {name} has not failed, it is {record.state}")
        changes[name] = changed(
            record, T.PENDING, turn_at_ns=order.now_ns, forgiven=False, unhealthy_since_ns=0
        )
    if not changes:
        raise FailedPrecondition("no target has failed")
    if status.phase is P.PAUSED:
        if status.resume_to is P.SOAKING:
            status = msgspec.structs.replace(status, resume_to=P.MOVING)
        return _counted(status, targets, changes)
    if status.phase is not P.MOVING:
        status = _fresh(order.enter(status, P.MOVING, f"{len(changes)} targets are tried again"), order)
    return _counted(status, targets, changes)


def skip(
    status: RolloutStanding, targets: Targets, names: Collection[str], order: RolloutOrder
) -> OrderedChange:
    """Leave targets out: they are neither asked nor waited for, nor counted as failed."""
    if status.phase in ENDED:
        raise FailedPrecondition(f"the rollout is {status.phase}")
    if not names:
        raise InvalidArgument("name at least one target", field="targets")
    changes = {}
    for name in _named(targets, names):
        record = targets[name]
        if record.state not in (T.PENDING, T.MOVING, T.FAILED, T.NOT_DELIVERED):
            raise FailedPrecondition(f"target {name} cannot be skipped, it is {record.state}")
        changes[name] = changed(record, T.SKIPPED, error=order.reason or f"skipped by {order.actor}")
    return _counted(status, targets, changes)


def abort(status: RolloutStanding, order: RolloutOrder) -> OrderedChange:
    """End it: what is in flight ends, what has moved stays, the rest is never started."""
    if status.phase in ENDED or status.phase is P.ABORTING:
        raise FailedPrecondition(f"the rollout is {status.phase} already")
    return OrderedChange(status=order.enter(status, P.ABORTING, "aborted"))


def undo(status: RolloutStanding, order: RolloutOrder) -> OrderedChange:
    """Bring everything that has moved back to the version that it had."""
    if status.phase in (P.ROLLED_BACK, P.SUPERSEDED, P.ROLLING_BACK, P.ABORTING):
        raise FailedPrecondition(f"a rollout that is {status.phase} cannot be undone")
    after = order.enter(status, P.ROLLING_BACK, "undone")
    return OrderedChange(status=msgspec.structs.replace(after, resume_to=None))


def supersede(status: RolloutStanding, targets: Targets, order: RolloutOrder) -> OrderedChange:
    """End it in favour of a newer one, which takes all of its targets."""
    if status.phase in ENDED:
        return OrderedChange(status=status)
    changes = {}
    for name, record in targets.items():
        if record.state in (T.PENDING, T.MOVING, T.RETURNING):
            changes[name] = changed(record, T.SUPERSEDED)
    return _counted(order.enter(status, P.SUPERSEDED, "superseded"), targets, changes)


def _named(targets: Targets, names: Collection[str]) -> list[str]:
    for name in names:
        if name not in targets:
            raise NotFound(f"the rollout has no target {name[:100]!r}")
    return list(dict.fromkeys(names))


def _counted(status: RolloutStanding, targets: Targets, changes: Targets) -> OrderedChange:
    counts = counted({**targets, **changes}.values())
    return OrderedChange(status=msgspec.structs.replace(status, counts=counts), changes=changes)
