"""Rollouts and their policies as callers see them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from fleetplane.fleet.rollouts.gates import Planned
from fleetplane.fleet.rollouts.records import (
    Rollout,
    RolloutPolicy,
    RolloutTarget,
    VersionedSubject,
    status_of,
)
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.fleet.rollouts.rules.policy import Policy
from fleetplane.fleet.rollouts.rules.states import ENDED
from fleetplane.kernel.access import who
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.values.times import spelled, spelled_or_null


class RolloutShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of one thing."""


class RolloutReason(RolloutShape, frozen=True):
    code: str
    message: str


class RolloutTransition(RolloutShape, frozen=True):
    at: str
    before: str
    after: str
    actor: str
    reason: str


class RolloutTargetView(RolloutShape, frozen=True):
    id: str
    name: str
    state: str
    wave: int
    """Counted from 1; 0 before its wave has started."""
    before: str
    """The version that it had."""
    error: str
    attempts: int
    late: bool
    """Whether it came after the start."""


class RolloutView(RolloutShape, frozen=True):
    id: str
    subject: str
    scope: str
    to: str
    phase: str
    wave: int
    waves: Sequence[str]
    total: int
    """Targets at the start and those that came later."""
    counts: Mapping[str, int]
    """Targets by state; at the end each has exactly one outcome."""
    halt: Sequence[RolloutReason]
    """Why it halted."""
    reasons: Sequence[RolloutReason]
    """What it waits for now."""
    actor: str
    reason: str
    started_at: str
    ended_at: str | None
    supersedes: str
    automatic: bool
    revision: int
    history: Sequence[RolloutTransition] = ()
    """Only of one that was asked for, as its targets."""
    targets: Sequence[RolloutTargetView] = ()


class RolloutList(RolloutShape, frozen=True):
    rollouts: Sequence[RolloutView]


class RolloutPlanWave(RolloutShape, frozen=True):
    wave: str
    targets: Sequence[str]
    offline: Sequence[str]


class RolloutPlanGate(RolloutShape, frozen=True):
    name: str
    query: str
    value: float | None
    """Over the last hour."""
    baseline: float | None
    """Over the hour before that; null where the gate does not compare."""
    passed: bool
    message: str
    """Why it is not passed, or was not rehearsed."""


class RolloutPlan(RolloutShape, frozen=True):
    to: str
    waves: Sequence[RolloutPlanWave]
    already: int
    """Targets that have the version."""
    blockers: Sequence[str]
    """Why it would not begin at once."""
    gates: Sequence[RolloutPlanGate] = ()
    """Rehearsed on the last hour."""


class RolloutMeasure(RolloutShape, frozen=True):
    name: str
    summary: str


class RolloutSubject(RolloutShape, frozen=True):
    name: str
    summary: str
    measures: Sequence[RolloutMeasure]


class RolloutSubjects(RolloutShape, frozen=True):
    subjects: Sequence[RolloutSubject]


class RolloutPolicyView(RolloutShape, frozen=True):
    subject: str
    scope: str
    policy: Policy
    manual: bool
    supersedes: bool
    actor: str


class RolloutHolder(RolloutShape, frozen=True):
    subject: str
    scope: str
    """As it is stored."""


class RolloutHolders(RolloutShape, frozen=True):
    holders: Sequence[RolloutHolder]
    hidden: int = 0
    """How many more there are, at scopes that the caller may not see."""


class RolloutPolicies(RolloutShape, frozen=True):
    policies: Sequence[RolloutPolicyView]


def brief(rollout: Rollout, reasons: Iterable[Reason] = ()) -> RolloutView:
    """A rollout without its targets and its history."""
    spec, status = rollout.spec, status_of(rollout)
    return RolloutView(
        id=rollout.name,
        subject=spec.subject,
        scope=rollout.scope,
        to=spec.to,
        phase=status.phase,
        wave=status.wave,
        waves=spec.policy.waves,
        total=sum(status.counts.values()),
        counts=status.counts,
        halt=[RolloutReason(code=one.code, message=one.message) for one in status.halt],
        reasons=[RolloutReason(code=one.code, message=one.message) for one in reasons],
        actor=who(spec.actor),
        reason=spec.reason,
        started_at=spelled(spec.started_at_ns),
        ended_at=spelled_or_null(status.ended_at_ns),
        supersedes=spec.supersedes,
        automatic=spec.automatic,
        revision=rollout.revision,
    )


def whole(rollouts: Rollouts, rollout: Rollout) -> RolloutView:
    """A rollout with everything that is known of it."""
    found = rollouts.explain(rollout)
    ended = status_of(rollout).phase in ENDED
    reasons = () if found is None or ended else found.reasons
    history = [
        RolloutTransition(
            at=spelled(one.at_ns), before=one.before, after=one.after, actor=one.actor, reason=one.reason
        )
        for one in status_of(rollout).history
    ]
    targets = sorted(rollouts.targets(rollout), key=lambda one: (_wave(one), one.spec.title, one.name))
    return msgspec.structs.replace(
        brief(rollout, reasons), history=history, targets=[_target(one) for one in targets]
    )


def _wave(target: RolloutTarget) -> int:
    return (target.status.wave if target.status is not None else 0) or 10**6


def _target(found: RolloutTarget) -> RolloutTargetView:
    assert found.status is not None
    record = found.status
    return RolloutTargetView(
        id=found.name,
        name=found.spec.title,
        state=record.state,
        wave=record.wave,
        before=record.before,
        error=record.error,
        attempts=record.attempts,
        late=record.late,
    )


def planned(found: Planned) -> RolloutPlan:
    """What a dry run tells."""
    waves = [RolloutPlanWave(wave=one.wave, targets=one.targets, offline=one.offline) for one in found.waves]
    gates = [
        RolloutPlanGate(
            name=one.gate.name,
            query=one.gate.query,
            value=one.reading.value,
            baseline=one.reading.baseline,
            passed=not one.message,
            message=one.message,
        )
        for one in found.gates
    ]
    return RolloutPlan(to=found.to, waves=waves, already=found.already, blockers=found.blockers, gates=gates)


def subject(found: VersionedSubject) -> RolloutSubject:
    """One thing that can be rolled out."""
    measures = [RolloutMeasure(name=name, summary=text) for name, text in sorted(found.measures.items())]
    return RolloutSubject(name=found.name, summary=found.summary, measures=measures)


def policy(found: RolloutPolicy) -> RolloutPolicyView:
    """A policy with where it holds."""
    spec = found.spec
    return RolloutPolicyView(
        subject=found.name,
        scope=found.scope,
        policy=spec.policy,
        manual=not spec.automatic,
        supersedes=spec.supersedes,
        actor=who(spec.actor),
    )
